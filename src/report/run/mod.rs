//! What a run does, did, or would do.

mod counts;
mod course;

use narrows_cost_model::Breakdown;
use narrows_plan::mesh::Mesh;
use narrows_plan::model::Model;
use narrows_plan::{Bytes, Plan, Seconds};
use narrows_planner::Prediction;
use narrows_runtime::Trainer;
use narrows_runtime::data::Sampler;
use narrows_runtime::train::{TrainEnd, TrainedStep};
use narrows_runtime::{TimeBreakdown, TimeCategory};
use serde::Serialize;

use super::page::{Align, TextPage, plural, thousands};
use super::parts;
use crate::args::checkpoint::RunOrigin;
use crate::args::run::{ExecutionTarget, TrainSettings};
use crate::args::trace::TraceSettings;
use crate::commands::run::SavedCheckpoint;
use crate::lines::LineFile;

pub use counts::NullRunReport;
pub use course::RunHistory;
use course::curve;

/// What is known before the first step.
#[derive(Clone, Copy)]
pub struct RunHeader<'a> {
    /// What is trained.
    pub model: &'a Model,
    /// Under which plan.
    pub plan: &'a Plan,
    /// What is expected of a step.
    pub prediction: &'a Prediction,
    /// Threads of a device.
    pub threads: u64,
    /// How it is trained.
    pub training: &'a TrainSettings,
}

impl RunHeader<'_> {
    /// For people.
    pub fn text(&self, sampler: &Sampler, resumed: Option<&SavedCheckpoint>) -> String {
        let RunHeader { model, plan, prediction, threads, training } = self;
        let mut page = TextPage::default();
        let mesh = plan.mesh;
        let on = match training.on {
            ExecutionTarget::Gpus { .. } => plural(mesh.devices(), "GPU"),
            ExecutionTarget::Processors => {
                let devices = plural(mesh.devices(), "device");
                format!("{devices} of {}", plural(*threads, "thread"))
            }
        };
        page.heading(format!("Training {} on {on}", model.name));
        let work = plan.workload;
        let (file, tokens) = (sampler.file().path().display(), sampler.file().token_count());
        let step_time = Seconds(prediction.step_time_s);
        let mut fields = vec![
            ("plan", mesh.to_string()),
            ("data", format!("{} tokens of {file}", thousands(tokens))),
            (
                "steps",
                format!(
                    "{} of {}, each of {} tokens",
                    thousands(training.steps),
                    plural(work.global_batch, "sequence"),
                    thousands(work.sequence_length)
                ),
            ),
            ("predicted", format!("{step_time} a step on `{}`", plan.hardware.name)),
        ];
        fields.extend(self.begins_at(resumed).map(|at| ("begins", at)));
        page.fields(&fields);
        page.heading("Loss");
        page.finish()
    }

    /// Where a run that may be resumed begins.
    fn begins_at(&self, resumed: Option<&SavedCheckpoint>) -> Option<String> {
        let checkpoints = self.training.checkpoints.as_ref()?;
        match (checkpoints.origin, resumed) {
            (_, Some(SavedCheckpoint { step, path })) => {
                Some(format!("after step {step}: {}", path.display()))
            }
            (RunOrigin::LastCheckpoint, None) => {
                let dir = checkpoints.dir.display();
                Some(format!("with the first step: there is no checkpoint in {dir}"))
            }
            (RunOrigin::FirstStep, None) => None,
        }
    }
}

/// Where a run is.
pub fn progress_line(trained: &TrainedStep, steps: u64) -> String {
    let width = steps.to_string().len();
    let TrainedStep { step, loss, gradient_norm, step_time: time, tokens, .. } = trained;
    let speed = thousands((*tokens as f64 / time.as_secs_f64()) as u64);
    format!(
        "  step {step:>width$}  loss {loss:.4}  gradient {gradient_norm:.3}  {speed} tokens/s\n"
    )
}

/// How a run went; its JSON form is what `run --format json` prints.
#[derive(Serialize)]
pub struct RunReport {
    status: &'static str,
    backend: &'static str,
    model: String,
    mesh: Mesh,
    /// `null` on GPUs.
    threads_per_device: Option<u64>,
    seed: u64,
    data: String,
    /// Made in this run.
    steps: u64,
    steps_asked: u64,
    tokens: u64,
    loss_first: Option<f64>,
    loss_last: Option<f64>,
    tokens_per_s: f64,
    /// The median of the measured ones.
    step_time_s: f64,
    /// What the time of that step was spent on.
    breakdown_s: TimeBreakdown,
    wall_time_s: f64,
    prediction: ExpectedStep,
    /// By device.
    allocated_bytes: Vec<u64>,
    /// Besides, by device.
    scratch_bytes: Vec<u64>,
    /// Where a line for each step is.
    metrics: Option<String>,
    /// The step that the run went on from; `null` when it began at its first.
    resumed_step: Option<u64>,
    /// The last checkpoint that is there.
    checkpoint: Option<String>,
    /// Where the instructions of steps are traced.
    trace: Option<String>,
    #[serde(skip)]
    curve: Vec<f64>,
}

/// What was expected of a step.
#[derive(Serialize)]
struct ExpectedStep {
    step_time_s: f64,
    step_time_interval_s: [f64; 2],
    breakdown_s: Breakdown,
    tokens_per_s: f64,
    /// By stage.
    peak_memory_bytes: Vec<u64>,
}

