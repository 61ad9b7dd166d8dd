//! Flags of `whatif`.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};

use clap::Args;
use serde_json::Value;

use crate::errors::{CommandResult, Failure, Problem};
use crate::plot::PlotKind;
use crate::text::thousands;
use crate::whatif::{
    BreakEvenAlternative, BreakEvenValues, Condition, Extreme, Scenario, Sweep, SweepAxis,
    SweepField, parse_range, parse_values, sorted_numbers,
};

use super::documents::DocumentFiles;
use super::framework::RefusedFrameworkArgs;
use super::output::{Detail, DetailArgs, FormatArgs, OutputFormat, resolve_csv};
use super::plan::PlanningArgs;
use super::training_run::TrainingRunArgs;

/// Points from which on a sweep asks before it starts.
const POINTS_ASKED: usize = 10_000;

/// Most points of a sweep, all of whose requests are in memory.
const POINTS_MAX: usize = 1_000_000;

/// Flags of `whatif`.
#[derive(Debug, Args)]
pub struct WhatIfArgs {
    /// Sweep a field over values such as 4,8,16, 8..64+8 or 8..512*2; repeatable
    ///
    /// FIELD is a flag of this command (devices, global_batch, strategy), `rank`, a field of the model file
    /// (model.blocks.count) or a number of the hardware profile (hardware.links.inter_node.bandwidth_gbps, in GB/s).
    #[arg(long, value_name = "FIELD=VALUES")]
    pub sweep: Vec<String>,
    /// Pair the values of all fields, instead of planning every combination
    #[arg(long)]
    pub zip: bool,
    /// Find the smallest value of --vary for which a condition holds: `fits`, or a comparison such as "step_time_s < 0.4"
    ///
    /// Quantities: step_time_s, tokens_per_s, mfu, memory_gib; with --tokens also days, device_hours, dollars,
    /// energy_kwh, goodput. Up to 16 values are all planned, more are bisected.
    #[arg(long, value_name = "CONDITION", requires = "vary", conflicts_with_all = ["sweep", "zip"])]
    pub until: Option<String>,
    /// Field and values to search with --until, such as devices=8..512*2
    #[arg(long, value_name = "FIELD=VALUES", requires = "until")]
    pub vary: Option<String>,
    /// Find the largest value instead of the smallest
    #[arg(long, requires = "until")]
    pub largest: bool,
    /// Find the values of a field at which one of two alternatives overtakes the other: FIELD=LOW..HIGH, or a list
    ///
    /// A range of a hardware number or of memory_limit is planned on a logarithmic grid, and every change of the faster alternative is
    /// bisected to one percent.
    #[arg(long, value_name = "FIELD=VALUES", requires = "between")]
    #[arg(conflicts_with_all = ["sweep", "zip", "until"])]
    pub break_even: Option<String>,
    /// The two alternatives of --break-even, such as btp+tensor=8,data-parallel
    ///
    /// The step times of their plans are compared, whichever --objective chooses these. Each has terms separated by
    /// `+`: a strategy (btp), data-parallel, tensor-parallel, pipeline-parallel, or FIELD=VALUE.
    #[arg(long, value_name = "A,B", requires = "break_even")]
    pub between: Option<String>,
    /// List the fields that can be swept, with their present values
    #[arg(long)]
    pub list: bool,
    /// Write one row per point to this CSV file, or `-`
    #[arg(long, value_name = "FILE")]
    pub csv: Option<OsString>,
    /// Do not ask before sweeps of more than 10,000 points
    #[arg(long)]
    pub yes: bool,
    /// Picture and page.
    #[command(flatten)]
    pub documents: DocumentFiles,
    /// Planning request.
    #[command(flatten)]
    pub planning: PlanningArgs,
    /// Another framework.
    #[command(flatten)]
    pub framework: RefusedFrameworkArgs,
    /// Output format.
    #[command(flatten)]
    pub format: FormatArgs,
    /// Detail of the report.
    #[command(flatten)]
    pub detail: DetailArgs,
    /// Training run.
    #[command(flatten)]
    pub training_run: TrainingRunArgs,
}

/// Settings of `whatif`.
#[derive(Debug)]
pub struct WhatIfSettings {
    /// The base request.
    pub scenario: Scenario,
    /// Task of the command.
    pub task: WhatIfTask,
    /// Text or JSON.
    pub format: OutputFormat,
    /// Detail of the report.
    pub detail: Detail,
}

