//! A first plan to beat, found in a hurry.

use narrows_plan::strategy::Context;
use narrows_plan::{Bytes, Seconds};
use rayon::prelude::*;

use crate::bound::quick_bound;
use crate::divide::StagePartitioner;
use crate::ends::EmbeddingAndHead;
use crate::extras::play;
use crate::fit::{ContextSolver, FeasiblePlan};
use crate::stages::Partition;

/// How much longer a step may take in a context than its work: what the pipeline leaves idle, and a
/// guess at what a tensor axis costs.
fn slowed(context: &Context) -> f64 {
    let microbatches = context.workload.microbatches(&context.mesh) as f64;
    let bubble = (context.mesh.pipeline - 1) as f64 / microbatches;
    (1.0 + bubble) * (1.0 + 0.1 * (context.mesh.tensor as f64).log2())
}

/// How many contexts are opened side by side.
const OPENED_TOGETHER: usize = 8;

/// How many even divisions are lowered, until one fits.
const OPENED_MAX: usize = 4;

impl ContextSolver<'_> {
    /// A plan to have, whatever happens to time: an even division in the first context that one fits
    /// in, those with the smallest bubble and the smallest tensor axis first. Nothing is proved.
    pub fn hurried(&self, contexts: &[Context]) -> Option<FeasiblePlan> {
        let limit = self.request.memory_bytes();
        let hopeful = contexts.iter().filter(|context| quick_bound(self.request, context).is_ok());
        let mut hopeful: Vec<&Context> = hopeful.collect();
        hopeful.sort_by(|a, b| slowed(a).total_cmp(&slowed(b)));
        for chunk in hopeful.chunks(OPENED_TOGETHER) {
            let mut played: Vec<_> = chunk.par_iter().filter_map(|c| self.even(c)).collect();
            played.sort_by(|a, b| a.0.total_cmp(&b.0));
            let made = played
                .into_iter()
                .map(|(_, context, ends, partition)| self.realise(context, &ends, partition));
            for fitted in made {
                if fitted.peak() <= limit {
                    return Some(fitted);
                }
                if self.segments.is_late() {
                    return None;
                }
            }
            if self.segments.is_late() {
                return None;
            }
        }
        None
    }

    /// A first plan to beat: the fastest of those that divide the blocks evenly, as far as bytes and
    /// times tell before anything is lowered. `contexts` come with their bounds, the best first.
    pub fn opening(&self, contexts: &[(Context, f64)]) -> Option<FeasiblePlan> {
        let mut played: Vec<(f64, &Context, EmbeddingAndHead, Partition)> = vec![];
        for chunk in contexts.chunks(OPENED_TOGETHER) {
            let least = played.iter().map(|(time, ..)| *time).fold(f64::INFINITY, f64::min);
            let open: Vec<_> = chunk.iter().filter(|(_, bound)| *bound < least).collect();
            if open.is_empty() {
                break;
            }
            played.par_extend(open.par_iter().filter_map(|(context, _)| self.even(context)));
        }
        played.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut made = played
            .into_iter()
            .take(OPENED_MAX)
            .map(|(_, context, ends, partition)| self.realise(context, &ends, partition));
        let limit = self.request.memory_bytes();
        made.find(|fitted| fitted.peak() <= limit)
    }

    /// The fastest even division of a context's blocks, with its time.
    fn even<'c>(
        &self,
        context: &'c Context,
    ) -> Option<(f64, &'c Context, EmbeddingAndHead, Partition)> {
        let microbatches = context.workload.microbatches(&context.mesh);
        let nothing_less = vec![Bytes(0); context.mesh.pipeline as usize];
        let all = EmbeddingAndHead::all(self.request, self.segments, context);
        let divisions = all.into_iter().filter_map(|ends| {
            let budgets = self.budgets(context, &ends, &nothing_less).ok()?;
            let divider = StagePartitioner::new(self.segments, context, ends.border, budgets);
            let mut partition = divider.evenly()?;
            let extras = self.extras(context, &ends);
            partition.bound = Seconds(partition.bound_of(&extras, microbatches));
            let time = play(context, &partition, &extras).0;
            Some((time, context, ends, partition))
        });
        divisions.min_by(|a, b| a.0.total_cmp(&b.0))
    }
}
