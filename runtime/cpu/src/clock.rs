//! A device's clock: read once after each instruction, so that the parts of a step leave nothing out.

use std::time::Instant;

use narrows_runtime::{InstructionSpan, TimeBreakdown, TimeCategory};

/// Times a device in a step.
pub struct DeviceClock {
    begun: Instant,
    last: Instant,
    parts: TimeBreakdown,
    /// Of every instruction of the step in its order, if they are kept.
    laps: Vec<InstructionSpan>,
    /// How many there are in a step; 0 when they are not kept.
    kept: usize,
}

impl DeviceClock {
    pub fn new() -> DeviceClock {
        let now = Instant::now();
        DeviceClock {
            begun: now,
            last: now,
            parts: TimeBreakdown::default(),
            laps: vec![],
            kept: 0,
        }
    }

    /// Keeps the laps of `instructions` a step from now on. Nothing is allocated in a step.
    pub fn keep_laps(&mut self, instructions: usize) {
        self.kept = instructions;
        self.laps = Vec::with_capacity(instructions);
    }

    /// Those of the last step.
    pub fn laps(&self) -> &[InstructionSpan] {
        &self.laps
    }

    /// Begins a step, which began for all devices at `begun`.
    pub fn start(&mut self, begun: Instant) {
        (self.begun, self.last, self.parts) = (begun, begun, TimeBreakdown::default());
        self.laps.clear();
    }

    /// Counts the time since the last reading to a part.
    pub fn read(&mut self, part: TimeCategory) {
        self.read_at(part, Instant::now());
    }

    /// Ends the instruction that began at `begun`.
    pub fn end_instruction(&mut self, part: TimeCategory, begun: Instant) {
        self.read(part);
        if self.laps.len() < self.kept {
            let since = |instant: Instant| instant.saturating_duration_since(self.begun);
            self.laps.push(InstructionSpan { start: since(begun), end: since(self.last) });
        }
    }

    /// When it was read last.
    pub fn last(&self) -> Instant {
        self.last
    }

    /// Ends a step, which ended for all devices at `ended`; what this one waited for them is a part.
    pub fn stop(&mut self, waited: TimeCategory, ended: Instant) -> TimeBreakdown {
        self.read_at(waited, ended);
        self.parts
    }

    fn read_at(&mut self, part: TimeCategory, now: Instant) {
        let last = std::mem::replace(&mut self.last, now);
        self.parts.add(part, now.saturating_duration_since(last));
    }
}
