//! The report on a step under another framework.

use std::collections::BTreeMap;

use narrows_calibration::measurements::StepRecompute;
use narrows_calibration::{FrameworkPrediction, FrameworkStep, StepTerm};
use narrows_cost_model::profile::Provenance;
use narrows_cost_model::{StepEstimate, TrainingRunEstimate, TrainingRunTerms};
use narrows_plan::{Mesh, Seconds, Workload, Zero};
use narrows_planner::{Request, model_flops};
use serde::Serialize;

use super::page::{Align, Cell, Page};
use super::{Report, training_run};
use crate::args::Detail;
use crate::errors::CommandResult;
use crate::priced_plan::estimate_run;
use crate::text::{batch_phrase, count, interval_90, percent, plural, rate, thousands};

/// Output of `cost --framework`.
#[derive(Serialize)]
pub struct FrameworkReport<'a> {
    framework: FrameworkFields<'a>,
    model: &'a str,
    hardware: &'a str,
    step: StepFields,
    prediction: PredictionFields,
    fitted: FitFields<'a>,
    /// The training run, if one is estimated.
    #[serde(rename = "run", skip_serializing_if = "Option::is_none")]
    training_run: Option<TrainingRunEstimate>,
    #[serde(skip)]
    parameters: u64,
}

#[derive(Serialize)]
struct FrameworkFields<'a> {
    name: &'a str,
    description: &'a str,
    attention_kernel: &'a str,
}

#[derive(Serialize)]
struct StepFields {
    mesh: Mesh,
    workload: Workload,
    recompute: StepRecompute,
    zero: Zero,
    sequence_parallel: bool,
    chunks: u64,
}

#[derive(Serialize)]
struct PredictionFields {
    step_time_s: f64,
    step_time_interval_s: [f64; 2],
    tokens_per_s: f64,
    mfu: f64,
    flops_per_s_per_device: f64,
    /// Relative change of the step time for a relative change of one term.
    term_shares: BTreeMap<&'static str, f64>,
}

/// Sources of the values of the table and of the interval.
#[derive(Serialize)]
struct FitFields<'a> {
    values: &'a Provenance,
    interval: &'a Provenance,
}

/// The key of a term in JSON.
fn key(term: StepTerm) -> &'static str {
    match term {
        StepTerm::Gemm => "gemm",
        StepTerm::Attention => "attention",
        StepTerm::Memory => "memory",
        StepTerm::Collective => "collective",
        StepTerm::Host => "host",
    }
}

impl<'a> FrameworkReport<'a> {
    /// The report of a predicted step on the model and the hardware of a request.
    pub fn new(
        step: &'a FrameworkStep,
        request: &'a Request,
        prediction: &'a FrameworkPrediction,
    ) -> FrameworkReport<'a> {
        let Request { model, profile, .. } = request;
        let FrameworkStep { mesh, workload, recompute, chunks, .. } = *step;
        let time_s = prediction.step_time_s;
        let tokens = (workload.global_batch * workload.sequence_length) as f64;
        let of_sequence = model_flops(model, workload.sequence_length);
        let flops = of_sequence * workload.global_batch as f64;
        let dtype = profile.precision().compute_dtype();
        let peak = profile.total_peak_flops_per_s(mesh.devices(), dtype);
        FrameworkReport {
            framework: FrameworkFields {
                name: &step.framework,
                description: &prediction.description,
                attention_kernel: &prediction.attention_kernel,
            },
            model: &model.name,
            hardware: profile.name(),
            step: StepFields {
                mesh,
                workload,
                recompute,
                zero: prediction.zero,
                sequence_parallel: prediction.shards_tokens,
                chunks,
            },
            prediction: PredictionFields {
                step_time_s: time_s,
                step_time_interval_s: prediction.step_time_interval_s,
                tokens_per_s: tokens / time_s,
                mfu: flops / (peak * time_s),
                flops_per_s_per_device: flops / (time_s * mesh.devices() as f64),
                term_shares: prediction
                    .terms
                    .iter()
                    .map(|(of, share)| (key(*of), *share))
                    .collect(),
            },
            fitted: FitFields {
                values: &prediction.provenance,
                interval: &prediction.interval_provenance,
            },
            training_run: None,
            parameters: model.parameters(),
        }
    }

    /// Adds the training run that repeats the step, if one is to be estimated.
    ///
    /// # Errors
    /// Failures so frequent that the run makes no progress.
    pub fn with_training_run(
        self,
        terms: Option<&TrainingRunTerms>,
    ) -> CommandResult<FrameworkReport<'a>> {
        let Workload { global_batch, sequence_length, .. } = self.step.workload;
        let step = StepEstimate {
            devices: self.step.mesh.devices(),
            tokens: global_batch * sequence_length,
            time_s: self.prediction.step_time_s,
            interval_s: self.prediction.step_time_interval_s,
        };
        let training_run = estimate_run(terms, &step)?;
        Ok(FrameworkReport { training_run, ..self })
    }

    fn step_fields(&self) -> Vec<(&'static str, String)> {
        let StepFields { mesh, workload, recompute, zero, sequence_parallel, chunks } = &self.step;
        let batch = batch_phrase(workload.global_batch, workload.sequence_length);
        let microbatches = plural(workload.microbatches(mesh), "microbatch");
        let microbatches = microbatches.replace("microbatchs", "microbatches");
        let of = thousands(workload.micro_batch);
        let zero = zero.label(None).map_or(String::new(), |zero| format!(", {zero}"));
        let tokens_of = if *sequence_parallel { ", sequence parallel" } else { "" };
        let chunks = match chunks {
            1 => String::new(),
            many => format!(", {many} interleaved chunks a stage"),
        };
        vec![
            ("framework", self.framework.description.to_owned()),
            ("attention", self.framework.attention_kernel.to_owned()),
            ("model", format!("{} parameters, dense", count(self.parameters))),
            ("step", format!("{batch}, {microbatches} of {of} per replica")),
            ("mesh", format!("{mesh}{zero}{tokens_of}{chunks}")),
            ("recompute", recompute_phrase(*recompute).to_owned()),
        ]
    }
}