/// Task of `whatif`.
#[derive(Debug)]
pub enum WhatIfTask {
    /// Lists the fields.
    List,
    /// Finds the values at which one alternative overtakes the other.
    BreakEven {
        /// The field.
        field: SweepField,
        /// Values of the field.
        values: BreakEvenValues,
        /// The alternatives.
        between: [BreakEvenAlternative; 2],
        /// File for the rows.
        csv: Option<OsString>,
        /// Picture and page.
        documents: DocumentFiles,
    },
    /// Plans the points of a sweep.
    Sweep {
        /// The swept fields.
        axes: Vec<SweepAxis>,
        /// Combination of the fields.
        sweep: Sweep,
        /// Condition of which the first or last value is searched, if any; there is one field then.
        until: Option<(Condition, Extreme)>,
        /// File for the rows.
        csv: Option<OsString>,
        /// Picture and page.
        documents: DocumentFiles,
    },
}

impl WhatIfArgs {
    /// The settings.
    ///
    /// # Errors
    /// Inputs that cannot be read, unknown fields, and sweeps that are empty or too large.
    pub fn resolve(&self) -> CommandResult<WhatIfSettings> {
        self.framework.refuse()?;
        let (format, detail) = (self.format.format, self.detail.resolve());
        let csv_file = [("--csv", self.csv.as_deref())];
        let fields: Vec<String> = self.sweep.iter().chain(&self.vary).cloned().collect();
        let flag = if self.vary.is_some() { "--vary" } else { "--sweep" };
        let (mut scenario, mut axes) =
            Scenario::new(self.planning.clone(), self.training_run.clone(), (flag, &fields))?;
        if self.list {
            return Ok(WhatIfSettings { scenario, task: WhatIfTask::List, format, detail });
        }
        if let (Some(field), Some(between)) = (&self.break_even, &self.between) {
            let (field, values) = break_even_values(field, &scenario)?;
            let between = alternatives(between, &field, &mut scenario)?;
            let csv = resolve_csv(self.csv.as_ref(), format)?;
            let documents =
                self.documents.resolve(&[PlotKind::Lines, PlotKind::Crossover], &csv_file)?;
            let task = WhatIfTask::BreakEven { field, values, between, csv, documents };
            return Ok(WhatIfSettings { scenario, task, format, detail });
        }
        if axes.is_empty() {
            let problem = Problem::new("--sweep", "names no field to sweep");
            let hint =
                "--sweep devices=8..64*2; `narrows whatif --list --model NAME` names all fields";
            return Err(Failure::input(problem.hint(hint)));
        }
        let sweep = if self.zip { Sweep::Zip } else { Sweep::Product };
        if sweep == Sweep::Product {
            axes.iter_mut().for_each(SweepAxis::remove_repetitions);
        }
        let until = self.condition()?;
        if until.is_some() {
            axes.iter_mut().try_for_each(SweepAxis::sort_numbers).map_err(Failure::input)?;
        }
        self.confirm(sweep.size(&axes)?)?;
        for SweepAxis { field, values } in &axes {
            confirm_ranges(&scenario, flag, field, values)?;
        }
        let csv = resolve_csv(self.csv.as_ref(), format)?;
        let documents = self.documents.resolve(PlotKind::OF_SWEEP, &csv_file)?;
        let task = WhatIfTask::Sweep { axes, sweep, until, csv, documents };
        Ok(WhatIfSettings { scenario, task, format, detail })
    }

    /// The condition of `--until`, and the end of the values that is searched.
    fn condition(&self) -> CommandResult<Option<(Condition, Extreme)>> {
        let Some(text) = &self.until else { return Ok(None) };
        let extreme = if self.largest { Extreme::Largest } else { Extreme::Smallest };
        let condition = Condition::parse(text).map_err(Failure::input)?;
        Ok(Some((condition, extreme)))
    }

    /// Asks on a terminal whether a large sweep shall start.
    fn confirm(&self, points: usize) -> CommandResult<()> {
        if points > POINTS_MAX {
            let most = thousands(POINTS_MAX as u64);
            let problem = Problem::new("--sweep", format!("the sweep has more than {most} points"));
            return Err(Failure::input(problem.hint("fewer values, or several sweeps")));
        }
        if points <= POINTS_ASKED || self.yes {
            return Ok(());
        }
        let size = format!("the sweep has {} points", thousands(points as u64));
        if std::io::stdin().is_terminal() && std::io::stderr().is_terminal() {
            let _ = write!(std::io::stderr(), "{size}. Plan them all? [y/N] ");
            let mut answer = String::new();
            let _ = std::io::stdin().read_line(&mut answer);
            if matches!(answer.trim(), "y" | "Y" | "yes") {
                return Ok(());
            }
        }
        let problem = Problem::new("--sweep", size);
        Err(Failure::input(problem.hint("fewer values, or --yes to plan them all")))
    }
}

