//! The kernels of a stage, priced: the times of its passes and their kinds of work.

use narrows_plan::program::{GradientBucket, Instr, Phase, StageProgram};
use narrows_plan::{Mesh, Seconds};

use crate::breakdown::Breakdown;
use crate::overlap::BucketTime;
use crate::price::StreamPrices;
use crate::stage_time::{StageOverlap, StageTime, StepPart, SyncedStages, stage_sync_group};

/// A stage's kernels, priced and summed by kind.
pub(crate) struct StageKernels {
    /// The times of the stage's passes.
    pub time: StageTime,
    /// Kinds of work by phase, in the order of [`Phase::ALL`].
    kinds: [Breakdown; 4],
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
            .filter(|_| !stage.gradient_buckets.is_empty())
            .map(|slowdown| StageOverlap { buckets: bucket_times(stage, prices), slowdown });
        let beside_last = overlap.as_ref().map_or(0, |_| stage.bucket_reductions());
        let mut kinds = [Breakdown::default(); 4];
        let mut passes = [Seconds(0.0); 3];
        let (mut step, mut local) = (vec![], Seconds(0.0));
        for (index_of_phase, phase) in Phase::ALL.into_iter().enumerate() {
            let skipped = if phase == Phase::Step { beside_last } else { 0 };
            let list = &stage.instructions(phase)[skipped..];
            for (instr, time) in list.iter().zip(added_times(list, prices)) {
                *kinds[index_of_phase].part_mut(instr) += time.0;
                match (passes.get_mut(index_of_phase), stage_sync_group(instr)) {
                    (Some(total), _) => *total += time,
                    (None, None) => local += time,
                    (None, Some(group)) => {
                        step.push(StepPart::Local(std::mem::take(&mut local)));
                        let members = SyncedStages::containing(index, group, mesh);
                        step.push(StepPart::Synchronized(members, time));
                    }
                }
            }
        }
        step.push(StepPart::Local(local));
        let [forward, backward, weight_gradient] = passes;
        let time = StageTime { forward, backward, weight_gradient, step_phase: step, overlap };
        StageKernels { time, kinds }
    }

    /// The times of a step of this many microbatches by kind of work, without waiting.
    pub(crate) fn parts(&self, microbatches: u64) -> Breakdown {
        let mut parts = Breakdown::default();
        for (phase, kinds) in Phase::ALL.into_iter().zip(&self.kinds) {
            let runs = if phase == Phase::Step { 1.0 } else { microbatches as f64 };
            parts.add(kinds, runs);
        }
        parts
    }
}

/// Begin and end of each instruction of a pass, from the begin of the pass. A collective and the instructions beside it
/// begin together.
pub fn instruction_spans(instructions: &[Instr], prices: StreamPrices) -> Vec<[Seconds; 2]> {
    let time = |instr: &Instr| (prices.kernel)(&instr.kernel());
    let mut spans = Vec::with_capacity(instructions.len());
    let mut now = Seconds(0.0);
    let mut rest = instructions;
    while let Some((instr, following)) = rest.split_first() {
        let slowdown = prices.overlap.filter(|_| instr.overlapped_instrs > 0);
        let (beside, later) = following.split_at(slowdown.map_or(0, |_| instr.overlapped_instrs));
        let alone: Seconds = beside.iter().map(time).sum();
        let [end, beside_end] =
            slowdown.map_or([time(instr), alone], |s| s.ends(time(instr), alone));
        spans.push([now, now + end]);
        let stretch = if alone.0 > 0.0 { beside_end.0 / alone.0 } else { 1.0 };
        let mut begin = now;
        for other in beside {
            let end = begin + time(other) * stretch;
            spans.push([begin, end]);
            begin = end;
        }
        now = Seconds(begin.0.max((now + end).0));
        rest = later;
    }
    spans
}

/// The time that each instruction of a pass adds to it: its time alone, and that of a collective beside others what it
/// adds to theirs.
fn added_times(instructions: &[Instr], prices: StreamPrices) -> impl Iterator<Item = Seconds> {
    let time = move |instr: &Instr| (prices.kernel)(&instr.kernel());
    instructions.iter().enumerate().map(move |(at, instr)| {
        let beside = instructions[at + 1..].iter().take(instr.overlapped_instrs);
        match prices.overlap {
            Some(slowdown) if instr.overlapped_instrs > 0 => {
                slowdown.exposed(time(instr), beside.map(time).sum())
            }
            _ => time(instr),
        }
    })
}

/// The times of a stage's gradient buckets.
fn bucket_times(stage: &StageProgram, prices: StreamPrices) -> Vec<BucketTime> {
    let last_pass = stage.instructions(stage.last_phase());
    let (mut ready, mut priced) = (Seconds(0.0), 0);
    let of_bucket = |GradientBucket { after, reductions }: &GradientBucket| {
        ready += added_times(&last_pass[priced..*after], prices).sum();
        priced = *after;
        let reduction = added_times(&stage.step[reductions.clone()], prices).sum();
        BucketTime { ready, reduction }
    };
    stage.gradient_buckets.iter().map(of_bucket).collect()
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

    /// A collective of three seconds beside two fused ops of two seconds each, then another fused op.
    #[test]
    fn a_collective_and_the_instructions_beside_it_begin_together() {
        let collective = Action::Collective(CollectiveOp {
            function: CollectiveFunction::AllReduce(Reduction::Sum),
            axis: Axis::Tensor,
            from: Layout::Partial,
            to: Layout::Replicated,
            payload: narrows_plan::Bytes(8),
            statistic: narrows_plan::Bytes(0),
            group: DeviceGroup { axis: Axis::Tensor, size: 2, stride: 1 },
        });
        let fused = || instr(Action::Fused(FusedOp::Fill), 0);
        let pass = [instr(collective, 2), fused(), fused(), fused()];
        let kernel = |kernel: &narrows_plan::Kernel| match kernel {
            narrows_plan::Kernel::Collective(_) => Seconds(3.0),
            _ => Seconds(2.0),
        };
        let spans = |overlap: Option<OverlapSlowdown>| -> Vec<[f64; 2]> {
            let prices = StreamPrices { kernel: &kernel, overlap };
            let spans = instruction_spans(&pass, prices);
            let total: Seconds = added_times(&pass, prices).sum();
            assert!((spans[3][1].0 - total.0).abs() < 1e-12);
            spans.into_iter().map(|span| span.map(|time| time.0)).collect()
        };
        let free = OverlapSlowdown { compute: 1.0, collective: 1.0 };
        assert_eq!(spans(Some(free)), [[0.0, 3.0], [0.0, 2.0], [2.0, 4.0], [4.0, 6.0]]);
        assert_eq!(spans(None), [[0.0, 3.0], [3.0, 5.0], [5.0, 7.0], [7.0, 9.0]]);
        let slowed = OverlapSlowdown { compute: 2.0, collective: 1.0 };
        assert_eq!(spans(Some(slowed))[0], [0.0, 3.0]);
        assert_eq!(spans(Some(slowed))[3], [5.5, 7.5]);
    }
}