fn recompute_phrase(recompute: StepRecompute) -> &'static str {
    match recompute {
        StepRecompute::Block => "whole blocks",
        StepRecompute::Selective => "the core of attention",
        StepRecompute::SelectiveLayers => "every second block",
        StepRecompute::SelectiveOps => "all but attention and every second GEMM",
        StepRecompute::None | StepRecompute::Auto | StepRecompute::Latents => "none",
    }
}

impl Report for FrameworkReport<'_> {
    fn summary(&self) -> String {
        let [low, high] = self.prediction.step_time_interval_s.map(Seconds);
        format!(
            "A step under {} takes {}, with 90 % probability between {low} and {high}: {} tokens/s, or {} of the \
             devices' peak FLOP/s.",
            self.framework.name,
            Seconds(self.prediction.step_time_s),
            thousands(self.prediction.tokens_per_s.round() as u64),
            percent(self.prediction.mfu),
        )
    }

    fn page(&self, _detail: Detail) -> Page {
        let mut page = Page::default();
        let devices = plural(self.step.mesh.devices(), "device");
        let (model, framework) = (self.model, self.framework.name);
        page.heading(format!("{model} under {framework} on {devices} of {}", self.hardware));
        let PredictionFields { step_time_s, step_time_interval_s, mfu, .. } = &self.prediction;
        let interval = interval_90(*step_time_interval_s, step_time_interval_s.map(Seconds));
        let throughput = thousands(self.prediction.tokens_per_s.round() as u64);
        let flop_rate = rate(self.prediction.flops_per_s_per_device, "FLOP");
        page.fields(&[
            ("step time", format!("{} ({interval})", Seconds(*step_time_s))),
            (
                "throughput",
                format!("{throughput} tokens/s, {flop_rate} a device, MFU {}", percent(*mfu)),
            ),
            ("memory", "not predicted for other frameworks".to_owned()),
        ]);
        if let Some(run) = &self.training_run {
            training_run::section(&mut page, run);
        }
        page.heading("Step");
        page.fields(&self.step_fields());
        page.heading("Where the time goes");
        let shares = &self.prediction.term_shares;
        let terms = StepTerm::ALL
            .into_iter()
            .filter_map(|term| Some((term.name(), *shares.get(key(term))?)));
        // The update of the optimizer is in no term, and the waiting of stages grows with several at once.
        let others = ("other", 1.0 - shares.values().sum::<f64>());
        let rows: Vec<Vec<Cell>> = terms
            .chain([others])
            .filter(|(_, share)| *share >= 0.0005)
            .map(|(name, share)| {
                let time = Seconds(share * step_time_s);
                vec![name.to_owned().into(), time.into(), percent(share).into()]
            })
            .collect();
        page.table(&[("", Align::Left), ("time", Align::Right), ("share", Align::Right)], &rows);
        page.heading("Uncertainty");
        page.paragraph(&format!("Values of the framework: {}.", self.fitted.values.source));
        page.paragraph(&format!("Interval: {}.", self.fitted.interval.source));
        let assumed = &self.fitted.values.assumed;
        if !assumed.is_empty() {
            page.paragraph(&format!("Assumed, not fitted: {}.", assumed.join(", ")));
        }
        page
    }
}