/// The field and the values of `--break-even`.
fn break_even_values(
    text: &str,
    scenario: &Scenario,
) -> CommandResult<(SweepField, BreakEvenValues)> {
    let in_flag = |problem: Problem| Failure::input(problem.at("--break-even"));
    let problem = |message: String| Problem::new("--break-even", message);
    let Some((name, values)) = text.split_once('=') else {
        let hint = "FIELD=LOW..HIGH such as hardware.links.inter_node.bandwidth_gbps=5..400";
        return Err(Failure::input(problem(format!("`{text}` has no `=`")).hint(hint)));
    };
    let field = scenario.field(name.trim()).map_err(in_flag)?;
    scenario.confirm_effect(&field, &[]).map_err(in_flag)?;
    if let Some(range) = parse_range(&field, values) {
        let range = range.map_err(in_flag)?;
        if scenario.is_continuous(&field) {
            return Ok((field, BreakEvenValues::Range(range)));
        }
        if scenario.is_whole(&field) {
            let whole = range.map(|limit| limit.round().max(1.0));
            if whole[0] < whole[1] {
                return Ok((field, BreakEvenValues::WholeRange(whole)));
            }
            let message = format!("`{values}` has no two whole numbers, and `{field}` is one");
            return Err(Failure::input(problem(message).hint("a wider range")));
        }
        let message =
            format!("`{field}` does not take every number from {} to {}", range[0], range[1]);
        let hint = format!("values such as {field}={}..{}*2", range[0], range[1]);
        return Err(Failure::input(problem(message).hint(hint)));
    }
    let values = parse_values(values).map_err(in_flag)?;
    confirm_ranges(scenario, "--break-even", &field, &values)?;
    match sorted_numbers(&field, &values) {
        Some(numbers) if numbers.len() > 1 => Ok((field, BreakEvenValues::List(numbers))),
        _ => {
            let message = format!("`{text}` has no two numbers above zero");
            let hint = "a range such as 5..400, or a list such as 8..64*2";
            Err(Failure::input(problem(message).hint(hint)))
        }
    }
}

/// Confirms that the values of a field lie within its range, so that none is planned in vain.
fn confirm_ranges(
    scenario: &Scenario,
    flag: &str,
    field: &SweepField,
    values: &[Value],
) -> CommandResult<()> {
    let in_flag = |problem: Problem| Failure::input(problem.at(format!("{flag} {field}")));
    values.iter().try_for_each(|value| scenario.confirm_range(field, value).map_err(in_flag))
}

/// The two alternatives of `--between`, none of which sets what `varied` sets.
fn alternatives(
    text: &str,
    varied: &SweepField,
    scenario: &mut Scenario,
) -> CommandResult<[BreakEvenAlternative; 2]> {
    let [first, second] = text.split(',').collect::<Vec<_>>()[..] else {
        return Err(no_two_alternatives(text));
    };
    if first.trim() == second.trim() {
        return Err(no_two_alternatives(text));
    }
    let between = [
        BreakEvenAlternative::parse(first, scenario)?,
        BreakEvenAlternative::parse(second, scenario)?,
    ];
    for alternative in &between {
        for (field, value) in &alternative.settings {
            confirm_ranges(scenario, "--between", field, std::slice::from_ref(value))?;
        }
        let set =
            alternative.settings.iter().find(|(field, _)| varied.replaces(field, scenario.model()));
        if let Some((field, _)) = set {
            let message = format!("`{}` sets {field}, which --break-even varies", alternative.name);
            let problem = Problem::new("--between", message);
            let hint = format!("alternatives without {field}, or --break-even of another field");
            return Err(Failure::input(problem.hint(hint)));
        }
    }
    Ok(between)
}

fn no_two_alternatives(text: &str) -> Failure {
    let problem = Problem::new("--between", format!("`{text}` has no two alternatives"));
    Failure::input(problem.hint("two, such as btp+tensor=8,data-parallel"))
}
