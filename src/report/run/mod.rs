//! Reports of runs.

mod history;
mod loss_curve;
mod null;

use std::path::{Path, PathBuf};

use narrows_cost_model::Breakdown;
use narrows_plan::model::Model;
use narrows_plan::{Bytes, Mesh, Plan, Seconds};
use narrows_planner::{ExactStepPrediction, Prediction};
use narrows_runtime::data::Sampler;
use narrows_runtime::train::{TrainEnd, TrainedStep};
use narrows_runtime::{GemmDtype, TimeBreakdown, TimeCategory, Trainer};
use serde::Serialize;

use super::Report;
use super::exact_step;
use super::page::{Align, Page};
use crate::args::{Detail, ExecutionTarget, RunOrigin, TrainSettings};
use crate::breakdown;
use crate::text::{batch_phrase, mesh_and_schedule, plural, thousands};
use crate::unit::Unit;

pub use history::RunHistory;
pub use null::NullRunReport;

use loss_curve::LossCurve;

/// Properties of a run before its first step.
#[derive(Clone, Copy)]
pub struct RunHeader<'a> {
    /// The model.
    pub model: &'a Model,
    /// The plan.
    pub plan: &'a Plan,
    /// The prediction for a step.
    pub prediction: &'a Prediction,
    /// Whether the prediction has GEMMs in their own format.
    pub gemms_are_priced: bool,
    /// Threads per device.
    pub threads: u64,
    /// The settings of the run.
    pub training: &'a TrainSettings,
}

impl RunHeader<'_> {
    /// The lines before the first step. `verification` is a clause on the checksum of the tokens, `evaluated` the tokens that are
    /// evaluated, if any, and `resumed` the step and the folder of the checkpoint that the run resumes from.
    pub fn text(
        &self,
        sampler: &Sampler,
        verification: &str,
        evaluated: Option<String>,
        resumed: Option<(u64, &Path)>,
    ) -> String {
        let RunHeader { model, plan, prediction, gemms_are_priced, threads, training } = self;
        let mut page = Page::default();
        let mesh = plan.mesh;
        let devices = match training.target {
            ExecutionTarget::Gpus { .. } => plural(mesh.devices(), "GPU"),
            ExecutionTarget::Cpu => {
                let devices = plural(mesh.devices(), "device");
                format!("{devices} of {}", plural(*threads, "thread"))
            }
        };
        page.heading(format!("Training {} on {devices}", model.name));
        let work = plan.workload;
        let (file, tokens) = (sampler.file().path().display(), sampler.file().token_count());
        let step_time = Seconds(prediction.step_time_s);
        let priced_dtype = match gemms_are_priced {
            true => "",
            false => ", with GEMMs in f32: those in bf16 have no price on this hardware",
        };
        let mut fields = vec![
            ("plan", mesh_and_schedule(plan)),
            ("data", format!("{} tokens of {file}{verification}", thousands(tokens))),
            (
                "steps",
                format!(
                    "{} of {}",
                    thousands(training.recipe.steps),
                    batch_phrase(work.global_batch, work.sequence_length)
                ),
            ),
            (
                "predicted",
                format!("{step_time} per step on `{}`{priced_dtype}", plan.hardware.name),
            ),
        ];
        fields.extend(evaluated.map(|tokens| ("evaluated", tokens)));
        fields
            .extend(prediction.exact_step.as_ref().map(|step| ("LORO", exact_step::phrase(step))));
        fields.extend(self.origin(resumed).map(|origin| ("starts", origin)));
        if let (Some(path), None) = (&training.init_from, resumed) {
            fields.push(("weights", format!("from {}", path.display())));
        }
        page.fields(&fields);
        page.heading("Loss");
        page.text()
    }

    /// Start of a run with checkpoints.
    fn origin(&self, resumed: Option<(u64, &Path)>) -> Option<String> {
        let checkpoints = self.training.checkpoints.as_ref()?;
        match (checkpoints.origin, resumed) {
            (_, Some((step, path))) => Some(format!("after step {step}: {}", path.display())),
            (RunOrigin::LastCheckpoint | RunOrigin::NewestUndamaged, None) => {
                let dir = checkpoints.dir.display();
                Some(format!("at the first step: there is no checkpoint in {dir}"))
            }
            (RunOrigin::FirstStep, None) => None,
        }
    }
}

/// The progress line of a step.
pub fn progress_line(trained: &TrainedStep, steps: u64) -> String {
    let width = steps.to_string().len();
    let TrainedStep { step, loss, gradient_norm, step_time: time, tokens, .. } = trained;
    let rate = trained.learning_rate;
    let speed = thousands((*tokens as f64 / time.as_secs_f64()) as u64);
    format!(
        "  step {step:>width$}  loss {loss:.4}  gradient norm {gradient_norm:.3}  lr {rate:.2e}  {speed} tokens/s\n"
    )
}

