//! Categories of predicted and measured step time.

use std::collections::BTreeMap;

use narrows_cost_model::Breakdown;
use narrows_runtime::TimeCategory;

/// The name of a category in text.
pub fn title(category: TimeCategory) -> &'static str {
    match category {
        TimeCategory::Gemm => "GEMMs",
        TimeCategory::Attention => "attention",
        TimeCategory::Elementwise => "fused ops",
        TimeCategory::CollectiveExposed => "collectives, exposed",
        TimeCategory::Bubble => "pipeline bubble",
        TimeCategory::Optimizer => "optimizer",
        TimeCategory::Other => "other",
    }
}

/// The predicted seconds of a category.
pub fn predicted_s(breakdown: &Breakdown, category: TimeCategory) -> f64 {
    match category {
        TimeCategory::Gemm => breakdown.gemm,
        TimeCategory::Attention => breakdown.attention,
        TimeCategory::Elementwise => breakdown.elementwise,
        TimeCategory::CollectiveExposed => breakdown.collective_exposed,
        TimeCategory::Bubble => breakdown.bubble,
        TimeCategory::Optimizer => breakdown.optimizer,
        TimeCategory::Other => breakdown.other,
    }
}

/// All predicted seconds, by the names of the categories in JSON.
pub fn seconds_by_category(breakdown: &Breakdown) -> BTreeMap<&'static str, f64> {
    let seconds = |category: TimeCategory| (category.name(), predicted_s(breakdown, category));
    TimeCategory::ALL.into_iter().map(seconds).collect()
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::{StreamPrices, profile, simulate};
    use narrows_plan::Seconds;
    use narrows_plan::model::presets;
    use narrows_planner::{Request, search};

    use super::*;

    /// If every kernel takes one second, a breakdown counts instructions.
    #[test]
    fn measured_and_predicted_instructions_have_the_same_categories() {
        let model = presets::find("cola-tiny").unwrap();
        let profile = profile::preset("cpu-local").unwrap();
        let (tensor, pipeline, data) = (Some(2), Some(1), Some(2));
        let request = Request { tensor, pipeline, data, ..Request::new(model, profile, 4, 4, 16) };
        let program = search(&request).best.expect("a plan").program;
        let predicted_counts = seconds_by_category(
            &simulate(&program, StreamPrices::new(&|_| Seconds(1.0), None)).breakdown,
        );
        let mut counts: BTreeMap<&str, f64> =
            TimeCategory::ALL.iter().map(|category| (category.name(), 0.0)).collect();
        for scheduled in narrows_runtime::scheduled_instructions(&program.program().stages[0]) {
            *counts.get_mut(TimeCategory::of_instruction(scheduled.instr).name()).unwrap() += 1.0;
        }
        assert_eq!(counts, predicted_counts);
        let json = serde_json::to_value(Breakdown::default()).unwrap();
        let keys: Vec<&String> = json.as_object().unwrap().keys().collect();
        assert_eq!(keys, TimeCategory::ALL.map(TimeCategory::name));
    }
}
