//! When a GPU did what, by events around every instruction, and what a step's time was spent on.

use std::time::Duration;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use std::sync::Arc;

use super::super::tape::StreamId;
use narrows_runtime::{InstructionSpan, TimeBreakdown, TimeCategory};

/// Times the instructions of a step. Events are made once and used in every step.
pub struct InstructionTimers {
    context: Arc<CudaContext>,
    begun: CudaEvent,
    events: Vec<[CudaEvent; 2]>,
    /// Of the instructions begun in this step: where they ran, and what they count as.
    kinds: Vec<(Option<StreamId>, TimeCategory)>,
    /// Which they are: a piece of the tape and an entry of it; none of a transfer.
    entries: Vec<Option<[usize; 2]>>,
    /// How many of them have ended, as far as the processor knows.
    ended: usize,
    laps: Vec<InstructionSpan>,
}

fn event(context: &Arc<CudaContext>) -> Result<CudaEvent, DriverError> {
    context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT))
}

impl InstructionTimers {
    /// None yet.
    pub fn new(context: &Arc<CudaContext>) -> Result<InstructionTimers, DriverError> {
        let (begun, context) = (event(context)?, context.clone());
        Ok(InstructionTimers {
            context,
            begun,
            events: vec![],
            kinds: vec![],
            entries: vec![],
            ended: 0,
            laps: vec![],
        })
    }

    /// A step begins on a stream.
    pub fn start(&mut self, stream: &CudaStream) -> Result<(), DriverError> {
        self.kinds.clear();
        self.entries.clear();
        self.ended = 0;
        self.begun.record(stream)
    }

    /// An instruction begins on a stream; of the two lanes, or of transfers, which are no entries.
    pub fn begin(
        &mut self,
        (lane, part): (Option<StreamId>, TimeCategory),
        entry: Option<[usize; 2]>,
        stream: &CudaStream,
    ) -> Result<(), DriverError> {
        if self.events.len() == self.kinds.len() {
            self.events.push([event(&self.context)?, event(&self.context)?]);
        }
        self.events[self.kinds.len()][0].record(stream)?;
        self.kinds.push((lane, part));
        self.entries.push(entry);
        Ok(())
    }

    /// The instruction that began last ends on a stream.
    pub fn end(&mut self, stream: &CudaStream) -> Result<(), DriverError> {
        if let Some(last) = self.kinds.len().checked_sub(1) {
            self.events[last][1].record(stream)?;
        }
        self.ended = self.kinds.len();
        Ok(())
    }

    /// The entries of this step on a lane, in their order, and whether each is over.
    pub fn entries(&self, lane: StreamId) -> impl Iterator<Item = ([usize; 2], bool)> {
        let all = self.kinds.iter().zip(&self.entries).zip(&self.events).enumerate();
        all.filter(move |(_, (((own, _), _), _))| *own == Some(lane)).filter_map(
            |(index, ((_, entry), events))| {
                let over = index < self.ended && events[1].try_is_complete().unwrap_or(false);
                Some(((*entry)?, over))
            },
        )
    }

    /// Reads the events of a step that is over.
    pub fn read(&mut self) -> Result<(), DriverError> {
        self.laps.clear();
        for [begin, end] in &self.events[..self.kinds.len()] {
            let since = |event: &CudaEvent| {
                let ms = self.begun.elapsed_ms(event)?;
                Ok::<_, DriverError>(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
            };
            let begin = since(begin)?;
            self.laps.push(InstructionSpan { start: begin, end: since(end)?.max(begin) });
        }
        Ok(())
    }

    /// Those of the last step.
    pub fn laps(&self) -> &[InstructionSpan] {
        &self.laps
    }

    /// What the step's time was spent on: the computation as long as it takes, collectives and transfers
    /// where nothing is computed meanwhile.
    pub fn parts(&self) -> TimeBreakdown {
        parts(self.kinds.iter().zip(&self.laps).map(|((lane, part), lap)| (*lane, *part, *lap)))
    }
}

fn parts(
    laps: impl Iterator<Item = (Option<StreamId>, TimeCategory, InstructionSpan)> + Clone,
) -> TimeBreakdown {
    let mut made = TimeBreakdown::default();
    // Computation is one stream: its laps follow each other.
    let mut busy: Vec<InstructionSpan> = vec![];
    for (_, part, lap) in laps.clone().filter(|(lane, ..)| *lane == Some(StreamId::Compute)) {
        made.add(part, lap.end - lap.start);
        busy.push(lap);
    }
    for (_, part, lap) in laps.filter(|(lane, ..)| *lane != Some(StreamId::Compute)) {
        let first = busy.partition_point(|other| other.end <= lap.start);
        let overlapping = busy[first..].iter().take_while(|other| other.start < lap.end);
        let hidden: Duration =
            overlapping.map(|other| other.end.min(lap.end) - other.start.max(lap.start)).sum();
        made.add(part, (lap.end - lap.start).saturating_sub(hidden));
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_computed_meanwhile_hides_a_collective() {
        let ms = Duration::from_millis;
        let lap = |begin, end| InstructionSpan { start: ms(begin), end: ms(end) };
        let (compute, joint) = (Some(StreamId::Compute), Some(StreamId::Collectives));
        let all = [
            (compute, TimeCategory::Gemm, lap(0, 10)),
            (joint, TimeCategory::CollectiveExposed, lap(5, 18)),
            (compute, TimeCategory::Elementwise, lap(12, 15)),
            (compute, TimeCategory::Gemm, lap(18, 20)),
            (joint, TimeCategory::CollectiveExposed, lap(18, 20)),
            (None, TimeCategory::Bubble, lap(19, 25)),
        ];
        let parts = parts(all.into_iter());
        let found = |part| parts.get(part).as_millis();
        // Of 5 to 18, 5 to 10 and 12 to 15 are hidden.
        assert_eq!(found(TimeCategory::CollectiveExposed), 5);
        assert_eq!(
            (
                found(TimeCategory::Gemm),
                found(TimeCategory::Elementwise),
                found(TimeCategory::Bubble)
            ),
            (12, 3, 5)
        );
    }
}
