//! Collectives overlapped with computation.
//!
//! While a collective and computation share a device, computation is slower by one factor (multiprocessors that the
//! collective occupies) and the collective by another (memory bandwidth). Four kinds of collectives overlap:
//! - collectives of activation gradients, with weight-gradient GEMMs;
//! - with ZeRO-2 and ZeRO-3, gathers of the weights of a block and reductions of its gradients, with the pass of
//!   another block;
//! - gradient reductions, with the last pass of a stage: the backward or the weight-gradient pass of the last
//!   microbatch. They have a stream of their own, which runs the buckets of gradients in order, each from the point of
//!   the pass at which its gradients are complete;
//! - gathers of updated weights, with the first pass of a stage in the next step. They share that stream, begin with the
//!   step, and the pass waits for each at the point at which it reads the weights. By periodicity, the step that is
//!   priced begins with the gathers of the step before and leaves its own to the next.

use narrows_plan::Seconds;

/// Factors on the times of computation and of a collective that run at the same time. Both are at least 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OverlapSlowdown {
    /// Factor on the time of computation.
    pub compute: f64,
    /// Factor on the time of the collective.
    pub collective: f64,
}

/// The reductions of a gradient bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BucketTime {
    /// Time of the last pass before the bucket's gradients are complete.
    pub ready: Seconds,
    /// Time of the reductions alone.
    pub reduction: Seconds,
}

/// The buckets of a stage's first block, where they are split.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SplitBucketTime {
    /// Buckets of gradients during the last pass, in order.
    pub early: Vec<EarlyBucket>,
    /// Reductions after the last pass.
    pub late: Seconds,
    /// Gathers during the first pass, in order. Times count from the begin of the block's part of the pass.
    pub gathers: Vec<GatherTime>,
}

/// A bucket of a block's gradients that is complete before the block's part of the last pass has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EarlyBucket {
    /// Time of the block's backward pass before the gradients are complete, where that is the last pass. With recomputation
    /// and with overlapped collectives of activation gradients, a lower bound.
    pub backward: Seconds,
    /// Time of the block's weight-gradient pass before the gradients are complete, where that is the last pass.
    pub weight_gradient: Seconds,
    /// Time of the reductions alone.
    pub reduction: Seconds,
}

/// The gathers of a gather bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GatherTime {
    /// Time of the first pass before it reads the bucket's weights.
    pub needed: Seconds,
    /// Time of the gathers alone.
    pub gather: Seconds,
}

/// The first pass with the gathers that it waits for. Times count from the begin of the pass, before which gathers may
/// have begun.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct GatheredPass {
    /// End of the pass.
    pub end: f64,
    /// Begin and end of every bucket's gathers.
    pub buckets: Vec<[f64; 2]>,
}

/// The last pass with its reductions. Times count from the begin of the pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct OverlappedPass {
    /// End of the pass alone.
    pub end: f64,
    /// Begin and end of every bucket's reductions.
    pub buckets: Vec<[f64; 2]>,
}

impl OverlapSlowdown {
    /// Time that a hidden reduction adds to its pass, over its time alone. No reduction adds less.
    pub fn hidden_cost(&self) -> f64 {
        (self.collective * (1.0 - 1.0 / self.compute)).min(1.0)
    }

    /// Time that hidden computation adds to the collectives beside it, over its time alone. No computation adds less.
    pub fn hidden_computation_cost(&self) -> f64 {
        (self.compute * (1.0 - 1.0 / self.collective)).min(1.0)
    }

    /// The ends of a collective and of computation that begin together at zero, of which each takes this time alone.
    pub fn ends(&self, collective: Seconds, computation: Seconds) -> [Seconds; 2] {
        let slowed = [collective * self.collective, computation * self.compute];
        if slowed[0] <= slowed[1] {
            [slowed[0], slowed[0] + (computation - slowed[0] * (1.0 / self.compute))]
        } else {
            [slowed[1] + (collective - slowed[1] * (1.0 / self.collective)), slowed[1]]
        }
    }

    /// Time that a collective adds to the computation that it begins with.
    pub fn exposed(&self, collective: Seconds, computation: Seconds) -> Seconds {
        let [collective_end, computation_end] = self.ends(collective, computation);
        Seconds((collective_end.0.max(computation_end.0) - computation.0).max(0.0))
    }
}

