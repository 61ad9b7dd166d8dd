//! Pictures of a plan: its step time by part, and its memory.

use narrows_plan::Seconds;
use narrows_plan::program::{BufferRole, Program, StageProgram};
use narrows_planner::Prediction;
use narrows_runtime::TimeCategory;

use super::picture::Picture;
use super::stacked_bars::{Bar, StackedBars};
use super::{PALETTE, category_colour};
use crate::breakdown;

/// The step time of plans by part; `None` without plans.
pub fn step_time_picture(title: &str, plans: &[(&str, &Prediction)]) -> Option<Picture> {
    let seconds = |plan: &Prediction, category| breakdown::predicted_s(&plan.breakdown_s, category);
    let is_used =
        |category: &TimeCategory| plans.iter().any(|(_, plan)| seconds(plan, *category) > 0.0);
    let used: Vec<TimeCategory> = TimeCategory::ALL.into_iter().filter(is_used).collect();
    let bar = |(name, plan): &(&str, &Prediction)| Bar {
        name: (*name).to_owned(),
        values: used.iter().map(|category| 1e3 * seconds(plan, *category)).collect(),
        interval: Some(plan.step_time_interval_s.map(|time| 1e3 * time)),
        note: Seconds(plan.step_time_s).to_string(),
    };
    let bars = StackedBars {
        title: title.to_owned(),
        axis_label: "step time in ms (whisker: 90 % interval)".into(),
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
        values: memory_parts(program).map(gib).to_vec(),
        interval: None,
        note: program.arena.to_string(),
    };
    let names = ["weights", "gradients", "optimizer states", "activations"].map(str::to_owned);
    let bars = StackedBars {
        title: title.to_owned(),
        axis_label: "peak memory of a device in GiB".into(),
        parts: names.into_iter().zip(PALETTE).collect(),
        bars: program.stages.iter().enumerate().map(bar).collect(),
        limit: limit_bytes.map(|bytes| (gib(bytes), "limit".to_owned())),
    };
    bars.picture()
}

/// Bytes of weights, gradients and optimizer states, and the rest of the arena, which activations share.
fn memory_parts(stage: &StageProgram) -> [u64; 4] {
    let bytes = |is_counted: &dyn Fn(BufferRole) -> bool| -> u64 {
        let counted = stage.buffers.iter().filter(|buffer| is_counted(buffer.role));
        counted.map(|buffer| buffer.extent.bytes().0).sum()
    };
    let weights = bytes(&|role| role == BufferRole::Weight);
    let gradients = bytes(&|role| role == BufferRole::WeightGradient);
    let states = bytes(&BufferRole::is_optimizer_state);
    let rest = stage.arena.0.saturating_sub(weights + gradients + states);
    [weights, gradients, states, rest]
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1_u64 << 30) as f64
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::profile;
    use narrows_plan::model::presets;
    use narrows_planner::{Request, search};

    use super::*;

    #[test]
    fn parameters_take_two_bytes_and_their_gradients_and_states_sixteen() {
        let model = presets::find("cola-60m").unwrap();
        let parameters = model.parameters();
        let profile = profile::preset("a100-80gb").unwrap();
        let program =
            search(&Request::new(model, profile, 1, 1, 128)).best.expect("a plan").program;
        let stage = &program.program().stages[0];
        let [weights, gradients, states, rest] = memory_parts(stage);
        assert_eq!([weights, gradients, states], [2, 4, 12].map(|bytes| bytes * parameters));
        let activations = stage.buffers.iter().filter(|b| b.role == BufferRole::Activation);
        let largest = activations.map(|buffer| buffer.extent.bytes().0).max();
        assert!(Some(rest) >= largest, "{rest} of {largest:?}");
    }
}
