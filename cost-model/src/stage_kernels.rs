//! The kernels of a stage, priced: the times of its passes and their kinds of work.

use narrows_plan::program::{GradientBucket, Instr, StageProgram};
use narrows_plan::{Mesh, Seconds};

use crate::breakdown::Breakdown;
use crate::overlap::BucketTime;
use crate::price::StreamPrices;
use crate::stage_time::{StageOverlap, StageTime, StepPart, SyncedStages, stage_sync_group};

/// A stage's kernels, priced and summed by kind.
pub(crate) struct StageKernels {
    /// The times of the stage's passes.
    pub time: StageTime,
    /// Per phase: forward, backward, step.
    kinds: [Breakdown; 3],
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
        let beside_backward = overlap.as_ref().map_or(0, |_| stage.bucket_reductions());
        let mut kinds = [Breakdown::default(); 3];
        let mut totals = [Seconds(0.0); 2];
        let (mut step, mut local) = (vec![], Seconds(0.0));
        let phase_instructions =
            [&stage.forward[..], &stage.backward, &stage.step[beside_backward..]];
        for (phase, list) in phase_instructions.into_iter().enumerate() {
            for (instr, time) in list.iter().zip(added_times(list, prices)) {
                *kinds[phase].part_mut(instr) += time.0;
                match (totals.get_mut(phase), stage_sync_group(instr)) {
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
        let [forward, backward] = totals;
        let time = StageTime { forward, backward, step_phase: step, overlap };
        StageKernels { time, kinds }
    }

    /// The times of a step of this many microbatches by kind of work, without waiting.
    pub(crate) fn parts(&self, microbatches: u64) -> Breakdown {
        let mut parts = Breakdown::default();
        parts.add(&self.kinds[0], microbatches as f64);
        parts.add(&self.kinds[1], microbatches as f64);
        parts.add(&self.kinds[2], 1.0);
        parts
    }
}

/// Begin and end of each instruction of a pass, from the begin of the pass. A collective and the instructions beside it
/// begin together.
pub fn instruction_spans(instructions: &[Instr], prices: StreamPrices) -> Vec<[Seconds; 2]> {
    let time = |instr: &Instr| (prices.kernel)(&instr.kernel());
    let mut spans = Vec::with_capacity(instructions.len());
    let mut begin = Seconds(0.0);
    while let Some(instr) = instructions.get(spans.len()) {
        let beside = instructions[spans.len() + 1..].iter().take(instr.overlapped_instrs);
        let alone: Seconds = beside.clone().map(time).sum();
        let [end, beside_end] = match prices.overlap {
            Some(slowdown) => slowdown.ends(time(instr), alone),
            None => [time(instr), alone],
        };
        spans.push([begin, begin + end]);
        let (mut now, stretch) = match prices.overlap {
            Some(_) if alone.0 > 0.0 => (begin, beside_end.0 / alone.0),
            _ => (begin + end, 1.0),
        };
        for other in beside {
            let end = now + time(other) * stretch;
            spans.push([now, end]);
            now = end;
        }
        begin = Seconds(now.0.max((begin + end).0));
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
    let (mut ready, mut priced) = (Seconds(0.0), 0);
    let of_bucket = |GradientBucket { after, reductions }: &GradientBucket| {
        ready += added_times(&stage.backward[priced..*after], prices).sum();
        priced = *after;
        let reduction = added_times(&stage.step[reductions.clone()], prices).sum();
        BucketTime { ready, reduction }
    };
    stage.gradient_buckets.iter().map(of_bucket).collect()
}
