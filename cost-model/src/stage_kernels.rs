//! The kernels of a stage, priced: the times of its passes and their kinds of work.

use narrows_plan::program::{ChunkPhase, GatherBucket, GradientBucket, Instr, Phase, StageProgram};
use narrows_plan::{Mesh, Seconds};

use crate::breakdown::Breakdown;
use crate::launch_queue::LaunchQueue;
use crate::overlap::{BucketTime, GatherTime};
use crate::price::StreamPrices;
use crate::stage_time::{
    PassTimes, StageOverlap, StageTime, StepPart, SyncedStages, stage_sync_group,
};

/// A stage's kernels, priced and summed by kind.
pub(crate) struct StageKernels {
    /// The times of the stage's passes.
    pub time: StageTime,
    /// Kinds of work of each pass of one microbatch through each chunk.
    passes: Vec<Breakdown>,
    /// Kinds of work of the step phase.
    step: Breakdown,
}

impl StageKernels {
    pub(crate) fn new(
        index: usize,
        stage: &StageProgram,
        mesh: &Mesh,
        prices: StreamPrices,
    ) -> StageKernels {
        let overlap = prices
            .overlap
            .filter(|_| !(stage.gradient_buckets.is_empty() && stage.gather_buckets.is_empty()))
            .map(|slowdown| StageOverlap {
                buckets: bucket_times(stage, prices),
                gathers: gather_times(stage, prices),
                slowdown,
            });
        let in_step_phase = match &overlap {
            Some(_) => stage.bucket_reductions()..stage.before_gathers(),
            None => 0..stage.step.len(),
        };
        let mut passes = vec![];
        let mut pass_time = |at: ChunkPhase| -> Seconds {
            let list = stage.instructions(at);
            let (mut kinds, mut queue) = (Breakdown::default(), LaunchQueue::default());
            for (instr, time) in list.iter().zip(added_times(list, prices)) {
                kinds.add_instr(instr, time, prices.kernel);
                queue = queue.then(launched(instr, time, prices));
            }
            kinds.bubble += queue.wait_s();
            passes.push(kinds);
            Seconds(queue.time_s())
        };
        let chunk_times = (0..stage.chunks.len()).map(|chunk| {
            let [forward, backward, weight_gradient] =
                Phase::PASSES.map(|phase| pass_time(ChunkPhase { chunk, phase }));
            PassTimes { forward, backward, weight_gradient }
        });
        let chunks = chunk_times.collect();
        let (mut step, mut local) = (Breakdown::default(), LaunchQueue::default());
        let mut step_phase = vec![];
        let list = &stage.step[in_step_phase];
        for (instr, time) in list.iter().zip(added_times(list, prices)) {
            step.add_instr(instr, time, prices.kernel);
            match stage_sync_group(instr) {
                None => local = local.then(launched(instr, time, prices)),
                Some(group) => {
                    step.bubble += local.wait_s();
                    step_phase.push(StepPart::Local(Seconds(std::mem::take(&mut local).time_s())));
                    let members = SyncedStages::containing(index, group, mesh);
                    step_phase.push(StepPart::Synchronised(members, time));
                }
            }
        }
        step.bubble += local.wait_s();
        step_phase.push(StepPart::Local(Seconds(local.time_s())));
        let time = StageTime { chunks, step_phase, overlap };
        StageKernels { time, passes, step }
    }

    /// The times of a step of this many forward passes by kind of work, without waiting.
    pub(crate) fn parts(&self, passes: u64) -> Breakdown {
        let mut parts = Breakdown::default();
        self.passes.iter().for_each(|kinds| parts.add(kinds, passes as f64));
        parts.add(&self.step, 1.0);
        parts
    }
}

/// Begin and end of each instruction of a pass, from the begin of the pass. Collectives and the instructions that they
/// overlap with begin together.
pub fn instruction_spans(instructions: &[Instr], prices: StreamPrices) -> Vec<[Seconds; 2]> {
    let mut spans = Vec::with_capacity(instructions.len());
    let (mut now, mut launched_s) = (Seconds(0.0), 0.0);
    for OverlappedGroup { collectives, beside } in overlapped_groups(instructions, prices) {
        let launches = |list: &[Instr]| list.iter().map(|instr| host_s(instr, prices)).sum::<f64>();
        let first_s = launches(&collectives[..1]);
        now = Seconds(now.0.max(launched_s + first_s));
        launched_s += launches(collectives) + launches(beside);
        let mut end = Seconds(0.0);
        let one_after_the_other = collectives.iter().map(|instr| {
            let begin = end;
            end += (prices.kernel)(&instr.kernel());
            [begin, end]
        });
        let inner = StreamPrices { host: None, ..prices };
        let alone = [one_after_the_other.collect(), instruction_spans(beside, inner)];
        let lengths = alone.each_ref().map(|list: &Vec<[Seconds; 2]>| {
            Seconds(list.iter().map(|[_, end]| end.0).fold(0.0, f64::max))
        });
        let ends = match prices.overlap {
            Some(slowdown) if !beside.is_empty() => slowdown.ends(lengths[0], lengths[1]),
            _ => lengths,
        };
        for (index, stream) in alone.into_iter().enumerate() {
            let length = lengths[index].0;
            let stretch = if length > 0.0 { ends[index].0 / length } else { 1.0 };
            spans.extend(stream.into_iter().map(|span| span.map(|time| now + time * stretch)));
        }
        now += Seconds(ends[0].0.max(ends[1].0));
    }
    spans
}

