//! The plan that needs the least memory.

use std::ops::Range;
use std::sync::Arc;

use narrows_plan::strategy::{Context, NormRule, Recompute, Rules};
use narrows_plan::{Bytes, Seconds};

use crate::divide::{block_part, in_flight};
use crate::ends::EmbeddingAndHead;
use crate::fit::{ContextSolver, FeasiblePlan};
use crate::request::Request;
use crate::segments::{SegmentSolver, SolvedSegment};
use crate::stages::{Partition, StageAssignment};

/// How many points of the blocks' hulls are lowered, from the smallest up: what is redone needs
/// memory for a while, so keeping the least is not always the smallest arena.
const LEVELS_MAX: usize = 5;

impl ContextSolver<'_> {
    /// The plan of a context that needs the least memory, as far as bytes tell: every block and both
    /// ends at their smallest, and the blocks divided so that no stage needs more than it must.
    pub fn smallest(&self, context: &Context) -> Option<FeasiblePlan> {
        let all = EmbeddingAndHead::all(self.request, self.segments, context);
        let fitted = all.iter().filter_map(|ends| {
            let ends = ends.pairs(self.segments, context).pop()?;
            let levels = (0..LEVELS_MAX).filter_map(|level| {
                let stages = self.smallest_stages(context, &ends, level)?;
                let counts = stages.iter().map(|stage| stage.blocks.len()).collect();
                let partition = Partition { bound: Seconds(0.0), counts, stages };
                Some(self.realise(context, &ends, partition))
            });
            levels.min_by_key(FeasiblePlan::peak)
        });
        fitted.min_by_key(FeasiblePlan::peak)
    }

    /// The smallest plan under narrower rules: bytes do not tell what a block that redoes a lot holds
    /// for a while, and the search for few bytes redoes more than the arena rewards.
    pub fn smallest_of_narrower(&self, context: &Context) -> Option<FeasiblePlan> {
        let narrower = narrower(self.request).into_iter().filter_map(|request| {
            let segments = SegmentSolver::new(&request, self.segments.deadline().clone());
            ContextSolver::new(&request, &segments).smallest(context)
        });
        narrower.min_by_key(FeasiblePlan::peak)
    }

    /// A plan of a context under narrower rules that is faster than `incumbent`: where memory binds,
    /// correcting budgets by arenas may miss what fewer decisions lead to at once.
    pub fn faster_of_narrower(&self, context: &Context, incumbent: f64) -> Option<FeasiblePlan> {
        let mut best: Option<FeasiblePlan> = None;
        for request in narrower(self.request) {
            let least = best.as_ref().map_or(incumbent, |fitted| fitted.time.0);
            let segments = SegmentSolver::new(&request, self.segments.deadline().clone());
            let fitter = ContextSolver::new(&request, &segments);
            let outlook = fitter.outlook(context, least);
            if let Ok(Some(faster)) = fitter.fit(context, &outlook, least).best {
                best = Some(faster);
            }
        }
        best
    }

    /// The blocks `level` points above their smallest, divided to need the least on the fullest stage.
    fn smallest_stages(
        &self,
        context: &Context,
        ends: &EmbeddingAndHead,
        level: usize,
    ) -> Option<Vec<Arc<StageAssignment>>> {
        let stages = context.mesh.pipeline as usize;
        let shapes = self.segments.layer_shapes();
        let mut blocks: Vec<Vec<Arc<SolvedSegment>>> = vec![];
        for stage in 0..stages {
            let in_flight = in_flight(context, stage);
            let smallest = |shape: &usize| {
                let part = block_part(*shape, ends.border);
                let hull = self.segments.hull(part, context, in_flight, None);
                hull.iter().rev().nth(level.min(hull.len().checked_sub(1)?)).cloned()
            };
            blocks.push(shapes.iter().map(smallest).collect::<Option<_>>()?);
        }
        let bytes = |stage: usize, block: usize| {
            blocks[stage][block].bytes.total(in_flight(context, stage))
        };
        let fixed = |stage: usize| ends.bytes(context, stage);
        // Fills each stage up to a cap, leaving a block for each stage after it.
        let fill = |cap: Bytes| {
            let (mut ranges, mut first) = (vec![], 0);
            for stage in 0..stages {
                let last = shapes.len() - (stages - stage - 1);
                let mut used = fixed(stage);
                let mut end = first;
                while end < last && (end == first || used + bytes(stage, end) <= cap) {
                    used += bytes(stage, end);
                    end += 1;
                }
                if used > cap {
                    return None;
                }
                ranges.push(first..end);
                first = end;
            }
            (first == shapes.len()).then_some(ranges)
        };
        let all: Bytes = (0..shapes.len()).map(|block| bytes(0, block)).sum();
        let (mut low, mut high) = (0, (all + fixed(0) + fixed(stages - 1)).0);
        fill(Bytes(high))?;
        while high - low > high / 1024 + 1 {
            let middle = low + (high - low) / 2;
            if fill(Bytes(middle)).is_some() { high = middle } else { low = middle }
        }
        let allot = |(stage, range): (usize, Range<usize>)| {
            Arc::new(StageAssignment::new(blocks[stage][range].to_vec(), in_flight(context, stage)))
        };
        Some(fill(Bytes(high))?.into_iter().enumerate().map(allot).collect())
    }
}

/// The request with fewer things left to decide: one way of redoing, or one norm.
fn narrower(request: &Request) -> Vec<Request> {
    let rules = request.rules;
    let mut made = vec![];
    if rules.recompute == Recompute::Auto {
        let redone = [Recompute::Latents, Recompute::Block];
        made.extend(redone.map(|recompute| Rules { recompute, ..rules }));
    }
    if rules.norm == NormRule::Auto {
        made.extend([NormRule::Sync, NormRule::Online].map(|norm| Rules { norm, ..rules }));
    }
    made.into_iter().map(|rules| Request { rules, ..request.clone() }).collect()
}