impl RunReport {
    /// That of a run that ended.
    pub fn of(
        beginning: &RunHeader,
        trainer: &Trainer,
        course: &RunHistory,
        ended: TrainEnd,
    ) -> RunReport {
        let RunHeader { model, plan, prediction, threads, training } = beginning;
        let (time, breakdown_s) = course.median();
        let (allocated_bytes, scratch_bytes) = match course.steps() {
            0 => (trainer.session().allocated_bytes(), trainer.session().scratch_bytes()),
            _ => course.held.clone(),
        };
        RunReport {
            status: match ended {
                TrainEnd::Completed => "done",
                TrainEnd::Stopped => "stopped",
            },
            backend: trainer.session().backend(),
            model: model.name.clone(),
            mesh: plan.mesh,
            threads_per_device: (training.on == ExecutionTarget::Processors).then_some(*threads),
            seed: training.seed,
            data: trainer.sampler().file().path().display().to_string(),
            steps: course.steps(),
            steps_asked: training.steps,
            tokens: course.tokens,
            loss_first: course.losses.first().copied(),
            loss_last: course.losses.last().copied(),
            tokens_per_s: course.tokens_per_s(),
            step_time_s: time.as_secs_f64(),
            breakdown_s,
            wall_time_s: course.time().as_secs_f64(),
            prediction: ExpectedStep {
                step_time_s: prediction.step_time_s,
                step_time_interval_s: prediction.step_time_interval_s,
                breakdown_s: prediction.breakdown_s,
                tokens_per_s: prediction.tokens_per_s,
                peak_memory_bytes: prediction.peak_memory_bytes.clone(),
            },
            allocated_bytes,
            scratch_bytes,
            metrics: None,
            resumed_step: None,
            checkpoint: None,
            trace: None,
            curve: course.losses.clone(),
        }
    }

    /// With the files it left, and the one it began with.
    pub fn with_files(
        mut self,
        metrics: Option<&LineFile>,
        resumed: Option<&SavedCheckpoint>,
        last: Option<&SavedCheckpoint>,
        tracing: Option<&TraceSettings>,
    ) -> RunReport {
        self.metrics = metrics.map(|lines| lines.name().to_owned());
        self.resumed_step = resumed.map(|kept| kept.step);
        self.trace = tracing.map(|tracing| tracing.file.display().to_string());
        self.checkpoint = last.map(|kept| kept.path.display().to_string());
        self
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut page = TextPage::default();
        if !self.curve.is_empty() {
            page.line(curve(&self.curve));
        }
        page.heading(format!("{} in {}", plural(self.steps, "step"), Seconds(self.wall_time_s)));
        let first_and_last = match (self.loss_first, self.loss_last) {
            (Some(first), Some(last)) => format!("{first:.4} at first, {last:.4} at last"),
            _ => "no step was made".into(),
        };
        page.fields(&[("loss", first_and_last)]);
        let speed = |tokens_per_s: f64| thousands(tokens_per_s.round() as u64);
        let (expected, memory) = (&self.prediction, |bytes: &[u64]| {
            Bytes(bytes.iter().copied().max().unwrap_or(0)).to_string()
        });
        let row = |name: &str, predicted: String, measured: String| {
            vec![name.to_owned(), predicted, measured]
        };
        if self.steps == 0 {
            page.line("All steps were made before.");
            return self.files(page).finish();
        }
        page.heading("Predicted and measured");
        let mut rows = vec![row(
            "step time",
            Seconds(expected.step_time_s).to_string(),
            Seconds(self.step_time_s).to_string(),
        )];
        let measured = |part: TimeCategory| self.breakdown_s.get(part).as_secs_f64();
        let told_apart = TimeCategory::ALL
            .iter()
            .any(|part| *part != TimeCategory::Other && measured(*part) > 0.0);
        rows.extend(TimeCategory::ALL.into_iter().filter_map(|part| {
            let predicted = parts::predicted(&expected.breakdown_s, part);
            let measured = if told_apart { measured(part) } else { 0.0 };
            (predicted > 0.0 || measured > 0.0).then(|| {
                let name = format!("  {}", parts::title(part));
                let measured = if told_apart { Seconds(measured).to_string() } else { "".into() };
                row(&name, Seconds(predicted).to_string(), measured)
            })
        }));
        rows.push(row("tokens/s", speed(expected.tokens_per_s), speed(self.tokens_per_s)));
        rows.push(row(
            "memory of a device",
            memory(&expected.peak_memory_bytes),
            memory(&self.allocated_bytes),
        ));
        page.table(
            &[("", Align::Left), ("predicted", Align::Right), ("measured", Align::Right)],
            &rows,
        );
        if !told_apart {
            page.line("What the time of captured graphs is spent on, --eager or --trace measures.");
        }
        self.files(page).finish()
    }

    /// Which files there are.
    fn files(&self, mut page: TextPage) -> TextPage {
        if let Some(file) = self.metrics.as_ref().filter(|file| *file != "-") {
            page.line(format!("A line for each step is in {file}."));
        }
        if let Some(file) = &self.trace {
            page.line(format!("A trace for Perfetto is in {file}."));
        }
        if let Some(path) = &self.checkpoint {
            page.line(format!("The last checkpoint is {path}."));
        }
        page
    }
}