/// Time of the host for the launches of an instruction.
fn host_s(instr: &Instr, prices: StreamPrices) -> f64 {
    prices.host.map_or(0.0, |host| host.host_time(&instr.kernel()).0)
}

/// An instruction that adds `time` to the device, in a launch queue.
fn launched(instr: &Instr, time: Seconds, prices: StreamPrices) -> LaunchQueue {
    LaunchQueue::operator(host_s(instr, prices), time.0)
}

/// Consecutive collectives and the instructions that they overlap with.
struct OverlappedGroup<'a> {
    /// The collectives; a single instruction of any kind where nothing overlaps.
    collectives: &'a [Instr],
    /// The instructions beside them, in groups of their own where collectives over the data axis overlap with others.
    beside: &'a [Instr],
}

/// The instructions of a pass in their order, in groups that begin together.
fn overlapped_groups<'a>(
    instructions: &'a [Instr],
    prices: StreamPrices,
) -> impl Iterator<Item = OverlappedGroup<'a>> {
    let has_overlap = prices.overlap.is_some();
    let mut rest = instructions;
    std::iter::from_fn(move || {
        let (first, following) = rest.split_first()?;
        let (window, collectives) = match has_overlap {
            true => (
                1 + first.overlapped_instrs.min(following.len()),
                1 + first.collectives_in_sequence(following),
            ),
            false => (1, 1),
        };
        let (group, later) = rest.split_at(window);
        rest = later;
        let (collectives, beside) = group.split_at(collectives.min(window));
        Some(OverlappedGroup { collectives, beside })
    })
}

/// Time that each instruction adds to its pass: its own time or, for an overlapped collective, its share of the exposed
/// time of its group, in proportion to the times of the group's collectives.
fn added_times(instructions: &[Instr], prices: StreamPrices) -> Vec<Seconds> {
    let time = |instr: &Instr| (prices.kernel)(&instr.kernel());
    let mut added = Vec::with_capacity(instructions.len());
    for OverlappedGroup { collectives, beside } in overlapped_groups(instructions, prices) {
        match prices.overlap {
            Some(slowdown) if !beside.is_empty() => {
                let beside = added_times(beside, prices);
                let alone: Seconds = collectives.iter().map(time).sum();
                let exposed = slowdown.exposed(alone, beside.iter().copied().sum());
                let share = |instr: &Instr| time(instr).0 / alone.0.max(f64::MIN_POSITIVE);
                added.extend(collectives.iter().map(|instr| exposed * share(instr)));
                added.extend(beside);
            }
            _ => added.extend(collectives.iter().map(time)),
        }
    }
    added
}

/// The times of a stage's gradient buckets.
fn bucket_times(stage: &StageProgram, prices: StreamPrices) -> Vec<BucketTime> {
    let mut ready = PassPosition::new(stage.last_pass_instructions(), prices);
    let of_bucket = |GradientBucket { after, reductions }: &GradientBucket| {
        let reductions = added_times(&stage.step[reductions.clone()], prices);
        let reduction = reductions.into_iter().sum();
        BucketTime { ready: ready.advance(*after), reduction }
    };
    stage.gradient_buckets.iter().map(of_bucket).collect()
}

/// The times of a stage's gather buckets.
fn gather_times(stage: &StageProgram, prices: StreamPrices) -> Vec<GatherTime> {
    let mut needed = PassPosition::new(stage.first_pass_instructions(), prices);
    let of_bucket = |GatherBucket { before, gathers }: &GatherBucket| {
        let gathers = added_times(&stage.step[gathers.clone()], prices);
        GatherTime { needed: needed.advance(*before), gather: gathers.into_iter().sum() }
    };
    stage.gather_buckets.iter().map(of_bucket).collect()
}

/// A position in a pass that only advances.
struct PassPosition<'a> {
    instructions: &'a [Instr],
    prices: StreamPrices<'a>,
    /// Number of instructions before the position, and their time.
    at: usize,
    time: Seconds,
}

impl<'a> PassPosition<'a> {
    fn new(instructions: &'a [Instr], prices: StreamPrices<'a>) -> Self {
        PassPosition { instructions, prices, at: 0, time: Seconds(0.0) }
    }

