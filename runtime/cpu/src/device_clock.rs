//! The clock of a device. It is read once after each instruction of the device's thread, so that the categories of a step
//! add up to its whole time. Of the collectives on the communication thread, the waits for them count.

use std::time::{Duration, Instant};

use narrows_runtime::{InstructionSpan, TimeBreakdown, TimeCategory};

/// Start and end of a collective on the communication thread, with the place of its span.
pub(crate) type JobSpan = (usize, [Instant; 2]);

/// Measures the time of a device by category.
pub(crate) struct DeviceClock {
    step_start: Instant,
    last_reading: Instant,
    breakdown: TimeBreakdown,
    /// Spans of the instructions of a step, in order, if they are recorded.
    spans: Vec<InstructionSpan>,
    /// Number of instructions of a step; 0 unless spans are recorded.
    spans_max: usize,
}

impl DeviceClock {
    pub fn new() -> DeviceClock {
        let now = Instant::now();
        DeviceClock {
            step_start: now,
            last_reading: now,
            breakdown: TimeBreakdown::default(),
            spans: vec![],
            spans_max: 0,
        }
    }

    /// Records the spans of the `instructions` instructions of each step from now on. Allocates here,
    /// so that steps do not.
    pub fn record_spans(&mut self, instructions: usize) {
        self.spans_max = instructions;
        self.spans = Vec::with_capacity(instructions);
    }

    /// Whether spans are recorded.
    pub fn records_spans(&self) -> bool {
        self.spans_max > 0
    }

    /// The place of the next instruction's span, which the communication thread measures; `None` if spans are not recorded.
    pub fn reserve_span(&mut self) -> Option<usize> {
        let index = self.spans.len();
        let none = InstructionSpan { start: Duration::ZERO, end: Duration::ZERO };
        (index < self.spans_max).then(|| {
            self.spans.push(none);
            index
        })
    }

    /// Sets a reserved span.
    pub fn set_span(&mut self, (index, [start, end]): JobSpan) {
        let span = self.span(start, end);
        if let Some(reserved) = self.spans.get_mut(index) {
            *reserved = span;
        }
    }

    fn span(&self, start: Instant, end: Instant) -> InstructionSpan {
        let offset = |instant: Instant| instant.saturating_duration_since(self.step_start);
        InstructionSpan { start: offset(start), end: offset(end) }
    }

    /// Spans of the last step.
    pub fn spans(&self) -> &[InstructionSpan] {
        &self.spans
    }

    /// Starts a step, which started for all devices at `start`.
    pub fn start_step(&mut self, start: Instant) {
        (self.step_start, self.last_reading) = (start, start);
        self.breakdown = TimeBreakdown::default();
        self.spans.clear();
    }

    /// Adds the time since the last reading to a category.
    pub fn read(&mut self, category: TimeCategory) {
        self.read_at(category, Instant::now());
    }

    /// Ends an instruction that started at `start`: adds the time since the last reading to its
    /// category, and records its span.
    pub fn end_instruction(&mut self, category: TimeCategory, start: Instant) {
        self.read(category);
        if self.spans.len() < self.spans_max {
            self.spans.push(self.span(start, self.last_reading));
        }
    }

    /// Time of the last reading.
    pub fn last_reading(&self) -> Instant {
        self.last_reading
    }

    /// Ends a step, which ended for all devices at `end`. The time that this device waited for
    /// other devices is added to a category.
    pub fn end_step(&mut self, waiting: TimeCategory, end: Instant) -> TimeBreakdown {
        self.read_at(waiting, end);
        self.breakdown
    }

    fn read_at(&mut self, category: TimeCategory, now: Instant) {
        let last_reading = std::mem::replace(&mut self.last_reading, now);
        self.breakdown.add(category, now.saturating_duration_since(last_reading));
    }
}