impl OverlappedPass {
    /// Simulates a pass that takes this time without reductions. Buckets are in the order of the pass, and
    /// none is ready after its end.
    pub(crate) fn new(pass: Seconds, buckets: &[BucketTime], slowdown: OverlapSlowdown) -> Self {
        // `computed` is the part of the pass that has ended by `now`, in seconds without reductions.
        let (mut now, mut computed) = (0.0, 0.0);
        let mut end = None;
        let mut spans = Vec::with_capacity(buckets.len());
        for BucketTime { ready, reduction } in buckets {
            let wait = (ready.0 - computed).max(0.0);
            now += wait;
            computed += wait;
            let begin = now;
            let pass_ends_in = (pass.0 - computed).max(0.0) * slowdown.compute;
            let reduction_ends_in = reduction.0 * slowdown.collective;
            if reduction_ends_in <= pass_ends_in {
                now += reduction_ends_in;
                computed += reduction_ends_in / slowdown.compute;
            } else {
                now += pass_ends_in;
                computed = pass.0;
                end.get_or_insert(now);
                now += reduction.0 - pass_ends_in / slowdown.collective;
            }
            spans.push([begin, now]);
        }
        let end = end.unwrap_or(now + (pass.0 - computed));
        OverlappedPass { end, buckets: spans }
    }

    /// End of the pass and of all reductions.
    pub(crate) fn all_ended(&self) -> f64 {
        self.buckets.last().map_or(self.end, |[_, end]| end.max(self.end))
    }
}

impl GatheredPass {
    /// Simulates a pass that takes this time without gathers, which begin `idle` seconds before the pass. Buckets are in
    /// the order of the pass, and none is needed after its end.
    pub(crate) fn new(
        pass: Seconds,
        idle: f64,
        buckets: &[GatherTime],
        slowdown: OverlapSlowdown,
    ) -> Self {
        // `computed` is the part of the pass that has ended by `now`, in seconds without gathers.
        let (mut now, mut computed) = (-idle, 0.0);
        let mut spans = Vec::with_capacity(buckets.len());
        for GatherTime { needed, gather } in buckets {
            let begin = now;
            let before_pass = gather.0.min((-now).max(0.0));
            now += before_pass;
            let remaining = gather.0 - before_pass;
            let needed_in = (needed.0 - computed).max(0.0) * slowdown.compute;
            let gathered_in = remaining * slowdown.collective;
            if gathered_in <= needed_in {
                now += gathered_in;
                computed += gathered_in / slowdown.compute;
            } else {
                // The pass waits for the rest.
                now += needed_in + (remaining - needed_in / slowdown.collective);
                computed += needed_in / slowdown.compute;
            }
            spans.push([begin, now]);
        }
        GatheredPass { end: now.max(0.0) + (pass.0 - computed), buckets: spans }
    }
}

#[cfg(test)]
mod tests {
    use narrows_plan::random::SplitMix64;

    use super::*;

    const FREE: OverlapSlowdown = OverlapSlowdown { compute: 1.0, collective: 1.0 };

    fn bucket(ready: f64, reduction: f64) -> BucketTime {
        BucketTime { ready: Seconds(ready), reduction: Seconds(reduction) }
    }

    #[test]
    fn reductions_follow_their_gradients_and_each_other() {
        let pass = OverlappedPass::new(
            Seconds(10.0),
            &[bucket(2.0, 5.0), bucket(4.0, 1.0), bucket(10.0, 3.0)],
            FREE,
        );
        assert_eq!(
            pass,
            OverlappedPass { end: 10.0, buckets: vec![[2.0, 7.0], [7.0, 8.0], [10.0, 13.0]] }
        );
    }

    fn gathered(needed: f64, gather: f64) -> GatherTime {
        GatherTime { needed: Seconds(needed), gather: Seconds(gather) }
    }

    #[test]
    fn the_first_pass_waits_where_it_reads_weights_and_idle_time_hides_gathers() {
        let buckets = [gathered(1.0, 2.0), gathered(3.0, 1.0), gathered(10.0, 3.0)];
        // The pass waits for one second at its first second, and for nothing else.
        let pass = GatheredPass::new(Seconds(12.0), 0.0, &buckets, FREE);
        let spans = vec![[0.0, 2.0], [2.0, 3.0], [3.0, 6.0]];
        assert_eq!(pass, GatheredPass { end: 13.0, buckets: spans });
        let idle = GatheredPass::new(Seconds(12.0), 2.5, &buckets, FREE);
        let spans = vec![[-2.5, -0.5], [-0.5, 0.5], [0.5, 3.5]];
        assert_eq!(idle, GatheredPass { end: 12.0, buckets: spans });
        // Three seconds of gathers slow three of the pass to six; one second of the second gather is left when it is needed.
        let slowdown = OverlapSlowdown { compute: 2.0, collective: 1.5 };
        let slowed = GatheredPass::new(
            Seconds(5.0),
            0.0,
            &[gathered(3.0, 3.0), gathered(3.0, 2.0)],
            slowdown,
        );
        assert_eq!(slowed, GatheredPass { end: 9.0, buckets: vec![[0.0, 4.5], [4.5, 7.0]] });
    }

