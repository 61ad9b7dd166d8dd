//! Spans of instructions, measured by events around each, and the breakdown of a step's time.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use narrows_runtime::{InstructionSpan, TimeBreakdown, TimeCategory};

use crate::schedule::StreamId;

/// Times the instructions of a step. Events are created once and reused in every step.
pub(crate) struct InstructionTimers {
    context: Arc<CudaContext>,
    step_begin: CudaEvent,
    /// Before and after each instruction.
    events: Vec<[CudaEvent; 2]>,
    /// Instructions of this step, in the order in which they were enqueued.
    instructions: Vec<TimedInstruction>,
    /// Number of them that are completely enqueued.
    enqueued: usize,
    /// Spans of `instructions`.
    spans: Vec<InstructionSpan>,
    /// Spans of whole instructions.
    instruction_spans: Vec<InstructionSpan>,
}

/// An instruction whose time is measured, or a part of one.
#[derive(Clone, Copy)]
pub(crate) struct TimedInstruction {
    /// Node of the instruction; none for a transfer, which is not in a segment.
    pub node: Option<TimedNode>,
    /// Category of its time.
    pub category: TimeCategory,
    /// Whether this is the first part of its instruction.
    pub begins_instr: bool,
}

/// A node of the schedule.
#[derive(Clone, Copy)]
pub(crate) struct TimedNode {
    /// Stream of the node.
    pub stream: StreamId,
    /// Index of the segment in the schedule.
    pub segment: usize,
    /// Index of the node in the segment.
    pub index: usize,
}

impl TimedInstruction {
    fn is_compute(&self) -> bool {
        self.node.is_some_and(|node| node.stream == StreamId::Compute)
    }
}

fn event(context: &Arc<CudaContext>) -> Result<CudaEvent, DriverError> {
    context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT))
}

impl InstructionTimers {
    /// Timers without events; [`begin`](InstructionTimers::begin) creates them.
    pub fn new(context: &Arc<CudaContext>) -> Result<InstructionTimers, DriverError> {
        let (step_begin, context) = (event(context)?, context.clone());
        Ok(InstructionTimers {
            context,
            step_begin,
            events: vec![],
            instructions: vec![],
            enqueued: 0,
            spans: vec![],
            instruction_spans: vec![],
        })
    }

    /// Marks the beginning of a step on a stream.
    pub fn start(&mut self, stream: &CudaStream) -> Result<(), DriverError> {
        self.instructions.clear();
        self.enqueued = 0;
        self.step_begin.record(stream)
    }

    /// Marks the beginning of an instruction on a stream.
    pub fn begin(
        &mut self,
        instruction: TimedInstruction,
        stream: &CudaStream,
    ) -> Result<(), DriverError> {
        if self.events.len() == self.instructions.len() {
            self.events.push([event(&self.context)?, event(&self.context)?]);
        }
        self.events[self.instructions.len()][0].record(stream)?;
        self.instructions.push(instruction);
        Ok(())
    }

    /// Marks the end of the instruction that began last, on its stream.
    pub fn end(&mut self, stream: &CudaStream) -> Result<(), DriverError> {
        if let Some(last) = self.instructions.len().checked_sub(1) {
            self.events[last][1].record(stream)?;
        }
        self.enqueued = self.instructions.len();
        Ok(())
    }

    /// Nodes of this step on a stream, in their order, each with whether it has ended.
    pub fn nodes(&self, stream: StreamId) -> impl Iterator<Item = (TimedNode, bool)> {
        let all = self.instructions.iter().zip(&self.events).enumerate();
        all.filter_map(move |(index, (instruction, events))| {
            let node = instruction.node.filter(|node| node.stream == stream)?;
            let ended = index < self.enqueued && events[1].try_is_complete().unwrap_or(false);
            Some((node, ended))
        })
    }

