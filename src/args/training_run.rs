//! Flags that describe a whole training run.

use clap::Args;
use narrows_cost_model::{FailureTerms, Profile, TrainingRunTerms};

use crate::errors::{CommandResult, Failure, Problem, Problems};

use super::units;

const SECONDS_PER_HOUR: f64 = 3600.0;

/// Time from a failure to the next step if no flag sets it: five minutes, an assumption.
const RESTART_S: f64 = 300.0;

/// Flags of a whole training run.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Training run")]
pub struct TrainingRunArgs {
    /// Report time, cost and energy of a run of this many tokens, such as 300e9
    #[arg(long, value_name = "N", value_parser = units::tokens)]
    pub tokens: Option<f64>,
    /// Price of one device for one hour, in dollars [default: that of the hardware profile, if it has one]
    #[arg(long, value_name = "DOLLARS", value_parser = units::dollars_per_hour)]
    pub price_per_device_hour: Option<f64>,
    /// Electrical power of one device with its share of the host, in watts
    #[arg(long, value_name = "WATTS", value_parser = units::non_negative)]
    pub power_watts: Option<f64>,
    /// Mean time between failures of one device, in hours; needs --checkpoint-seconds
    #[arg(long, value_name = "HOURS", value_parser = units::positive)]
    pub mtbf_hours: Option<f64>,
    /// Seconds that training pauses for a checkpoint; the interval between checkpoints is assumed optimal
    #[arg(long, value_name = "SECONDS", value_parser = units::positive)]
    pub checkpoint_seconds: Option<f64>,
    /// Seconds from a failure to the next step [default: 300]
    #[arg(long, value_name = "SECONDS", value_parser = units::non_negative)]
    pub restart_seconds: Option<f64>,
}

/// The price of a device, for the cost of a step.
#[derive(Clone, Debug, Default, Args)]
pub struct DevicePriceArgs {
    /// Price of one device for one hour, in dollars, with --objective cost [default: that of the hardware profile, if it has one]
    #[arg(long, value_name = "DOLLARS", value_parser = units::dollars_per_hour)]
    pub price_per_device_hour: Option<f64>,
}

impl DevicePriceArgs {
    /// Rejects a price where no cost is reported.
    ///
    /// # Errors
    /// A price without `--objective cost`.
    pub fn require_cost(&self, reports_cost: bool) -> CommandResult<()> {
        if self.price_per_device_hour.is_none() || reports_cost {
            return Ok(());
        }
        let message = "is for the cost of a step, which is stated where it is minimised";
        Err(Failure::input(
            Problem::new("--price-per-device-hour", message).hint("--objective cost"),
        ))
    }

    /// The price: that of the flag, or of the profile.
    pub fn of(&self, profile: &Profile) -> Option<f64> {
        self.price_per_device_hour.or(profile.file().price_per_device_hour)
    }
}

impl TrainingRunArgs {
    /// The terms of the run; `None` without `--tokens`. The price is that of the flag.
    ///
    /// # Errors
    /// Flags of a run without `--tokens`, apart from the price where the cost of a step is reported, and failures
    /// without the time of a checkpoint or the reverse.
    pub fn resolve(&self, reports_cost: bool) -> CommandResult<Option<TrainingRunTerms>> {
        let Some(tokens) = self.tokens else {
            return self.reject_without_tokens(reports_cost).map(|()| None);
        };
        let failures = match (self.mtbf_hours, self.checkpoint_seconds) {
            (Some(hours), Some(checkpoint_s)) => Some(FailureTerms {
                device_mtbf_s: hours * SECONDS_PER_HOUR,
                checkpoint_s,
                restart_s: self.restart_seconds.unwrap_or(RESTART_S),
            }),
            (None, None) if self.restart_seconds.is_none() => None,
            (mtbf, _) => {
                let [of_failures, of_checkpoints] =
                    [("--mtbf-hours", "50000"), ("--checkpoint-seconds", "60")];
                let (flag, (missing, hint)) = match (mtbf, self.checkpoint_seconds) {
                    (Some(_), _) => (of_failures.0, of_checkpoints),
                    (None, Some(_)) => (of_checkpoints.0, of_failures),
                    (None, None) => ("--restart-seconds", of_failures),
                };
                let problem = Problem::new(flag, format!("needs {missing}"));
                return Err(Failure::input(problem.hint(format!("{missing} {hint}"))));
            }
        };
        Ok(Some(TrainingRunTerms {
            tokens,
            price_per_device_hour: self.price_per_device_hour,
            device_watts: self.power_watts,
            failures,
        }))
    }

    /// The price of one device for one hour: that of the flag, or of the profile.
    pub fn price(&self, profile: &Profile) -> Option<f64> {
        self.price_per_device_hour.or(profile.file().price_per_device_hour)
    }

    fn reject_without_tokens(&self, reports_cost: bool) -> CommandResult<()> {
        let price = self.price_per_device_hour.filter(|_| !reports_cost);
        let flags = [
            ("--price-per-device-hour", price),
            ("--power-watts", self.power_watts),
            ("--mtbf-hours", self.mtbf_hours),
            ("--checkpoint-seconds", self.checkpoint_seconds),
            ("--restart-seconds", self.restart_seconds),
        ];
        let mut problems = Problems::default();
        for (flag, _) in flags.iter().filter(|(_, value)| value.is_some()) {
            let message = "describes a training run, whose length is missing";
            let problem = Problem::new(*flag, message).hint("--tokens 300e9");
            problems.push(match *flag {
                "--price-per-device-hour" => {
                    problem.hint("or --objective cost, for the cost of a step")
                }
                _ => problem,
            });
        }
        problems.into_result()
    }
}
