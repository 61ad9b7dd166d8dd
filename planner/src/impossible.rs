//! What stands in the way where no strategy is legal.

use narrows_plan::graph::OpId;
use narrows_plan::strategy::Context;

use crate::divide::block_part;
use crate::segments::SegmentSolver;

impl SegmentSolver<'_> {
    /// The ops of blocks that cannot be done at all in a context, whatever their neighbours do.
    pub fn without_strategy(&self, context: &Context) -> Vec<String> {
        let mut names = vec![];
        let mut ways = self.borders(context);
        if ways.is_empty() {
            // No way that the request allows: what keeps the ops from the others is the same.
            ways = self.all_borders(context);
        }
        for border in ways {
            for part in (0..self.shapes()).map(|shape| block_part(shape, border)) {
                for grouping in self.groupings(part) {
                    let prepared = self.prepared(part, grouping, context);
                    let space = &prepared.priced.space;
                    let none = |op: &OpId| space.ops[op.0 as usize].is_empty();
                    let ops = space.segment.op_ids().filter(none);
                    names.extend(ops.map(|op| space.segment.op(op).name.clone()));
                }
            }
        }
        names.sort();
        names.dedup();
        names
    }
}