    /// Gathers add no more than their time alone, and no less than their hidden cost, of which idle time before the pass
    /// hides its own length at most. The planner's bounds rely on that.
    #[test]
    fn a_gather_adds_at_least_its_hidden_cost() {
        let mut random = SplitMix64::new(12);
        let mut draw = |end: f64| (random.next_u64() % 1_000_000) as f64 / 1e6 * end;
        for round in 0..2000 {
            let slowdown =
                OverlapSlowdown { compute: 1.0 + draw(1.0), collective: 1.0 + draw(1.0) };
            let (forward, idle) = (draw(10.0), if round % 2 == 0 { 0.0 } else { draw(8.0) });
            let mut buckets: Vec<GatherTime> =
                (0..4).map(|_| gathered(draw(forward), draw(4.0))).collect();
            buckets.sort_by(|a, b| a.needed.0.total_cmp(&b.needed.0));
            let all: f64 = buckets.iter().map(|bucket| bucket.gather.0).sum();
            let pass = GatheredPass::new(Seconds(forward), idle, &buckets, slowdown);
            let hidden_cost = slowdown.hidden_cost();
            assert!(pass.end >= forward + (all - idle).max(0.0) * hidden_cost - 1e-9);
            let slowed = slowdown.collective * (1.0 - 1.0 / slowdown.compute);
            assert!(pass.end <= forward + all * slowed.max(1.0) + 1e-9);
            assert!(pass.buckets.iter().all(|[_, end]| *end <= pass.end + 1e-9));
        }
    }

    #[test]
    fn streams_that_run_together_slow_each_other() {
        let slowdown = OverlapSlowdown { compute: 2.0, collective: 1.5 };
        // Six seconds of reduction overlap with three of the pass, then the rest of the pass runs alone.
        let hidden = OverlappedPass::new(Seconds(10.0), &[bucket(2.0, 4.0)], slowdown);
        assert_eq!(hidden, OverlappedPass { end: 13.0, buckets: vec![[2.0, 8.0]] });
        // The pass ends after 4 s more; by then 8/3 s of the reduction are done, and the rest runs alone.
        let exposed = OverlappedPass::new(Seconds(4.0), &[bucket(2.0, 4.0)], slowdown);
        assert_eq!(exposed.end, 6.0);
        assert!((exposed.all_ended() - (6.0 + 4.0 / 3.0)).abs() < 1e-12);
    }

    /// A collective that overlaps with a longer computation adds no more, and never less than its hidden cost or more than its
    /// time.
    #[test]
    fn a_collective_adds_at_most_its_time() {
        let slowdown = OverlapSlowdown { compute: 1.25, collective: 1.2 };
        let collective = Seconds(3.0);
        let mut last = collective.0;
        for tenths in 0..80 {
            let computation = Seconds(f64::from(tenths) / 10.0);
            let exposed = slowdown.exposed(collective, computation).0;
            assert!(exposed <= last + 1e-12 && exposed >= 3.0 * slowdown.hidden_cost() - 1e-12);
            let ends = slowdown.ends(collective, computation);
            assert!((ends[0].0.max(ends[1].0) - computation.0 - exposed).abs() < 1e-12);
            last = exposed;
        }
        assert!((last - 3.0 * slowdown.hidden_cost()).abs() < 1e-12);
    }

    /// No reduction adds less than its hidden cost, which the planner's bounds rely on, nor more than its time alone.
    #[test]
    fn a_reduction_adds_at_least_its_hidden_cost() {
        let mut random = SplitMix64::new(11);
        let mut draw = |end: f64| (random.next_u64() % 1_000_000) as f64 / 1e6 * end;
        for _ in 0..2000 {
            let slowdown =
                OverlapSlowdown { compute: 1.0 + draw(1.0), collective: 1.0 + draw(1.0) };
            let backward = draw(10.0);
            let mut buckets: Vec<BucketTime> =
                (0..4).map(|_| bucket(draw(backward), draw(4.0))).collect();
            buckets.sort_by(|a, b| a.ready.0.total_cmp(&b.ready.0));
            let all: f64 = buckets.iter().map(|bucket| bucket.reduction.0).sum();
            let ended = OverlappedPass::new(Seconds(backward), &buckets, slowdown).all_ended();
            assert!(ended >= backward + all * slowdown.hidden_cost() - 1e-9);
        }
    }
}
