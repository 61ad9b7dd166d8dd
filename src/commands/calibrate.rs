//! `narrows calibrate`: measures this machine, and writes its profile.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use narrows_calibration::fit::{GpuModel, fit_cpu_profile, fit_gpu_profile};
use narrows_calibration::validation::preset_coverage;
use narrows_cost_model::{Profile, profile};
use narrows_runtime::MeasurementEffort;
use narrows_runtime::session::Session;

use crate::args::calibrate::{
    CalibrateArgs, CalibrateSettings, CalibrateTarget, calibrate as resolve,
};
use crate::args::low::OutputFormat;
use crate::args::run::{GLOBAL_BATCH, SEQUENCE_LENGTH};
use crate::calibrate::cache::{self, CachedProfileKey};
use crate::calibrate::compare::compare;
use crate::calibrate::gpu::{self, GpuProcesses};
use crate::calibrate::works::{Benchmark, BenchmarkExtent, to_compare, to_measure};
use crate::calibrate::{DeviceSharing, MeasurementRounds, PlannedBenchmark, machine};
use crate::calibrate::{points, repeatability, run as run_rounds};
use crate::errors::{CommandResult, Failure, Problem};
use crate::output;
use crate::report::calibration::CalibrationReport;

/// What plans to measure processors are searched on: the shapes are what matters.
const BASE: &str = "cpu-local";

/// A few seconds.
const QUICK: MeasurementRounds = MeasurementRounds { rounds: 2, effort: effort(1, 250) };
/// Some minutes.
const WHOLE: MeasurementRounds = MeasurementRounds { rounds: 4, effort: effort(2, 400) };

const fn effort(least: usize, milliseconds: u64) -> MeasurementEffort {
    MeasurementEffort {
        warm_up_steps: 1,
        timed_steps_min: least,
        timed_steps_max: 20,
        time_limit: Duration::from_millis(milliseconds),
    }
}

/// Measures, writes, reports.
pub fn run(args: &CalibrateArgs) -> CommandResult<()> {
    let asked = resolve(args)?;
    match &asked.on {
        CalibrateTarget::Processors { threads } => on_processors(&asked, *threads),
        CalibrateTarget::Gpus { .. } => on_gpus(&asked),
    }
}

fn on_processors(asked: &CalibrateSettings, threads: u64) -> CommandResult<()> {
    let kept = CachedProfileKey::of_processors(threads);
    admit(asked, &kept)?;
    let base = profile::preset(BASE).map_err(Failure::flags)?;
    let works = to_measure(asked.amount, asked.model.as_ref(), asked.devices, &base)?;
    let others =
        if asked.compare { to_compare(asked.amount, asked.devices, &base)? } else { vec![] };
    let (mut subjects, count) = planned(works, others);
    measure(asked, &mut subjects, |subject| subject.on_processors(threads))?;
    let compared = subjects.split_off(count);
    let command = command(asked);
    let profile = fitted(threads, &command, &subjects)?;
    deliver(asked, &kept, profile, &subjects, &compared)
}

/// Every process measures; the first one fits, writes and speaks.
fn on_gpus(asked: &CalibrateSettings) -> CommandResult<()> {
    let CalibrateTarget::Gpus { launched, global_batch, sequence_length } = &asked.on else {
        return Ok(());
    };
    let Some(gpu) = gpu::first(launched.as_ref()) else {
        let problem = Problem::new("--backend", "this machine shows no GPU");
        return Err(Failure::failed(vec![problem.hint("`narrows doctor` says what is there")]));
    };
    let kept = CachedProfileKey::of_gpus(&gpu::title().unwrap_or_default(), asked.devices);
    if launched.is_none() {
        admit(asked, &kept)?;
    }
    let base = gpu::base(&gpu)?;
    let works = gpu::works::BenchmarkSelection {
        amount: asked.amount,
        also: asked.model.as_ref(),
        devices: asked.devices,
        global_batch: *global_batch,
        sequence_length: *sequence_length,
        profile: &base,
    };
    let others = if asked.compare { works.compared()? } else { vec![] };
    let (mut subjects, count) = planned(works.measured()?, others);
    let party = GpuProcesses::join(launched.clone(), &subjects, &command(asked))?;
    let mut measured = || {
        if launched.is_some() && asked.leads() {
            admit(asked, &kept)?;
        }
        measure(asked, &mut subjects, |subject| party.open(subject))?;
        if !asked.leads() {
            return Ok(());
        }
        let compared = subjects.split_off(count);
        let profile = fitted_to_gpus(asked, gpu.clone(), &base, &subjects)?;
        deliver(asked, &kept, profile, &subjects, &compared)
    };
    party.part(measured())
}

