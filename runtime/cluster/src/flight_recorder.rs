//! The last operations of a process, for the error message when a run stalls.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::operation::PendingOp;

/// Operations that are kept.
const CAPACITY: usize = 32;

/// A ring buffer of the last operations.
pub(crate) struct FlightRecorder {
    run_start: Instant,
    entries: Mutex<VecDeque<RecordedOp>>,
}

struct RecordedOp {
    operation: PendingOp,
    start_s: f64,
    end_s: Option<f64>,
}

impl FlightRecorder {
    pub fn new() -> FlightRecorder {
        let entries = Mutex::new(VecDeque::with_capacity(CAPACITY));
        FlightRecorder { run_start: Instant::now(), entries }
    }

    fn entries(&self) -> MutexGuard<'_, VecDeque<RecordedOp>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the start of an operation.
    pub fn begin(&self, operation: PendingOp) {
        let start_s = self.run_start.elapsed().as_secs_f64();
        let mut entries = self.entries();
        if entries.len() == CAPACITY {
            entries.pop_front();
        }
        entries.push_back(RecordedOp { operation, start_s, end_s: None });
    }

    /// Records the end of an operation. Others may have started meanwhile, on another thread.
    pub fn end(&self, operation: &PendingOp) {
        let now = self.run_start.elapsed().as_secs_f64();
        let mut entries = self.entries();
        if let Some(entry) = entries.iter_mut().rev().find(|entry| entry.operation == *operation) {
            entry.end_s = Some(now);
        }
    }

    /// One line for each recorded operation, the newest last, with seconds since the start of the run.
    pub fn lines(&self) -> Vec<String> {
        let line = |entry: &RecordedOp| {
            let duration = match entry.end_s {
                Some(end_s) => format!("took {:.6} s", end_s - entry.start_s),
                None => "has not ended".into(),
            };
            format!("{:.6} s: {}, {duration}", entry.start_s, entry.operation)
        };
        self.entries().iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use narrows_plan::program::{CollectiveFunction, Reduction};

    use super::*;
    use crate::operation::WireOp;

    #[test]
    fn the_newest_operations_are_kept() {
        let recorder = FlightRecorder::new();
        for sequence in 0..100 {
            let operation = WireOp::Collective(CollectiveFunction::AllReduce(Reduction::Sum));
            let pending = PendingOp { operation, channel: "tensor", sequence, elements: 8 };
            recorder.begin(pending);
            if sequence < 99 {
                recorder.begin(PendingOp { channel: "data", ..pending });
                recorder.end(&pending);
            }
        }
        let lines = recorder.lines();
        assert_eq!(lines.len(), CAPACITY);
        assert!(
            lines[0].ends_with("all-reduce 83 over data (8 elements), has not ended"),
            "{}",
            lines[0]
        );
        assert!(lines[1].contains("all-reduce 84 over tensor (8 elements), took"), "{}", lines[1]);
        let last = &lines[CAPACITY - 1];
        assert!(last.ends_with("all-reduce 99 over tensor (8 elements), has not ended"), "{last}");
    }
}
