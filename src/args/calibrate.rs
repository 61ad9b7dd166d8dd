//! The flags of `calibrate`, and what they mean.

use std::ffi::OsString;
use std::num::NonZeroU64;

use clap::Args;
use narrows_plan::model::Model;

use super::low::Format;
use super::run::cores;
use crate::calibrate::works::Amount;
use crate::errors::{Failure, Outcome, Problem};
use crate::input;
use crate::output;

/// Devices that are measured together, of who does not say.
const DEVICES_MAX: u64 = 8;

/// Flags of `calibrate`.
#[derive(Debug, Args)]
pub struct CalibrateArgs {
    /// Write the profile to this file, or `-` [default: where `run` looks for it]
    #[arg(long, value_name = "FILE")]
    pub output: Option<OsString>,
    /// Measure the shapes of this model's plans too: a preset, or a model file
    #[arg(long, value_name = "NAME|FILE")]
    pub model: Option<OsString>,
    /// Threads that the devices share [default: the machine's cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroU64>,
    /// Most devices that are measured together [default: one a thread, at most 8]
    #[arg(long, value_name = "N")]
    pub devices: Option<NonZeroU64>,
    /// Measure for a few seconds, and only what cola-tiny needs
    #[arg(long)]
    pub quick: bool,
    /// Run other plans in between, and compare their steps with what the profile says of them
    #[arg(long)]
    pub compare: bool,
    /// Form of the answer
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}

/// Everything that `calibrate` depends on.
#[derive(Debug)]
pub struct Calibration {
    /// Where the profile goes; `None` for where `run` looks for it.
    pub output: Option<OsString>,
    /// A model of which plans are measured too.
    pub model: Option<Model>,
    /// Threads that the devices share.
    pub threads: u64,
    /// Most devices.
    pub devices: u64,
    /// How much is measured.
    pub amount: Amount,
    /// Whether other plans are compared.
    pub compare: bool,
    /// Form of the answer.
    pub format: Format,
}

/// What is asked of `calibrate`.
pub fn calibrate(args: &CalibrateArgs) -> Outcome<Calibration> {
    let threads = args.threads.map_or(cores(), NonZeroU64::get);
    if threads > cores() {
        let problem = format!("{threads} threads would take turns on {} cores", cores());
        let problem =
            Problem::new("--threads", problem).hint("as many as there are cores, or fewer");
        return Err(Failure::input(problem));
    }
    let devices = args.devices.map_or(threads.min(DEVICES_MAX), NonZeroU64::get);
    if devices > threads {
        let problem = format!("{devices} devices would take turns on so few threads ({threads})");
        let problem =
            Problem::new("--devices", problem).hint("as many as there are threads, or fewer");
        return Err(Failure::input(problem));
    }
    if args.format == Format::Json && args.output.as_deref().is_some_and(output::is_stdout) {
        let problem = "the profile and the JSON answer would both go to standard output";
        return Err(Failure::input(Problem::new("--output", problem).hint("the name of a file")));
    }
    let model = args.model.as_deref().map(input::model).transpose()?;
    Ok(Calibration {
        output: args.output.clone(),
        model,
        threads,
        devices,
        amount: if args.quick { Amount::Quick } else { Amount::Whole },
        compare: args.compare,
        format: args.format,
    })
}
