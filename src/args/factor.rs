//! Flags of `factor`.

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use clap::Args;
use narrows_plan::model::Model;
use narrows_runtime::interchange::RankChoice;

use crate::errors::{CommandResult, Failure, Problem};
use crate::input;

use super::output::FormatArgs;

/// Flags of `factor`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("choice").required(true).args(["rank", "energy"]))]
pub struct FactorArgs {
    /// Dense weights as --init-from of `run` reads them, or a checkpoint
    #[arg(value_name = "WEIGHTS")]
    pub weights: PathBuf,
    /// Model of the weights: a preset, a model file or a Hugging Face config.json
    #[arg(long, value_name = "NAME|FILE")]
    pub model: OsString,
    /// Rank of every linear
    #[arg(long, value_name = "N")]
    pub rank: Option<NonZeroU64>,
    /// Share of the sum of squared singular values that each linear keeps, with the least rank that does so
    ///
    /// A linear stays dense where its factors would have as many parameters.
    #[arg(long, value_name = "SHARE")]
    pub energy: Option<f64>,
    /// New folder for the factors and the model file
    #[arg(long, short, value_name = "DIR")]
    pub output: PathBuf,
    /// Output format.
    #[command(flatten)]
    pub format: FormatArgs,
}

/// Settings of `factor`.
#[derive(Debug)]
pub struct FactorSettings<'a> {
    /// The dense weights.
    pub weights: &'a Path,
    /// The dense model.
    pub model: Model,
    /// Choice of the ranks.
    pub choice: RankChoice,
}

impl FactorArgs {
    /// The settings.
    ///
    /// # Errors
    /// A model that cannot be read, and a share outside (0, 1].
    pub fn resolve(&self) -> CommandResult<FactorSettings<'_>> {
        let model = input::model(&self.model)?;
        let choice = match (self.rank, self.energy) {
            (Some(rank), _) => RankChoice::Rank(rank.get()),
            (None, Some(energy)) if energy > 0.0 && energy <= 1.0 => RankChoice::Energy(energy),
            (None, energy) => {
                let message =
                    format!("{} is not a share of the energy", energy.unwrap_or_default());
                let problem = Problem::new("--energy", message).hint("a share above 0, at most 1");
                return Err(Failure::input(problem));
            }
        };
        Ok(FactorSettings { weights: &self.weights, model, choice })
    }
}
