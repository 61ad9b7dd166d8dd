//! The result of a training step, and its line in a metrics file.

use std::collections::BTreeMap;
use std::time::Duration;

use narrows_plan::Bytes;
use serde::Serialize;

use super::evaluation::Evaluation;
use crate::report::{BytesByKindAndAxis, DeviceReport, StepReport};
use crate::time_breakdown::TimeBreakdown;

/// Result of a training step.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainedStep {
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Mean cross-entropy over the tokens, in nats, before the update.
    pub loss: f64,
    /// Norm of all gradients together, before clipping.
    pub gradient_norm: f64,
    /// Learning rate of the update.
    pub learning_rate: f64,
    /// Number of tokens.
    pub tokens: u64,
    /// Epoch of the first sequence: how often all tokens were read before it.
    pub epoch: u64,
    /// Time spent reading tokens.
    pub data_time: Duration,
    /// Time of the whole step, including reading.
    pub step_time: Duration,
    /// The step time by category: means over the devices, which add up to the step time.
    pub time_breakdown: TimeBreakdown,
    /// Instructions, collectives and transfers of each device.
    pub report: StepReport,
    /// Bytes that each device holds outside its arena.
    pub scratch_bytes: Vec<u64>,
}

/// Prediction of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPrediction {
    /// Time of a step, in seconds.
    pub step_time_s: f64,
    /// Seconds by name of the [`TimeCategory`](crate::TimeCategory).
    pub breakdown_s: BTreeMap<&'static str, f64>,
    /// Bytes of the program's buffers, by device.
    pub allocated: Vec<Bytes>,
}

/// A line of a metrics file. Keys have their unit at the end; lists have one entry for each device, in
/// the order of device numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MetricsRecord {
    step: u64,
    loss: f64,
    grad_norm: f64,
    learning_rate: f64,
    tokens: u64,
    epoch: u64,
    tokens_per_s: f64,
    step_time_s: f64,
    /// Part of the step time spent reading tokens.
    data_time_s: f64,
    /// `null` without a prediction.
    predicted_step_time_s: Option<f64>,
    /// Seconds by category.
    breakdown_s: TimeBreakdown,
    predicted_breakdown_s: Option<BTreeMap<&'static str, f64>>,
    allocated_bytes: Vec<u64>,
    predicted_allocated_bytes: Option<Vec<u64>>,
    /// Memory outside the arenas, to compute and to send.
    scratch_bytes: Vec<u64>,
    /// Bytes of the whole, unsharded tensors.
    collective_bytes: Vec<BytesByKindAndAxis>,
    /// Bytes that a device sends at least.
    collective_sent_bytes: Vec<BytesByKindAndAxis>,
    /// Bytes sent to neighbouring stages.
    transfer_sent_bytes: Vec<u64>,
    /// Absent where the step was not followed by an evaluation.
    #[serde(flatten)]
    evaluation: Option<EvaluationRecord>,
}

/// The part of a line that reports an evaluation of the weights after the step.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct EvaluationRecord {
    eval_loss: f64,
    eval_perplexity: f64,
    /// Predicted tokens.
    eval_tokens: u64,
    eval_time_s: f64,
}

impl MetricsRecord {
    /// The line of a step, with its prediction if there is one.
    pub fn new(trained: &TrainedStep, predicted: Option<&StepPrediction>) -> MetricsRecord {
        let TrainedStep { report, .. } = trained;
        let step_time_s = trained.step_time.as_secs_f64();
        MetricsRecord {
            step: trained.step,
            loss: trained.loss,
            grad_norm: trained.gradient_norm,
            learning_rate: trained.learning_rate,
            tokens: trained.tokens,
            epoch: trained.epoch,
            tokens_per_s: trained.tokens as f64 / step_time_s,
            step_time_s,
            data_time_s: trained.data_time.as_secs_f64(),
            predicted_step_time_s: predicted.map(|predicted| predicted.step_time_s),
            breakdown_s: trained.time_breakdown,
            predicted_breakdown_s: predicted.map(|predicted| predicted.breakdown_s.clone()),
            allocated_bytes: by_device(report, |device| device.allocated.0),
            predicted_allocated_bytes: predicted
                .map(|predicted| predicted.allocated.iter().map(|bytes| bytes.0).collect()),
            scratch_bytes: trained.scratch_bytes.clone(),
            collective_bytes: by_device(report, |device| device.collective_bytes(|c| c.payload)),
            collective_sent_bytes: by_device(report, |device| device.collective_bytes(|c| c.sent)),
            transfer_sent_bytes: by_device(report, |device| device.sent.0),
            evaluation: None,
        }
    }

    /// Adds the evaluation that followed the step, if one did.
    pub fn with_evaluation(self, evaluation: Option<&Evaluation>) -> MetricsRecord {
        let record = |evaluation: &Evaluation| EvaluationRecord {
            eval_loss: evaluation.loss,
            eval_perplexity: evaluation.perplexity(),
            eval_tokens: evaluation.predicted_tokens,
            eval_time_s: evaluation.time.as_secs_f64(),
        };
        MetricsRecord { evaluation: evaluation.map(record), ..self }
    }
}

/// A value of every device.
fn by_device<T>(report: &StepReport, value: impl Fn(&DeviceReport) -> T) -> Vec<T> {
    report.devices().map(|device| value(report.device(device))).collect()
}