    /// Reads the events of a step that has ended.
    pub fn read(&mut self) -> Result<(), DriverError> {
        self.spans.clear();
        for [begin, end] in &self.events[..self.instructions.len()] {
            let since_step_begin = |event: &CudaEvent| {
                let ms = self.step_begin.elapsed_ms(event)?;
                Ok::<_, DriverError>(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
            };
            let start = since_step_begin(begin)?;
            self.spans.push(InstructionSpan { start, end: since_step_begin(end)?.max(start) });
        }
        self.instruction_spans = whole_instructions(&self.instructions, &self.spans);
        Ok(())
    }

    /// Spans of the instructions of the last step.
    pub fn instruction_spans(&self) -> &[InstructionSpan] {
        &self.instruction_spans
    }

    /// Breakdown of the last step's time: the whole duration of computation, and of collectives and transfers the
    /// part that neither computation nor an earlier one of them overlaps.
    pub fn breakdown(&self) -> TimeBreakdown {
        let instructions = self.instructions.iter().copied();
        time_breakdown(instructions.zip(self.spans.iter().copied()))
    }
}

/// The spans of instructions, from the first begin to the last end of their parts.
fn whole_instructions(
    timed: &[TimedInstruction],
    spans: &[InstructionSpan],
) -> Vec<InstructionSpan> {
    let mut whole: Vec<InstructionSpan> = vec![];
    for (instruction, span) in timed.iter().zip(spans) {
        match whole.last_mut().filter(|_| !instruction.begins_instr) {
            Some(last) => last.end = last.end.max(span.end),
            None => whole.push(*span),
        }
    }
    whole
}

fn time_breakdown(
    timed: impl Iterator<Item = (TimedInstruction, InstructionSpan)> + Clone,
) -> TimeBreakdown {
    let mut breakdown = TimeBreakdown::default();
    // Computation is one stream, so its spans are sorted and disjoint.
    let mut compute: Vec<InstructionSpan> = vec![];
    for (instruction, span) in timed.clone().filter(|(instruction, _)| instruction.is_compute()) {
        breakdown.add(instruction.category, span.end - span.start);
        compute.push(span);
    }
    let mut communication: Vec<_> =
        timed.filter(|(instruction, _)| !instruction.is_compute()).collect();
    communication.sort_by_key(|(_, span)| span.start);
    let mut counted_until = Duration::ZERO;
    for (instruction, span) in communication {
        let span = InstructionSpan { start: span.start.max(counted_until), end: span.end };
        counted_until = counted_until.max(span.end);
        if span.start >= span.end {
            continue;
        }
        let first = compute.partition_point(|other| other.end <= span.start);
        let overlapping = compute[first..].iter().take_while(|other| other.start < span.end);
        let hidden: Duration =
            overlapping.map(|other| other.end.min(span.end) - other.start.max(span.start)).sum();
        breakdown.add(instruction.category, (span.end - span.start).saturating_sub(hidden));
    }
    breakdown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn computation_hides_collectives_that_it_overlaps() {
        let ms = Duration::from_millis;
        let timed = |stream: Option<StreamId>, category, begin, end| {
            let node = stream.map(|stream| TimedNode { stream, segment: 0, index: 0 });
            let span = InstructionSpan { start: ms(begin), end: ms(end) };
            (TimedInstruction { node, category, begins_instr: true }, span)
        };
        let (compute, collectives) = (Some(StreamId::Compute), Some(StreamId::Collectives));
        let reductions = Some(StreamId::Buckets);
        let all = [
            timed(compute, TimeCategory::Gemm, 0, 10),
            timed(collectives, TimeCategory::CollectiveExposed, 5, 18),
            timed(compute, TimeCategory::Elementwise, 12, 15),
            timed(compute, TimeCategory::Gemm, 18, 20),
            timed(collectives, TimeCategory::CollectiveExposed, 18, 20),
            timed(None, TimeCategory::Bubble, 19, 25),
            timed(reductions, TimeCategory::CollectiveExposed, 24, 27),
            timed(reductions, TimeCategory::CollectiveExposed, 16, 17),
        ];
        let breakdown = time_breakdown(all.into_iter());
        let milliseconds = |category| breakdown.get(category).as_millis();
        // Of the first collective, 5–10 and 12–15 are hidden; of the second, everything. Of the reductions, the first
        // second is counted as a transfer, and the last as a collective.
        assert_eq!(milliseconds(TimeCategory::CollectiveExposed), 7);
        assert_eq!(milliseconds(TimeCategory::Gemm), 12);
        assert_eq!(milliseconds(TimeCategory::Elementwise), 3);
        assert_eq!(milliseconds(TimeCategory::Bubble), 5);
    }

    #[test]
    fn parts_of_an_instruction_have_one_span() {
        let ms = Duration::from_millis;
        let timed = |begins_instr, begin, end| {
            let category = TimeCategory::Attention;
            let span = InstructionSpan { start: ms(begin), end: ms(end) };
            (TimedInstruction { node: None, category, begins_instr }, span)
        };
        // A shift ends after the computation that it runs beside.
        let parts = [(true, 0, 2), (true, 2, 3), (false, 3, 9), (false, 3, 7), (true, 9, 10)];
        let (timed, spans): (Vec<_>, Vec<_>) =
            parts.map(|(begins, begin, end)| timed(begins, begin, end)).into_iter().unzip();
        let whole = whole_instructions(&timed, &spans);
        let whole = whole.iter().map(|span| (span.start.as_millis(), span.end.as_millis()));
        assert_eq!(whole.collect::<Vec<_>>(), [(0, 2), (2, 9), (9, 10)]);
    }
}