/// Output of `run`.
#[derive(Serialize)]
pub struct RunReport {
    status: &'static str,
    backend: &'static str,
    model: String,
    mesh: Mesh,
    /// `null` on GPUs.
    threads_per_device: Option<u64>,
    /// Format to which the operands of GEMMs were rounded; `null` on GPUs.
    dtype: Option<GemmDtype>,
    #[serde(skip)]
    gemms_are_priced: bool,
    seed: u64,
    data: String,
    /// Steps completed in this run.
    steps: u64,
    #[serde(rename = "steps_asked")]
    requested_steps: u64,
    tokens: u64,
    loss_first: Option<f64>,
    loss_last: Option<f64>,
    /// Loss of the last evaluation of this run.
    eval_loss_last: Option<f64>,
    /// The lowest loss of an evaluation, including those before a checkpoint that was resumed.
    eval_loss_best: Option<f64>,
    tokens_per_s: f64,
    /// The median of the measured step times.
    step_time_s: f64,
    /// The breakdown of that step.
    breakdown_s: TimeBreakdown,
    wall_time_s: f64,
    prediction: PredictedStep,
    /// Bytes of each device's arena.
    allocated_bytes: Vec<u64>,
    /// Further bytes allocated by each device.
    scratch_bytes: Vec<u64>,
    /// The metrics file.
    metrics: Option<String>,
    /// The step that the run resumed from; `null` for a run from its first step.
    resumed_step: Option<u64>,
    /// The last checkpoint.
    checkpoint: Option<String>,
    /// The trace file.
    trace: Option<String>,
    /// Sentence of an early stop, and the checkpoint of the lowest evaluation loss.
    #[serde(skip)]
    early_stop: Option<(String, Option<PathBuf>)>,
    #[serde(skip)]
    losses: LossCurve,
}

/// The prediction for a step.
#[derive(Serialize)]
struct PredictedStep {
    step_time_s: f64,
    step_time_interval_s: [f64; 2],
    breakdown_s: Breakdown,
    tokens_per_s: f64,
    /// Bytes of the arena of each stage.
    peak_memory_bytes: Vec<u64>,
    /// Exact steps of LORO, which no other field contains; absent without them.
    #[serde(skip_serializing_if = "Option::is_none")]
    exact_step: Option<ExactStepPrediction>,
}

impl RunReport {
    /// The report of a run that ended.
    pub fn new(
        header: &RunHeader,
        trainer: &Trainer,
        history: &RunHistory,
        end: TrainEnd,
    ) -> RunReport {
        let RunHeader { model, plan, prediction, gemms_are_priced, threads, training } = header;
        let (time, breakdown_s) = history.median();
        let (allocated_bytes, scratch_bytes) = match history.steps() {
            0 => (trainer.session().allocated_bytes(), trainer.session().scratch_bytes()),
            _ => (history.allocated.clone(), history.scratch.clone()),
        };
        RunReport {
            status: match end {
                TrainEnd::Completed => "done",
                TrainEnd::Stopped => "stopped",
                TrainEnd::StoppedEarly => "stopped_early",
            },
            backend: trainer.session().backend(),
            model: model.name.clone(),
            mesh: plan.mesh,
            threads_per_device: (training.target == ExecutionTarget::Cpu).then_some(*threads),
            dtype: training.gemm_dtype(),
            gemms_are_priced: *gemms_are_priced,
            seed: training.recipe.seed,
            data: trainer.sampler().file().path().display().to_string(),
            steps: history.steps(),
            requested_steps: training.recipe.steps,
            tokens: history.tokens,
            loss_first: history.losses.first(),
            loss_last: history.losses.last(),
            eval_loss_last: None,
            eval_loss_best: None,
            tokens_per_s: history.tokens_per_s(),
            step_time_s: time.as_secs_f64(),
            breakdown_s,
            wall_time_s: history.time.as_secs_f64(),
            prediction: PredictedStep {
                step_time_s: prediction.step_time_s,
                step_time_interval_s: prediction.step_time_interval_s,
                breakdown_s: prediction.breakdown_s,
                tokens_per_s: prediction.tokens_per_s,
                peak_memory_bytes: prediction.peak_memory_bytes.clone(),
                exact_step: prediction.exact_step.clone(),
            },
            allocated_bytes,
            scratch_bytes,
            metrics: None,
            resumed_step: None,
            checkpoint: None,
            trace: None,
            early_stop: None,
            losses: history.losses.clone(),
        }
    }

    /// Adds the last and the lowest loss of evaluations.
    pub fn with_evaluations(self, last: Option<f64>, best: Option<f64>) -> RunReport {
        RunReport { eval_loss_last: last, eval_loss_best: best, ..self }
    }

    /// Adds the metrics file and the trace file.
    pub fn with_files(self, metrics: Option<&str>, trace: Option<&Path>) -> RunReport {
        RunReport {
            metrics: metrics.map(str::to_owned),
            trace: trace.map(|file| file.display().to_string()),
            ..self
        }
    }

    /// Adds the step that the run resumed from, and its last checkpoint.
    pub fn with_checkpoints(self, resumed: Option<u64>, last: Option<&Path>) -> RunReport {
        let checkpoint = last.map(|path| path.display().to_string());
        RunReport { resumed_step: resumed, checkpoint, ..self }
    }

