//! The last collectives and transfers of a process, to be read when something stalls.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::talk::WireOp;

/// How many are kept.
const KEPT: usize = 32;

/// What a process waits in: the n-th of its kind over an axis, or between two stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingOp {
    /// What it is.
    pub operation: WireOp,
    /// Over which axis, or to whom.
    pub over: &'static str,
    /// How many of the channel's operations went before.
    pub sequence: u64,
    /// Numbers of this process's operand.
    pub numbers: usize,
}

impl fmt::Display for PendingOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PendingOp { operation, over, sequence, numbers } = self;
        let what = operation.name();
        write!(f, "{what} {sequence} over {over} ({numbers} numbers)")
    }
}

/// A ring of the last ones.
pub struct FlightRecorder {
    since: Instant,
    entries: Mutex<VecDeque<RecordedOp>>,
}

struct RecordedOp {
    doing: PendingOp,
    begun_s: f64,
    ended_s: Option<f64>,
}

impl FlightRecorder {
    pub fn new() -> FlightRecorder {
        FlightRecorder { since: Instant::now(), entries: Mutex::new(VecDeque::with_capacity(KEPT)) }
    }

    fn entries(&self) -> MutexGuard<'_, VecDeque<RecordedOp>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something begins.
    pub fn begin(&self, doing: PendingOp) {
        let begun_s = self.since.elapsed().as_secs_f64();
        let mut entries = self.entries();
        if entries.len() == KEPT {
            entries.pop_front();
        }
        entries.push_back(RecordedOp { doing, begun_s, ended_s: None });
    }

    /// What began last has ended.
    pub fn end(&self) {
        let now = self.since.elapsed().as_secs_f64();
        if let Some(last) = self.entries().back_mut() {
            last.ended_s = Some(now);
        }
    }

    /// All that are kept, the newest last; seconds are counted from the beginning of the run.
    pub fn lines(&self) -> Vec<String> {
        let entries = self.entries();
        let line = |entry: &RecordedOp| {
            let ended = match entry.ended_s {
                Some(ended_s) => format!("took {:.6} s", ended_s - entry.begun_s),
                None => "has not ended".into(),
            };
            format!("{:.6} s: {}, {ended}", entry.begun_s, entry.doing)
        };
        entries.iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_are_kept() {
        let journal = FlightRecorder::new();
        for sequence in 0..100 {
            let operation = WireOp::AllReduce;
            journal.begin(PendingOp { operation, over: "tensor", sequence, numbers: 8 });
            if sequence < 99 {
                journal.end();
            }
        }
        let lines = journal.lines();
        assert_eq!(lines.len(), KEPT);
        assert!(lines[0].contains("all-reduce 68 over tensor (8 numbers), took"), "{}", lines[0]);
        assert!(lines[KEPT - 1].ends_with("all-reduce 99 over tensor (8 numbers), has not ended"));
    }
}
