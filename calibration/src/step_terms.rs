//! Terms of a predicted step time, and the share of the time that is proportional to each.

use serde::Serialize;

/// A term of a step time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum StepTerm {
    /// GEMMs.
    Gemm,
    /// Attention.
    Attention,
    /// Passes over memory: element-wise operators, norms, the loss and the optimizer.
    Memory,
    /// Collectives and transfers.
    Collective,
    /// Launches, what they add to the device, and other time of the host.
    Host,
}

impl StepTerm {
    /// All terms.
    pub const ALL: [StepTerm; 5] = [
        StepTerm::Gemm,
        StepTerm::Attention,
        StepTerm::Memory,
        StepTerm::Collective,
        StepTerm::Host,
    ];

    /// The term in reports.
    pub fn name(self) -> &'static str {
        match self {
            StepTerm::Gemm => "GEMMs",
            StepTerm::Attention => "attention",
            StepTerm::Memory => "passes over memory",
            StepTerm::Collective => "collectives",
            StepTerm::Host => "host",
        }
    }
}

/// A term with its share of a step time.
pub(crate) type TermShare = (StepTerm, f64);

/// Relative change of a term by which its share is found.
const PROBE: f64 = 0.01;

/// The shares of all terms, by the step time with one term scaled.
pub(crate) fn probed_shares(
    time_s: f64,
    scaled_time_s: impl Fn(StepTerm, f64) -> f64,
) -> Vec<TermShare> {
    let share = |term| (term, (scaled_time_s(term, 1.0 + PROBE) / time_s - 1.0) / PROBE);
    StepTerm::ALL.into_iter().map(share).collect()
}