/// What is measured takes its time, so it is found out first whether it can be written.
fn admit(asked: &CalibrateSettings, kept: &CachedProfileKey) -> CommandResult<()> {
    match asked.output.as_deref() {
        Some(file) if output::is_stdout(file) => Ok(()),
        Some(file) => output::writable(Path::new(file)),
        None => kept.writable(asked.amount),
    }
}

/// Holds the profile against other plans, where that was asked for, writes it and reports.
fn deliver(
    asked: &CalibrateSettings,
    kept: &CachedProfileKey,
    mut profile: Profile,
    measured: &[PlannedBenchmark],
    compared: &[PlannedBenchmark],
) -> CommandResult<()> {
    let comparison = asked.compare.then(|| compare(&profile, compared, &command(asked)));
    if let Some(comparison) = &comparison {
        profile = comparison.apply_to(profile).map_err(|d| Failure::file("the profile", d))?;
    }
    let written = write(asked, kept, &profile)?;
    let presets = super::waiting("planning the presets", asked.format, || {
        preset_coverage(&profile, asked.devices, GLOBAL_BATCH, SEQUENCE_LENGTH)
    });
    let findings = CalibrationReport::of(&profile, measured.len(), presets, comparison, written);
    if let Some(warning) = profile.warning() {
        output::warn(&warning);
    }
    match asked.format {
        OutputFormat::Json => output::print_json(&findings),
        OutputFormat::Text if asked.output.as_deref().is_some_and(output::is_stdout) => {
            output::tell(&findings.text());
            Ok(())
        }
        OutputFormat::Text => output::print(&findings.text()),
    }
}

/// A profile of this machine for who did not name one: the one that is kept, or one measured in a few
/// seconds, and kept where that can be.
pub fn of_this_machine(threads: u64, format: OutputFormat) -> CommandResult<Profile> {
    let kept = CachedProfileKey::of_processors(threads);
    if let Some(profile) = kept.load() {
        return Ok(profile);
    }
    let base = profile::preset(BASE).map_err(Failure::flags)?;
    if format == OutputFormat::Text {
        output::tell(
            "Measuring this machine, once, for some seconds: `narrows calibrate` does it better\n",
        );
    }
    let asked = CalibrateSettings {
        output: None,
        model: None,
        on: CalibrateTarget::Processors { threads },
        devices: threads.min(2),
        amount: BenchmarkExtent::Quick,
        compare: false,
        format,
    };
    let (mut subjects, _) = planned(to_measure(asked.amount, None, asked.devices, &base)?, vec![]);
    measure(&asked, &mut subjects, |subject| subject.on_processors(threads))?;
    let profile = fitted(threads, "a quick measurement by `narrows run`", &subjects)?;
    match kept.store(asked.amount, &profile) {
        Ok(path) if format == OutputFormat::Text => {
            output::tell(&format!("Kept in {}\n", path.display()));
        }
        Ok(_) => {}
        Err(error) => {
            output::warn(&format!("the measurement is not kept for the next run: {error}"));
        }
    }
    Ok(profile)
}

/// Plans what is measured and what is compared. How many there are of the former, which come first.
fn planned(works: Vec<Benchmark>, others: Vec<Benchmark>) -> (Vec<PlannedBenchmark>, usize) {
    let mut subjects: Vec<PlannedBenchmark> =
        works.into_iter().filter_map(PlannedBenchmark::plan).collect();
    let count = subjects.len();
    subjects.extend(others.into_iter().filter_map(PlannedBenchmark::plan));
    (subjects, count)
}

