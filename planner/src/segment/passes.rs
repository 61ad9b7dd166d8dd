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
use super::prepared::PreparedSegment;
use super::solver::SegmentSolver;
use super::spec::SegmentSpec;
use crate::lock::lock;
use crate::pipeline::in_flight_in_chunks;

/// Relative error of sums of times.
const ROUNDING: f64 = 1e-12;
/// Relative error of lower bounds between two multipliers.
const CHORD_ROUNDING: f64 = 1e-9;
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
        let layouts = self.segments.boundary_layouts(self.context);
        let legal = layouts.iter().zip(self.ends()).enumerate();
        let legal = legal.filter_map(|(index, (layout, ends))| {
            let ends = (*ends)?;
            let of_segment = |spec| Some((self.known_minimum(spec, multiplier), 0.0));
            let known = self.of_layout(*layout, ends, multiplier, of_segment)?;
            Some((index, *layout, ends, known))
        });
        // The most promising first: others may be left out.
        let mut open: Vec<_> = legal.collect();
        open.sort_by(|(.., a), (.., b)| a.total.total_cmp(&b.total));
        let mut of_layouts: Vec<(usize, RelaxedPasses)> = vec![];
        for (index, layout, ends, known) in open {
            let is_larger = |value: fn(&RelaxedPasses) -> f64| {
                let mut others = of_layouts.iter();
                others.any(|(_, other)| value(&known) * (1.0 - CHORD_ROUNDING) > value(other))
            };
            let can_be_least = !(is_larger(|passes| passes.blocks)
                && is_larger(|passes| passes.fastest_block)
                && is_larger(|passes| passes.total));
            if can_be_least {
                let of_segment = |spec| self.of_segment(spec, multiplier);
                let passes = self.of_layout(layout, ends, multiplier, of_segment);
                of_layouts.extend(passes.map(|passes| (index, passes)));
            } else {
                let (blocks, fastest_block) = (f64::INFINITY, f64::INFINITY);
                let total = f64::INFINITY;
                of_layouts.push((index, RelaxedPasses { blocks, fastest_block, total, ..known }));
            }
        }
        of_layouts.sort_by_key(|(index, _)| *index);
        let of_layouts = || of_layouts.iter().map(|(_, passes)| passes);
        let fastest = of_layouts().min_by(|a, b| a.total.total_cmp(&b.total))?;
        let least = |value: fn(&RelaxedPasses) -> f64| {
            of_layouts().map(value).fold(f64::INFINITY, f64::min) * (1.0 - ROUNDING)
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
        of_segment: impl Fn(SegmentSpec) -> Option<(f64, f64)>,
    ) -> Option<RelaxedPasses> {
        let (mut blocks, mut fastest_block, mut kept_bytes) = (0.0, f64::INFINITY, 0.0);
        let block = |shape| of_segment(SegmentSpec::block(shape, boundary));
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

    /// Lower bound on the least time with the multiplier of kept bytes, in seconds, from known ones; −∞ without any.
    fn known_minimum(&self, spec: SegmentSpec, multiplier: f64) -> f64 {
        let of_grouping = |grouping: &Grouping| {
            self.segments.prepare(spec, *grouping, self.context).known_pass_minimum(multiplier)
        };
        self.segments.groupings(spec).iter().map(of_grouping).fold(f64::INFINITY, f64::min)
    }

    /// Least time with the multiplier of kept bytes, in seconds, and the bytes kept; `None` without legal decisions.
    fn of_segment(&self, spec: SegmentSpec, multiplier: f64) -> Option<(f64, f64)> {
        let groupings = self.segments.groupings(spec).into_iter().enumerate();
        let mut open: Vec<(f64, usize, Arc<PreparedSegment>)> = groupings
            .map(|(index, grouping)| {
                let prepared = self.segments.prepare(spec, grouping, self.context);
                (prepared.known_pass_minimum(multiplier), index, prepared)
            })
            .collect();
        open.sort_by(|(a, ..), (b, ..)| a.total_cmp(b));
        let mut best: Option<(f64, usize, f64)> = None;
        for (known, index, prepared) in open {
            // A grouping with a larger lower bound is not the fastest.
            if best.is_some_and(|(least, ..)| known * (1.0 - CHORD_ROUNDING) > least) {
                continue;
            }
            let Some((cost, kept)) = prepared.least_passes(multiplier) else { continue };
            // Of equal groupings the first.
            if best.is_none_or(|(least, first, _)| (cost, index) < (least, first)) {
                best = Some((cost, index, kept));
            }
        }
        best.map(|(cost, _, kept)| (cost, kept))
    }
}