    /// Adds the sentence of an early stop, and the checkpoint of the lowest evaluation loss.
    pub fn with_early_stop(self, sentence: String, best: Option<PathBuf>) -> RunReport {
        RunReport { early_stop: Some((sentence, best)), ..self }
    }

    /// Predicted and measured times and memory.
    fn comparison(&self, page: &mut Page) {
        let predicted = &self.prediction;
        let speed = |tokens_per_s: f64| thousands(tokens_per_s.round() as u64);
        let largest = |bytes: &[u64]| Bytes(bytes.iter().copied().max().unwrap_or(0)).to_string();
        let row = |name: &str, predicted: String, measured: String| {
            vec![name.to_owned(), predicted, measured]
        };
        let measured_s = |category| self.breakdown_s.get(category).as_secs_f64();
        let predicted_s = |category| breakdown::predicted_s(&predicted.breakdown_s, category);
        let parts =
            TimeCategory::ALL.iter().flat_map(|&part| [predicted_s(part), measured_s(part)]);
        let unit = Unit::Seconds.common(parts.chain([predicted.step_time_s, self.step_time_s]));
        let time = |seconds: f64| unit.format(seconds);
        let mut rows = vec![row("step time", time(predicted.step_time_s), time(self.step_time_s))];
        let is_broken_down = TimeCategory::ALL
            .iter()
            .any(|category| *category != TimeCategory::Other && measured_s(*category) > 0.0);
        for category in TimeCategory::ALL {
            let predicted_s = predicted_s(category);
            let measured = is_broken_down.then(|| measured_s(category));
            if predicted_s > 0.0 || measured.is_some_and(|seconds| seconds > 0.0) {
                rows.push(row(
                    &format!("  {}", breakdown::title(category)),
                    time(predicted_s),
                    measured.map_or(String::new(), time),
                ));
            }
        }
        let of_median = self.tokens as f64 / self.steps as f64 / self.step_time_s;
        rows.push(row("tokens/s", speed(predicted.tokens_per_s), speed(of_median)));
        rows.push(row(
            "memory per device",
            largest(&predicted.peak_memory_bytes),
            largest(&self.allocated_bytes),
        ));
        page.heading("Predicted and measured");
        page.table(
            &[("", Align::Left), ("predicted", Align::Right), ("measured", Align::Right)],
            &rows,
        );
        if speed(of_median) != speed(self.tokens_per_s) {
            // Exact steps are in no prediction, and seldom the median.
            let included = predicted.exact_step.as_ref().map_or("", |_| ", exact ones included");
            page.line(format!(
                "Measured is the median step. All steps{included}: {} tokens/s.",
                speed(self.tokens_per_s)
            ));
        }
        if !self.gemms_are_priced {
            page.line(
                "The prediction has GEMMs in f32: those in bf16 have no price on this hardware.",
            );
        }
        if !is_broken_down {
            page.line("Captured graphs are timed as a whole: --eager or --trace breaks them down.");
        }
    }

    fn files(&self, page: &mut Page) {
        if let Some(file) = self.metrics.as_ref().filter(|file| *file != "-") {
            page.line(format!("Metrics: {file}"));
        }
        if let Some(file) = &self.trace {
            page.line(format!("Trace for Perfetto: {file}"));
        }
        if let Some(path) = &self.checkpoint {
            page.line(format!("Last checkpoint: {path}"));
        }
        if let Some((_, Some(path))) = &self.early_stop {
            page.line(format!("Best checkpoint: {}", path.display()));
        }
    }
}

impl Report for RunReport {
    fn page(&self, _: Detail) -> Page {
        let mut page = Page::default();
        if self.losses.steps() > 0 {
            page.line(self.losses.line());
            page.line(self.losses.axes(self.resumed_step.unwrap_or(0) + 1));
        }
        if self.losses.is_collapsed() {
            page.paragraph(
                "Warning: the loss has collapsed: it grew back after it had fallen. Try a lower --learning-rate or more \
                 --warm-up-steps.",
            );
        }
        page.heading(format!("{} in {}", plural(self.steps, "step"), Seconds(self.wall_time_s)));
        match (self.loss_first, self.loss_last) {
            (Some(first), Some(last)) => {
                let mut fields = vec![("loss", format!("from {first:.4} to {last:.4}"))];
                if let (Some(last), Some(best)) = (self.eval_loss_last, self.eval_loss_best) {
                    let value = format!("{last:.4}, and {best:.4} at its lowest");
                    fields.push(("eval loss", value));
                }
                fields.push(("seen", format!("{} tokens", thousands(self.tokens))));
                page.fields(&fields);
                self.comparison(&mut page);
            }
            _ if self.early_stop.is_some() => {}
            _ => page.line("The checkpoint already contains all steps."),
        }
        if let Some((sentence, _)) = &self.early_stop {
            page.paragraph(sentence);
        }
        self.files(&mut page);
        page
    }
}