    /// Time of the pass before an instruction, by index.
    fn advance(&mut self, to: usize) -> Seconds {
        let passed = added_times(&self.instructions[self.at..to], self.prices);
        self.time += passed.into_iter().sum();
        self.at = to;
        self.time
    }
}

#[cfg(test)]
mod tests {
    use narrows_plan::program::{Action, CollectiveFunction, CollectiveOp, FusedOp, Reduction};
    use narrows_plan::{Axis, DeviceGroup, Layout};

    use super::*;
    use crate::overlap::OverlapSlowdown;

    fn instr(action: Action, overlapped_instrs: usize) -> Instr {
        Instr { action, reads: vec![], writes: vec![], origin: "test".into(), overlapped_instrs }
    }

    fn collective(axis: Axis) -> Action {
        Action::Collective(CollectiveOp {
            function: CollectiveFunction::AllReduce(Reduction::Sum),
            axis,
            from: Layout::Partial,
            to: Layout::Replicated,
            payload: narrows_plan::Bytes(8),
            statistic: narrows_plan::Bytes(0),
            group: DeviceGroup { axis, size: 2, stride: 1 },
        })
    }

    /// Three seconds for a collective and two for anything else.
    fn kernel(kernel: &narrows_plan::Kernel) -> Seconds {
        match kernel {
            narrows_plan::Kernel::Collective(_) => Seconds(3.0),
            _ => Seconds(2.0),
        }
    }

    /// Spans of a pass in seconds, and the time of the pass.
    fn spans(pass: &[Instr], overlap: Option<OverlapSlowdown>) -> (Vec<[f64; 2]>, f64) {
        let prices = StreamPrices::new(&kernel, overlap);
        let spans = instruction_spans(pass, prices);
        let total: Seconds = added_times(pass, prices).into_iter().sum();
        (spans.into_iter().map(|span| span.map(|time| time.0)).collect(), total.0)
    }

    /// Two collectives over the data axis overlap with all that follows: a fused op, a collective over the tensor axis that
    /// overlaps with a fused op, and a collective over the tensor axis alone.
    #[test]
    fn collectives_over_the_data_axis_overlap_with_those_over_others() {
        let fused = || instr(Action::Fused(FusedOp::Fill), 0);
        let tensor = |overlapped| instr(collective(Axis::Tensor), overlapped);
        let data = |overlapped| instr(collective(Axis::Data), overlapped);
        let pass = [data(5), data(4), fused(), tensor(1), fused(), tensor(0), fused()];
        let free = OverlapSlowdown { compute: 1.0, collective: 1.0 };
        let beside = [[0.0, 2.0], [2.0, 5.0], [2.0, 4.0], [5.0, 8.0]];
        let expected = [&[[0.0, 3.0], [3.0, 6.0]], &beside[..], &[[8.0, 10.0]]].concat();
        assert_eq!(spans(&pass, Some(free)), (expected, 10.0));
        let (in_order, time) = spans(&pass, None);
        assert_eq!((in_order[6], time), ([16.0, 18.0], 18.0));
        // Beside its fused op of 2 s, 1 s of the tensor-axis collective's 3 s runs, and the rest afterwards: what is beside the
        // other collectives takes 2 + 4 + 3 s, in which 4.5 s of their 6 s run.
        let slowed = OverlapSlowdown { compute: 1.0, collective: 2.0 };
        let (spans, time) = spans(&pass, Some(slowed));
        assert_eq!(spans[..2], [[0.0, 5.25], [5.25, 10.5]]);
        assert_eq!((spans[5], spans[6], time), ([6.0, 9.0], [10.5, 12.5], 12.5));
    }

    /// A collective of three seconds, overlapped with two fused ops of two seconds each, then another fused op.
    #[test]
    fn a_collective_and_the_instructions_that_it_overlaps_with_begin_together() {
        let fused = || instr(Action::Fused(FusedOp::Fill), 0);
        let pass = [instr(collective(Axis::Tensor), 2), fused(), fused(), fused()];
        let spans = |overlap: Option<OverlapSlowdown>| {
            let (spans, time) = spans(&pass, overlap);
            assert!((spans[3][1] - time).abs() < 1e-12);
            spans
        };
        let free = OverlapSlowdown { compute: 1.0, collective: 1.0 };
        assert_eq!(spans(Some(free)), [[0.0, 3.0], [0.0, 2.0], [2.0, 4.0], [4.0, 6.0]]);
        assert_eq!(spans(None), [[0.0, 3.0], [3.0, 5.0], [5.0, 7.0], [7.0, 9.0]]);
        let slowed = OverlapSlowdown { compute: 2.0, collective: 1.0 };
        assert_eq!(spans(Some(slowed))[0], [0.0, 3.0]);
        assert_eq!(spans(Some(slowed))[3], [5.5, 7.5]);
    }
}
