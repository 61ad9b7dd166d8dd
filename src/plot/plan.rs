//! Pictures of a plan: its step time by part, and its memory.

use narrows_plan::Bytes;
use narrows_plan::program::{Program, StageProgram};
use narrows_planner::Prediction;
use narrows_runtime::TimeCategory;

use super::picture::Picture;
use super::stacked_bars::{Bar, StackedBars};
use super::{PALETTE, category_colour};
use crate::breakdown;
use crate::stage_memory::stage_memory;
use crate::unit::Unit;

/// The step time of plans by part; `None` without plans.
pub fn step_time_picture(title: &str, plans: &[(&str, &Prediction)]) -> Option<Picture> {
    let seconds = |plan: &Prediction, category| breakdown::predicted_s(&plan.breakdown_s, category);
    let is_used =
        |category: &TimeCategory| plans.iter().any(|(_, plan)| seconds(plan, *category) > 0.0);
    let used: Vec<TimeCategory> = TimeCategory::ALL.into_iter().filter(is_used).collect();
    let unit = Unit::Seconds.common(plans.iter().map(|(_, plan)| plan.step_time_s));
    let bar = |(name, plan): &(&str, &Prediction)| Bar {
        name: (*name).to_owned(),
        values: used.iter().map(|category| unit.scaled(seconds(plan, *category))).collect(),
        interval: Some(plan.step_time_interval_s.map(|time| unit.scaled(time))),
        note: unit.format(plan.step_time_s),
    };
    let bars = StackedBars {
        title: title.to_owned(),
        axis_label: format!("step time in {} (whisker: 90 % interval)", unit.symbol()),
        parts: used
            .iter()
            .map(|category| (breakdown::title(*category).to_owned(), category_colour(*category)))
            .collect(),
        bars: plans.iter().map(bar).collect(),
        limit: None,
    };
    bars.picture()
}

/// The memory of each stage by its use, against the limit of a device in bytes; `None` without stages.
pub fn memory_picture(title: &str, program: &Program, limit_bytes: Option<u64>) -> Option<Picture> {
    let bar = |(stage, program): (usize, &StageProgram)| Bar {
        name: format!("stage {stage}"),
        values: stage_memory(program).map(gib).to_vec(),
        interval: None,
        note: program.arena.to_string(),
    };
    let names = ["weights", "gradients", "optimizer states", "activations"].map(str::to_owned);
    let bars = StackedBars {
        title: title.to_owned(),
        axis_label: "peak memory of a device in GiB".into(),
        parts: names.into_iter().zip(PALETTE).collect(),
        bars: program.stages.iter().enumerate().map(bar).collect(),
        limit: limit_bytes.map(|bytes| (gib(Bytes(bytes)), "limit".to_owned())),
    };
    bars.picture()
}

fn gib(bytes: Bytes) -> f64 {
    bytes.as_f64() / (1_u64 << 30) as f64
}
