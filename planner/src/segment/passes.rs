//! Least passes of one microbatch at multipliers of bytes, without what ZeRO adds to them.
//!
//! Any multiplier λ gives a line below all assignments of a block: time ≥ min (time + λ·kept bytes) − λ·kept bytes. The
//! minimum takes one elimination. Multipliers are those of one grid, so that contexts with other replicas, stages, numbers of
//! microbatches and memory limits share the eliminations, and a line does not depend on earlier searches.

use std::sync::Arc;

use narrows_plan::Context;
use narrows_plan::graph::{Grouping, SegmentKind};
use narrows_plan::program::StageSchedule;
use narrows_plan::strategy::BoundaryLayout;

use super::pass_lines::{MULTIPLIERS, PassLines, RelaxedPasses, multiplier};
use super::solver::SegmentSolver;
use super::spec::SegmentSpec;
use crate::lock::lock;
use crate::pipeline::in_flight_in_chunks;

/// Relative error of sums of times.
const ROUNDING: f64 = 1e-12;
/// Relative error of sums of times in another order.
const OPS_ROUNDING: f64 = 1e-10;

/// The passes of the contexts with one tensor axis, context axis and microbatch.
pub(crate) struct LeastPasses<'a> {
    segments: &'a SegmentSolver<'a>,
    context: &'a Context,
    lines: Arc<PassLines>,
}

impl<'a> SegmentSolver<'a> {
    /// The least passes of a context.
    pub(crate) fn least_passes(&'a self, context: &'a Context) -> LeastPasses<'a> {
        let lines = lock(&self.priced.passes).entry(self.pass_key(context)).or_default().clone();
        LeastPasses { segments: self, context, lines }
    }
}

