//! What the time of a step is spent on, predicted and measured, under one list of names.

use std::collections::BTreeMap;

use narrows_cost_model::Breakdown;
use narrows_runtime::TimeCategory;

/// What people call a part.
pub fn title(part: TimeCategory) -> &'static str {
    match part {
        TimeCategory::Gemm => "products",
        TimeCategory::Attention => "attention",
        TimeCategory::Elementwise => "element-wise",
        TimeCategory::CollectiveExposed => "collectives, exposed",
        TimeCategory::Bubble => "pipeline bubble",
        TimeCategory::Optimizer => "optimizer",
        TimeCategory::Other => "other",
    }
}

/// The predicted time of a part, in seconds.
pub fn predicted(breakdown: &Breakdown, part: TimeCategory) -> f64 {
    match part {
        TimeCategory::Gemm => breakdown.gemm,
        TimeCategory::Attention => breakdown.attention,
        TimeCategory::Elementwise => breakdown.elementwise,
        TimeCategory::CollectiveExposed => breakdown.collective_exposed,
        TimeCategory::Bubble => breakdown.bubble,
        TimeCategory::Optimizer => breakdown.optimizer,
        TimeCategory::Other => breakdown.other,
    }
}

/// All predicted times, in seconds, by the names they are written under.
pub fn by_name(breakdown: &Breakdown) -> BTreeMap<&'static str, f64> {
    TimeCategory::ALL.into_iter().map(|part| (part.name(), predicted(breakdown, part))).collect()
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::{profile, simulate};
    use narrows_plan::Seconds;
    use narrows_plan::model::presets;
    use narrows_planner::{Request, search};

    use super::*;

    /// Where every kernel takes a second, a breakdown counts instructions.
    #[test]
    fn instructions_count_as_the_part_that_they_are_predicted_in() {
        let model = presets::find("cola-tiny").unwrap();
        let profile = profile::preset("cpu-local").unwrap();
        let (tensor, pipeline, data) = (Some(2), Some(1), Some(2));
        let request = Request { tensor, pipeline, data, ..Request::new(model, profile, 4, 4, 16) };
        let program = search(&request).best.expect("a plan").program;
        let predicted_counts = by_name(&simulate(&program, &|_| Seconds(1.0)).breakdown);
        let mut counts: BTreeMap<&str, f64> =
            TimeCategory::ALL.iter().map(|part| (part.name(), 0.0)).collect();
        for moment in narrows_runtime::scheduled_instructions(&program.program().stages[0]) {
            *counts.get_mut(TimeCategory::of_instruction(moment.instr).name()).unwrap() += 1.0;
        }
        assert_eq!(counts, predicted_counts);
        let written = serde_json::to_value(Breakdown::default()).unwrap();
        let names: Vec<&String> = written.as_object().unwrap().keys().collect();
        assert_eq!(names, TimeCategory::ALL.map(TimeCategory::name), "one set of keys");
    }
}
