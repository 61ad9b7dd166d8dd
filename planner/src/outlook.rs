//! What the bytes of a context allow, before anything is lowered.

use narrows_plan::graph::SegmentKind;
use narrows_plan::strategy::Context;
use narrows_plan::{Bytes, Seconds};

use crate::ends::EmbeddingAndHead;
use crate::fit::{ContextSolver, Infeasible, MemoryEvidence, PartitionResult};
use crate::segments::SegmentSpec;

/// What the bytes of a context allow, for each layout of what segments hand on, most promising
/// first.
pub struct ContextBounds {
    pub(crate) borders: Vec<(EmbeddingAndHead, LayoutBound)>,
}

/// What bytes allow with one layout.
pub(crate) enum LayoutBound {
    /// No plan is faster.
    Bound(Seconds),
    /// No plan is faster than one that is known.
    NothingFaster,
    /// None fits.
    Refused(Infeasible),
}

impl ContextBounds {
    /// A bound on the plans of the context, which may be no better than `incumbent`; or why there
    /// are none.
    pub fn bound(&self, incumbent: f64) -> Result<Seconds, Infeasible> {
        let bounds = self.borders.iter().map(|(_, reach)| reach);
        let mut refused = Infeasible::NoStrategy;
        let mut least: Option<f64> = None;
        for reach in bounds {
            let bound = match reach {
                LayoutBound::Refused(refusal) => {
                    refused = refused.gentler(refusal.clone());
                    continue;
                }
                LayoutBound::NothingFaster => incumbent,
                LayoutBound::Bound(bound) => bound.0,
            };
            least = Some(least.map_or(bound, |least| least.min(bound)));
        }
        least.map(Seconds).ok_or(refused)
    }
}

impl LayoutBound {
    fn bound(&self) -> f64 {
        if let LayoutBound::Bound(bound) = self { bound.0 } else { f64::INFINITY }
    }
}

impl ContextSolver<'_> {
    /// What the bytes of a context allow, before anything is lowered. Layouts that nothing faster than
    /// `incumbent` has are not followed up.
    pub fn outlook(&self, context: &Context, incumbent: f64) -> ContextBounds {
        let mut borders = vec![];
        for fastest in EmbeddingAndHead::all(self.request, self.segments, context) {
            let reach = if fastest.bound.0 < incumbent {
                self.reach(context, &fastest, incumbent)
            } else {
                LayoutBound::NothingFaster
            };
            borders.push((fastest, reach));
        }
        borders.sort_by(|a, b| a.1.bound().total_cmp(&b.1.bound()));
        ContextBounds { borders }
    }

    /// What the bytes allow with a border: the bound is that of ends as fast as the fastest and as
    /// small as the smallest.
    fn reach(&self, context: &Context, fastest: &EmbeddingAndHead, incumbent: f64) -> LayoutBound {
        let unlimited = vec![Bytes(0); context.mesh.pipeline as usize];
        let ideal = fastest.ideal(self.segments, context);
        let mut extras = self.extras(context, &ideal);
        // Other ends may spend less once a step.
        let last = extras.len() - 1;
        for (stage, end) in [(0, SegmentKind::Embedding), (last, SegmentKind::Head)] {
            let part = SegmentSpec::end(end, fastest.border, fastest.tied_weight);
            let held = match end {
                SegmentKind::Embedding => &ideal.embedding,
                _ => &ideal.head,
            };
            let spared = held.time.step.0 - self.segments.step_range(part, context)[0];
            extras[stage].step_least = Seconds(extras[stage].step_least.0 - spared.max(0.0));
        }
        match self.divided(context, &ideal, &extras, &unlimited, incumbent) {
            PartitionResult::Found(_, found) => LayoutBound::Bound(found[0].bound),
            PartitionResult::Interrupted => LayoutBound::Bound(fastest.bound),
            // Nothing that fits beats the incumbent, if there is one; else nothing fits.
            PartitionResult::Nothing(_) if incumbent.is_finite() => LayoutBound::NothingFaster,
            PartitionResult::Nothing(excess) => {
                let limit = self.request.memory_bytes();
                let needed = limit + excess;
                LayoutBound::Refused(Infeasible::Memory {
                    stage: None,
                    needed,
                    limit,
                    of: MemoryEvidence::Every,
                })
            }
        }
    }
}
