//! What came of a step, and how it is written down.

use std::collections::BTreeMap;
use std::time::Duration;

use narrows_plan::Bytes;
use serde::Serialize;

use crate::report::{BytesByKindAndAxis, DeviceReport, StepReport};
use crate::time_breakdown::TimeBreakdown;

/// What came of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainedStep {
    /// Its number, counted from 1.
    pub step: u64,
    /// Mean cross-entropy over its tokens, in nats, before the weights changed.
    pub loss: f64,
    /// Norm of all gradients together, before clipping.
    pub gradient_norm: f64,
    /// The learning rate it was made with.
    pub learning_rate: f64,
    /// Tokens it was made of.
    pub tokens: u64,
    /// How often all tokens were read before its first sequence.
    pub epoch: u64,
    /// Time for reading the tokens.
    pub data_time: Duration,
    /// Time of the whole step, the reading included.
    pub step_time: Duration,
    /// What that was spent on: means over the devices, which add up to it.
    pub time_breakdown: TimeBreakdown,
    /// What each device did.
    pub report: StepReport,
    /// Bytes that each device holds besides its arena: [`Session::scratch`](crate::session::Session::scratch).
    pub scratch_bytes: Vec<u64>,
}

/// What was expected of every step of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPrediction {
    /// Time of a step, in seconds.
    pub step_time_s: f64,
    /// What it is spent on, in seconds by the names of [`TimeCategory`](crate::time_breakdown::TimeCategory).
    pub breakdown_s: BTreeMap<&'static str, f64>,
    /// Memory for the program's buffers, by device.
    pub allocated: Vec<Bytes>,
}

/// A line of a metrics file. Keys carry their units and stay what they are; lists have one entry for
/// each device, in the order of their numbers.
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
    /// The part of the step time that went into reading tokens.
    data_time_s: f64,
    /// `null` where nobody predicted anything.
    predicted_step_time_s: Option<f64>,
    /// What the step time was spent on.
    breakdown_s: TimeBreakdown,
    predicted_breakdown_s: Option<BTreeMap<&'static str, f64>>,
    allocated_bytes: Vec<u64>,
    predicted_allocated_bytes: Option<Vec<u64>>,
    /// What a device holds besides, to compute and to send with.
    scratch_bytes: Vec<u64>,
    /// The whole (unsharded) tensors' bytes.
    collective_bytes: Vec<BytesByKindAndAxis>,
    /// What a device sends when nothing is sent twice.
    collective_sent_bytes: Vec<BytesByKindAndAxis>,
    /// Bytes sent to neighbouring stages.
    transfer_sent_bytes: Vec<u64>,
}

impl MetricsRecord {
    /// The line of a step.
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
            allocated_bytes: each(report, |device| device.allocated.0),
            predicted_allocated_bytes: predicted
                .map(|predicted| predicted.allocated.iter().map(|bytes| bytes.0).collect()),
            scratch_bytes: trained.scratch_bytes.clone(),
            collective_bytes: each(report, |device| device.collective_bytes(|c| c.payload)),
            collective_sent_bytes: each(report, |device| device.collective_bytes(|c| c.sent)),
            transfer_sent_bytes: each(report, |device| device.sent.0),
        }
    }
}

/// Something of every device.
fn each<T>(report: &StepReport, of: impl Fn(&DeviceReport) -> T) -> Vec<T> {
    report.devices().map(|device| of(report.device(device))).collect()
}
