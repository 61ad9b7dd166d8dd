//! The prediction for a plan: step time, memory, time breakdown and uncertainty.

use narrows_plan::{Bytes, Seconds};
use narrows_planner::Prediction;
use narrows_runtime::TimeCategory;
use schemars::JsonSchema;
use serde::Serialize;

use super::page::{Align, Cell, Page};
use super::{assumptions, exact_step, kernels};
use crate::args::Detail;
use crate::breakdown;
use crate::text::{interval_90, percent, rate, thousands};

/// Most stages whose memory is listed; of more, the largest and the range of the others.
const STAGES_MAX: usize = 4;

/// A prediction with the memory limit that it is compared to.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Prediction")]
pub struct PredictionReport<'a> {
    #[serde(flatten)]
    pub prediction: &'a Prediction,
    /// `null` without a limit.
    pub memory_limit_bytes: Option<u64>,
}

impl PredictionReport<'_> {
    /// Step time, throughput and memory.
    pub fn fields(&self) -> Vec<(String, String)> {
        let prediction = self.prediction;
        let interval_s = prediction.step_time_interval_s;
        let interval = interval_90(interval_s, interval_s.map(Seconds));
        let step_time = Seconds(prediction.step_time_s);
        let tokens_per_s = thousands(prediction.tokens_per_s.round() as u64);
        let flop_rate = rate(prediction.flops_per_s_per_device, "FLOP");
        let mut fields = vec![
            ("step time".to_owned(), format!("{step_time} ({interval})")),
            (
                "throughput".into(),
                format!(
                    "{tokens_per_s} tokens/s, {flop_rate} a device, MFU {}",
                    percent(prediction.mfu)
                ),
            ),
        ];
        fields.extend(
            prediction.exact_step.as_ref().map(|step| ("LORO".into(), exact_step::phrase(step))),
        );
        let stages = prediction.peak_memory_bytes.iter().copied().map(Bytes).enumerate();
        let name = |stage: usize| match prediction.peak_memory_bytes.len() {
            1 => "memory".to_owned(),
            _ => format!("memory of stage {stage}"),
        };
        match prediction.peak_memory_bytes.len() {
            ..=STAGES_MAX => {
                fields.extend(stages.map(|(stage, bytes)| (name(stage), self.memory(bytes))));
            }
            _ => {
                // Of equal stages the first.
                let largest = stages.clone().rev().max_by_key(|(_, bytes)| *bytes);
                let (stage, _) = largest.unwrap_or_default();
                let others = stages.filter(|(other, _)| *other != stage).map(|(_, bytes)| bytes);
                let least = others.clone().min().unwrap_or_default();
                let most = others.max().unwrap_or_default();
                let peak = self.memory(prediction.peak_memory());
                let text = format!("{peak} on stage {stage}; {least} to {most} on the others");
                fields.push(("memory".into(), text));
            }
        }
        fields
    }

    /// Step time, throughput, memory and the parts of the step in sentences.
    pub fn summary(&self) -> String {
        let prediction = self.prediction;
        let [low, high] = prediction.step_time_interval_s.map(Seconds);
        let seconds = |category| breakdown::predicted_s(&prediction.breakdown_s, category);
        let mut parts = TimeCategory::ALL;
        parts.sort_by(|a, b| seconds(*b).total_cmp(&seconds(*a)));
        let part = |category| {
            let share = percent(seconds(category) / prediction.step_time_s);
            format!("{} ({share})", breakdown::title(category))
        };
        let peak = prediction.peak_memory();
        let memory = self.memory(peak);
        let assumed = match prediction.assumed.is_empty() {
            true => "All numbers of the hardware were measured.".to_owned(),
            false => {
                "Some numbers of the hardware are assumed, not measured: see Uncertainty.".into()
            }
        };
        format!(
            "A step takes {}, with 90 % probability between {low} and {high}: {} tokens/s, or {} of the devices' peak \
             FLOP/s. Its largest parts are {} and {}. The largest stage needs {memory}. {assumed}",
            Seconds(prediction.step_time_s),
            thousands(prediction.tokens_per_s.round() as u64),
            percent(prediction.mfu),
            part(parts[0]),
            part(parts[1]),
        )
    }

    fn memory(&self, peak: Bytes) -> String {
        match self.memory_limit_bytes.map(Bytes) {
            None => format!("{peak} per device, no limit"),
            Some(limit) if peak > limit => {
                format!("{peak} per device, which exceeds the limit of {limit}")
            }
            Some(limit) => {
                let share = percent(peak.as_f64() / limit.as_f64());
                format!("{peak} per device of {limit} ({share})")
            }
        }
    }

    /// Time and share of every category with a time above zero.
    pub fn breakdown(&self, page: &mut Page) {
        let Prediction { breakdown_s, step_time_s, .. } = self.prediction;
        let seconds = |category| breakdown::predicted_s(breakdown_s, category);
        let rows: Vec<Vec<Cell>> = TimeCategory::ALL
            .into_iter()
            .filter(|category| seconds(*category) > 0.0)
            .map(|category| {
                let time = seconds(category);
                let share = percent(time / step_time_s);
                let title = breakdown::title(category).to_owned();
                vec![title.into(), Seconds(time).into(), share.into()]
            })
            .collect();
        page.heading("Where the time goes");
        page.table(&[("", Align::Left), ("time", Align::Right), ("share", Align::Right)], &rows);
    }

    /// Assumptions of the prediction, and kernels far from measured shapes.
    pub fn uncertainty(&self, page: &mut Page, detail: Detail) {
        page.heading("Uncertainty");
        assumed(page, &self.prediction.assumed, detail);
        kernels::unmeasured(page, self.prediction, detail);
    }
}

/// Clause about a plan that needs more memory than a device may use; `None` where it fits.
pub fn exceeded_memory(name: &str, prediction: &Prediction, limit: Bytes) -> Option<String> {
    let peak = prediction.peak_memory();
    let [needed, limit_text] = peak.distinct(limit);
    (peak > limit).then(|| format!("{name} needs {needed} per device, the limit is {limit_text}"))
}

/// The parts of the profile that are assumed.
pub fn assumed(page: &mut Page, paths: &[String], detail: Detail) {
    if paths.is_empty() {
        return;
    }
    page.paragraph(&format!("Assumed, not measured: {}.", assumptions::phrase(paths)));
    if detail == Detail::Full {
        page.paragraph(&format!("Fields of the profile: {}.", paths.join(", ")));
    }
}