impl LeastPasses<'_> {
    /// Lower bound on the total of the passes without a memory limit, from the least time of each op: cheaper, because no
    /// reshard is priced. `None` where an op has no alternative.
    pub(crate) fn of_ops(&self) -> Option<f64> {
        *self.lines.of_ops.get_or_init(|| {
            let (segments, context) = (self.segments, self.context);
            // Op times are the same for all boundary layouts.
            let boundary = *segments.boundary_layouts(context).first()?;
            let of_segment = |spec: SegmentSpec| {
                let groupings = segments.groupings(spec).into_iter();
                let times = |grouping| segments.op_times(spec, grouping, context).min_pass_time();
                groupings.filter_map(times).map(|time| time.0).min_by(f64::total_cmp)
            };
            let blocks =
                segments.of_layers(|shape| of_segment(SegmentSpec::block(shape, boundary)));
            let blocks: f64 = blocks.into_iter().sum::<Option<f64>>()?;
            let end = |kind| of_segment(SegmentSpec::embedding_or_head(kind, boundary, None));
            let total = blocks + end(SegmentKind::Embedding)? + end(SegmentKind::Head)?;
            Some(total * (1.0 - OPS_ROUNDING))
        })
    }

    /// The passes without a memory limit; `None` when a segment has no legal decisions.
    pub(crate) fn fastest(&self) -> Option<RelaxedPasses> {
        self.at(0)
    }

    /// The passes at the multiplier whose line is highest where all blocks keep at most `kept_bytes_max` bytes.
    pub(crate) fn within(&self, kept_bytes_max: f64) -> Option<RelaxedPasses> {
        let mut best = self.at(0)?;
        if best.kept_bytes <= kept_bytes_max {
            return Some(best);
        }
        let value = |passes: &RelaxedPasses| passes.blocks - passes.multiplier * kept_bytes_max;
        // The higher the multiplier, the fewer bytes are kept: the best multiplier is where they fit.
        let (mut low, mut high) = (0, MULTIPLIERS);
        while high - low > 1 {
            let middle = usize::midpoint(low, high);
            let passes = self.at(middle)?;
            if value(&passes) > value(&best) {
                best = passes;
            }
            match passes.kept_bytes > kept_bytes_max {
                true => low = middle,
                false => high = middle,
            }
        }
        Some(best)
    }

    /// Lower bound on the forward pass of one microbatch over all blocks, in seconds.
    pub(crate) fn forward(&self) -> f64 {
        *self.lines.forward.get_or_init(|| {
            let of_layout = |boundary: BoundaryLayout| -> f64 {
                let block = |shape| SegmentSpec::block(shape, boundary);
                let times = |shape| self.segments.min_pass_times(block(shape), self.context);
                self.segments.of_layers(times).iter().map(|times| times.forward).sum()
            };
            let layouts = self.segments.boundary_layouts(self.context).into_iter();
            layouts.map(of_layout).min_by(f64::total_cmp).unwrap_or(0.0)
        })
    }

    /// Least number of microbatches whose activations any chunk of a stage stores at once.
    pub(crate) fn in_flight_min(&self, stage: usize) -> u64 {
        let of_chunks = || {
            let chunks = in_flight_in_chunks(self.context, stage).into_iter();
            chunks.map(|in_flight| in_flight.kept).min().unwrap_or(0)
        };
        if self.context.chunks == 1 {
            return of_chunks();
        }
        let key = StageSchedule::of(self.context, stage as u64);
        let known = &self.segments.alternatives.interleaved_in_flight;
        if let Some(known) = lock(known).get(&key) {
            return *known;
        }
        let least = of_chunks();
        lock(known).insert(key, least);
        least
    }

    fn at(&self, number: usize) -> Option<RelaxedPasses> {
        *self.lines.by_multiplier[number].get_or_init(|| self.at_multiplier(multiplier(number)))
    }

    fn at_multiplier(&self, multiplier: f64) -> Option<RelaxedPasses> {
        let layouts = self.segments.boundary_layouts(self.context).into_iter();
        let of_layouts: Vec<RelaxedPasses> = layouts
            .zip(self.ends())
            .filter_map(|(layout, ends)| self.of_layout(layout, (*ends)?, multiplier))
            .collect();
        let fastest = of_layouts.iter().min_by(|a, b| a.total.total_cmp(&b.total))?;
        let least = |value: fn(&RelaxedPasses) -> f64| {
            of_layouts.iter().map(value).fold(f64::INFINITY, f64::min) * (1.0 - ROUNDING)
        };
        Some(RelaxedPasses {
            multiplier,
            blocks: least(|passes| passes.blocks),
            fastest_block: least(|passes| passes.fastest_block),
            embedding: least(|passes| passes.embedding),
            head: least(|passes| passes.head),
            total: least(|passes| passes.total),
            kept_bytes: fastest.kept_bytes,
        })
    }

    /// The times of embedding and head with each boundary layout; `None` without legal decisions.
    fn ends(&self) -> &[Option<[f64; 2]>] {
        self.lines.ends.get_or_init(|| {
            let of_layout = |boundary: BoundaryLayout| {
                let end = |kind| {
                    let spec = SegmentSpec::embedding_or_head(kind, boundary, None);
                    Some(self.of_segment(spec, 0.0)?.0)
                };
                Some([end(SegmentKind::Embedding)?, end(SegmentKind::Head)?])
            };
            self.segments.boundary_layouts(self.context).into_iter().map(of_layout).collect()
        })
    }

    fn of_layout(
        &self,
        boundary: BoundaryLayout,
        [embedding, head]: [f64; 2],
        multiplier: f64,
    ) -> Option<RelaxedPasses> {
        let (mut blocks, mut fastest_block, mut kept_bytes) = (0.0, f64::INFINITY, 0.0);
        let block = |shape| self.of_segment(SegmentSpec::block(shape, boundary), multiplier);
        for block in self.segments.of_layers(block) {
            let (cost, kept) = block?;
            blocks += cost;
            fastest_block = fastest_block.min(cost);
            kept_bytes += kept;
        }
        let total = blocks + embedding + head;
        Some(RelaxedPasses {
            multiplier,
            blocks,
            fastest_block,
            embedding,
            head,
            total,
            kept_bytes,
        })
    }

    /// Least time with the multiplier of kept bytes, in seconds, and the bytes kept; `None` without legal decisions.
    fn of_segment(&self, spec: SegmentSpec, multiplier: f64) -> Option<(f64, f64)> {
        let of_grouping = |grouping: &Grouping| {
            let prepared = self.segments.prepare(spec, *grouping, self.context);
            let mut costs = prepared.priced.pass_times();
            if multiplier > 0.0 {
                let kept = prepared.priced.kept_bytes();
                for (cost, kept) in costs.iter_mut().flatten().zip(kept.iter().flatten()) {
                    *cost += multiplier * kept.as_f64();
                }
            }
            let Some(order) = &prepared.order else {
                // Too wide for elimination: the sum of each node's least.
                let least = costs.iter().map(|costs| costs.iter().copied().reduce(f64::min));
                return Some((least.sum::<Option<f64>>()?, 0.0));
            };
            let cheapest = order.cheapest(&costs)?;
            let kept = prepared.priced.kept_bytes();
            let chosen = cheapest.assignment.iter().zip(kept.iter());
            let kept_bytes = chosen.map(|(choice, kept)| kept[*choice as usize].as_f64()).sum();
            Some((cheapest.cost, kept_bytes))
        };
        let groupings = self.segments.groupings(spec);
        groupings.iter().filter_map(of_grouping).min_by(|a, b| a.0.total_cmp(&b.0))
    }
}