/// Runs the plans to measure and the others in the same rounds.
fn measure(
    asked: &CalibrateSettings,
    subjects: &mut [PlannedBenchmark],
    open: impl FnMut(&PlannedBenchmark) -> CommandResult<Session>,
) -> CommandResult<()> {
    let rounds = match asked.amount {
        BenchmarkExtent::Quick => QUICK,
        BenchmarkExtent::Whole => WHOLE,
    };
    let progress = progress(subjects.len() * rounds.rounds, asked);
    let done = run_rounds(subjects, rounds, open, |subject| {
        progress.set_message(subject.work.name.clone());
        progress.inc(1);
    });
    progress.finish_and_clear();
    done
}

fn fitted(threads: u64, command: &str, measured: &[PlannedBenchmark]) -> CommandResult<Profile> {
    let machine = machine::describe(threads, command);
    let points = points(measured, DeviceSharing::Shared);
    let repeatability = repeatability(measured, &points);
    fit_cpu_profile(&machine, points, Some(repeatability))
        .map_err(|defects| Failure::file("the measurement", defects))
}

fn fitted_to_gpus(
    asked: &CalibrateSettings,
    gpu: GpuModel,
    base: &Profile,
    measured: &[PlannedBenchmark],
) -> CommandResult<Profile> {
    let machine = gpu::describe(gpu, asked.devices, &command(asked));
    let points = points(measured, DeviceSharing::Whole);
    let repeatability = repeatability(measured, &points);
    fit_gpu_profile(&machine, points, &gpu::steps(measured, base), Some(repeatability))
        .map_err(|defects| Failure::file("the measurement", defects))
}

/// The command that makes such a profile again.
fn command(asked: &CalibrateSettings) -> String {
    let mut words = vec!["`narrows calibrate".to_owned()];
    if asked.amount == BenchmarkExtent::Quick {
        words.push("--quick".into());
    }
    if let Some(model) = &asked.model {
        words.push(format!("--model {}", model.name));
    }
    if asked.compare {
        words.push("--compare".into());
    }
    match &asked.on {
        CalibrateTarget::Processors { threads } => {
            words.push(format!("--threads {threads} --devices {}", asked.devices));
        }
        CalibrateTarget::Gpus { global_batch, sequence_length, .. } => {
            words.push("--backend cuda".into());
            let sizes = [("--global-batch", global_batch), ("--sequence-length", sequence_length)];
            let given = sizes.into_iter().filter_map(|(flag, size)| Some((flag, (*size)?)));
            words.extend(given.map(|(flag, size)| format!("{flag} {size}")));
        }
    }
    format!("{}`", words.join(" "))
}

/// Says where it was written.
fn write(
    asked: &CalibrateSettings,
    kept: &CachedProfileKey,
    profile: &Profile,
) -> CommandResult<String> {
    let Some(file) = &asked.output else {
        let stored = kept.store(asked.amount, profile);
        let path = stored.map_err(|error| unkept(kept.path(asked.amount), &error))?;
        if let Some(preferred) = kept.found().filter(|found| *found != path) {
            output::warn(&format!(
                "{} is of a whole calibration, and stays what `run` predicts with: this quick one is beside it; \
                 --output FILE writes it elsewhere, and without that file `run` takes it",
                preferred.display()
            ));
        }
        return Ok(path.display().to_string());
    };
    let name = file.to_string_lossy().into_owned();
    let text = cache::text(profile).map_err(|error| output::unwritable(&name, &error))?;
    if output::is_stdout(file) {
        output::print(&text)?;
    } else {
        output::write_whole(Path::new(file), &text)
            .map_err(|error| output::unwritable(&name, &error))?;
    }
    Ok(name)
}

fn unkept(path: Option<PathBuf>, error: &io::Error) -> Failure {
    let place = path.map_or("the cache folder".into(), |path| path.display().to_string());
    output::unwritable(&place, error)
}

/// A bar, drawn on standard error, and only when that is a terminal.
fn progress(runs: usize, asked: &CalibrateSettings) -> ProgressBar {
    if asked.format == OutputFormat::Json || !asked.leads() {
        return ProgressBar::hidden();
    }
    let progress = ProgressBar::new(runs as u64);
    let template = "{spinner} {wide_bar} run {pos} of {len}, {msg}, {eta} to go";
    if let Ok(style) = ProgressStyle::with_template(template) {
        progress.set_style(style);
    }
    progress.enable_steady_tick(super::TICK);
    progress
}
