//! What a run does, did, or would do.

use std::time::Duration;

use narrows_plan::mesh::Mesh;
use narrows_plan::model::Model;
use narrows_plan::{Bytes, Plan, Seconds};
use narrows_planner::predict::Prediction;
use narrows_runtime::data::Sampler;
use narrows_runtime::report::Report;
use narrows_runtime::train::{ByKindAndAxis, Ended, Trained};
use narrows_runtime::{DeviceReport, Trainer};
use serde::Serialize;

use super::page::{Align, Page, plural, thousands};
use crate::args::run::Training;
use crate::output::Lines;

/// Columns of a loss curve.
const CURVE_WIDTH: usize = 60;

/// What is known before the first step.
#[derive(Clone, Copy)]
pub struct Beginning<'a> {
    /// What is trained.
    pub model: &'a Model,
    /// Under which plan.
    pub plan: &'a Plan,
    /// What is expected of a step.
    pub prediction: &'a Prediction,
    /// Threads of a device.
    pub threads: u64,
    /// How it is trained.
    pub training: &'a Training,
}

impl Beginning<'_> {
    /// For people.
    pub fn text(&self, sampler: &Sampler) -> String {
        let Beginning { model, plan, prediction, threads, training } = self;
        let mut page = Page::default();
        let mesh = plan.mesh;
        let devices = plural(mesh.devices(), "device");
        let threads = plural(*threads, "thread");
        page.heading(format!("Training {} on {devices} of {threads}", model.name));
        let work = plan.workload;
        let (file, tokens) = (sampler.file().path().display(), sampler.file().tokens());
        let step_time = Seconds(prediction.step_time_s);
        page.fields(&[
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
        ]);
        page.heading("Loss");
        page.finish()
    }
}

/// Where a run is.
pub fn progress_line(trained: &Trained, steps: u64) -> String {
    let width = steps.to_string().len();
    let Trained { step, loss, gradient_norm, time, tokens, .. } = trained;
    let speed = thousands((*tokens as f64 / time.as_secs_f64()) as u64);
    format!(
        "  step {step:>width$}  loss {loss:.4}  gradient {gradient_norm:.3}  {speed} tokens/s\n"
    )
}

/// The steps of a run so far.
#[derive(Default)]
pub struct Course {
    losses: Vec<f64>,
    times: Vec<Duration>,
    tokens: u64,
}

impl Course {
    /// One more.
    pub fn add(&mut self, trained: &Trained) {
        self.losses.push(trained.loss);
        self.times.push(trained.time);
        self.tokens += trained.tokens;
    }

    /// How many.
    pub fn steps(&self) -> u64 {
        self.losses.len() as u64
    }

    fn time(&self) -> Duration {
        self.times.iter().sum()
    }

    /// The time of a step in the middle, of which a pause of the machine takes nothing.
    fn median(&self) -> f64 {
        let mut times = self.times.clone();
        times.sort_unstable();
        times.get(times.len() / 2).map_or(0.0, Duration::as_secs_f64)
    }

    fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.time().as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

/// How a run went; its JSON form is what `run --format json` prints.
#[derive(Serialize)]
pub struct Summary {
    status: &'static str,
    backend: &'static str,
    model: String,
    mesh: Mesh,
    threads_per_device: u64,
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
    wall_time_s: f64,
    prediction: Expected,
    /// By device.
    allocated_bytes: Vec<u64>,
    /// Where a line for each step is.
    metrics: Option<String>,
    #[serde(skip)]
    curve: Vec<f64>,
}

/// What was expected of a step.
#[derive(Serialize)]
struct Expected {
    step_time_s: f64,
    step_time_interval_s: [f64; 2],
    tokens_per_s: f64,
    /// By stage.
    peak_memory_bytes: Vec<u64>,
}

impl Summary {
    /// That of a run that ended.
    pub fn of(
        beginning: &Beginning,
        trainer: &Trainer,
        course: &Course,
        ended: Ended,
        metrics: Option<&Lines>,
    ) -> Summary {
        let Beginning { model, plan, prediction, threads, training } = beginning;
        Summary {
            status: match ended {
                Ended::Done => "done",
                Ended::Stopped => "stopped",
            },
            backend: "cpu",
            model: model.name.clone(),
            mesh: plan.mesh,
            threads_per_device: *threads,
            seed: training.seed,
            data: trainer.sampler().file().path().display().to_string(),
            steps: course.steps(),
            steps_asked: training.steps,
            tokens: course.tokens,
            loss_first: course.losses.first().copied(),
            loss_last: course.losses.last().copied(),
            tokens_per_s: course.tokens_per_s(),
            step_time_s: course.median(),
            wall_time_s: course.time().as_secs_f64(),
            prediction: Expected {
                step_time_s: prediction.step_time_s,
                step_time_interval_s: prediction.step_time_interval_s,
                tokens_per_s: prediction.tokens_per_s,
                peak_memory_bytes: prediction.peak_memory_bytes.clone(),
            },
            allocated_bytes: trainer.session().allocated(),
            metrics: metrics.map(|lines| lines.name().to_owned()),
            curve: course.losses.clone(),
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut page = Page::default();
        page.line(curve(&self.curve));
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
        page.heading("Predicted and measured");
        page.table(
            &[("", Align::Left), ("predicted", Align::Right), ("measured", Align::Right)],
            &[
                row(
                    "step time",
                    Seconds(expected.step_time_s).to_string(),
                    Seconds(self.step_time_s).to_string(),
                ),
                row("tokens/s", speed(expected.tokens_per_s), speed(self.tokens_per_s)),
                row(
                    "memory of a device",
                    memory(&expected.peak_memory_bytes),
                    memory(&self.allocated_bytes),
                ),
            ],
        );
        if let Some(file) = self.metrics.as_ref().filter(|file| *file != "-") {
            page.line(format!("A line for each step is in {file}."));
        }
        page.finish()
    }
}

/// A curve in one line of text, highest at the top.
fn curve(values: &[f64]) -> String {
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let columns = values.len().min(CURVE_WIDTH);
    let means: Vec<f64> = (0..columns)
        .map(|column| {
            let part =
                &values[column * values.len() / columns..(column + 1) * values.len() / columns];
            part.iter().sum::<f64>() / part.len() as f64
        })
        .collect();
    let (low, high) = means
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(*v), high.max(*v)));
    let level = |value: &f64| {
        let share = if high > low { (value - low) / (high - low) } else { 0.0 };
        LEVELS[(share * 7.0).round() as usize]
    };
    means.iter().map(level).collect()
}

/// What the devices would do; its JSON form is what `run --backend null --format json` prints.
#[derive(Serialize)]
pub struct Counts {
    backend: &'static str,
    model: String,
    mesh: Mesh,
    /// All devices of a stage do the same amount of everything.
    stages: Vec<StageCounts>,
}

/// What each device of a stage would do in a step.
#[derive(Serialize)]
struct StageCounts {
    instructions: std::collections::BTreeMap<&'static str, u64>,
    collectives: u64,
    collective_bytes: ByKindAndAxis,
    collective_sent_bytes: ByKindAndAxis,
    transfer_sent_bytes: u64,
    transfer_received_bytes: u64,
    allocated_bytes: u64,
}

impl Counts {
    /// Those of a report.
    pub fn of(backend: &'static str, model: &Model, report: &Report) -> Counts {
        let stage = |device: &DeviceReport| StageCounts {
            instructions: device.instructions.clone(),
            collectives: device.collectives.values().map(|count| count.calls).sum(),
            collective_bytes: device.collective_bytes(|count| count.payload),
            collective_sent_bytes: device.collective_bytes(|count| count.sent),
            transfer_sent_bytes: device.sent.0,
            transfer_received_bytes: device.received.0,
            allocated_bytes: device.allocated.0,
        };
        let stages = report.stages.iter().map(stage).collect();
        Counts { backend, model: model.name.clone(), mesh: report.mesh, stages }
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut page = Page::default();
        let devices = plural(self.mesh.devices(), "device");
        page.heading(format!("A step of {} on {devices}, counted", self.model));
        page.line(self.mesh);
        page.heading("Each device of a stage");
        let row = |(index, stage): (usize, &StageCounts)| {
            let sent = stage.collective_sent_bytes.values().flat_map(|axes| axes.values()).sum();
            vec![
                index.to_string(),
                thousands(stage.instructions.values().sum()),
                thousands(stage.collectives),
                Bytes(sent).to_string(),
                Bytes(stage.transfer_sent_bytes).to_string(),
                Bytes(stage.allocated_bytes).to_string(),
            ]
        };
        let rows: Vec<Vec<String>> = self.stages.iter().enumerate().map(row).collect();
        let columns =
            ["stage", "instructions", "collectives", "sent in them", "sent to stages", "memory"];
        page.table(&columns.map(|name| (name, Align::Right)), &rows);
        page.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::curve;

    #[test]
    fn a_curve_is_as_wide_as_it_needs_to_be() {
        assert_eq!(curve(&[]), "");
        assert_eq!(curve(&[1.0]), "▁");
        assert_eq!(curve(&[8.0, 4.5, 1.0]), "█▅▁");
        assert_eq!(curve(&vec![2.0; 1000]).chars().count(), super::CURVE_WIDTH);
    }
}
