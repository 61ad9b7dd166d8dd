//! A device's clock: read once after each instruction, so that the parts of a step leave nothing out.

use std::time::Instant;

use narrows_runtime::parts::{Lap, Part, Parts};

/// Times a device in a step.
pub struct Clock {
    begun: Instant,
    last: Instant,
    parts: Parts,
    /// Of every instruction of the step in its order, if they are kept.
    laps: Vec<Lap>,
    /// How many there are in a step; 0 when they are not kept.
    kept: usize,
}

impl Clock {
    pub fn new() -> Clock {
        let now = Instant::now();
        Clock { begun: now, last: now, parts: Parts::default(), laps: vec![], kept: 0 }
    }

    /// Keeps the laps of `instructions` a step from now on. Nothing is allocated in a step.
    pub fn keep_laps(&mut self, instructions: usize) {
        self.kept = instructions;
        self.laps = Vec::with_capacity(instructions);
    }

    /// Those of the last step.
    pub fn laps(&self) -> &[Lap] {
        &self.laps
    }

    /// Begins a step, which began for all devices at `begun`.
    pub fn start(&mut self, begun: Instant) {
        (self.begun, self.last, self.parts) = (begun, begun, Parts::default());
        self.laps.clear();
    }

    /// Counts the time since the last reading to a part.
    pub fn read(&mut self, part: Part) {
        self.read_at(part, Instant::now());
    }

    /// Ends the instruction that began at `begun`.
    pub fn end_instruction(&mut self, part: Part, begun: Instant) {
        self.read(part);
        if self.laps.len() < self.kept {
            let since = |instant: Instant| instant.saturating_duration_since(self.begun);
            self.laps.push(Lap { begin: since(begun), end: since(self.last) });
        }
    }

    /// When it was read last.
    pub fn last(&self) -> Instant {
        self.last
    }

    /// Ends a step, which ended for all devices at `ended`; what this one waited for them is a part.
    pub fn stop(&mut self, waited: Part, ended: Instant) -> Parts {
        self.read_at(waited, ended);
        self.parts
    }

    fn read_at(&mut self, part: Part, now: Instant) {
        let last = std::mem::replace(&mut self.last, now);
        self.parts.add(part, now.saturating_duration_since(last));
    }
}
