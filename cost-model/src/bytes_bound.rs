//! Lower bounds on the time of a collective or a fused op that the parameters of a segment share.
//!
//! The time f(b) depends on the sum b of the bytes that the choices of the ops have, and is concave for the most part: a latency counts
//! once. Below it is a sum over ops. Of the bytes of an op, those that it has under every strategy are certain, and those beyond the
//! fewest with which it takes part are more. Let b₀ be the certain bytes of all ops, and b₁ those of all ops with as few bytes as each
//! may take part with:
//!
//! ```text
//! f(b₀) + first·(bytes up to b₁) + more·(bytes beyond)    with first ≥ more
//! ```
//! As f is concave, the bytes of some ops take no less time than they count, whichever these ops are. The sum is exact where each op has
//! its certain bytes alone, where all take part with as few bytes as they can, and where all have the most.

use narrows_plan::{Bytes, Seconds};

/// Points between the fewest and the most bytes at which a bound is compared with prices, besides powers of two: there, prices of
/// NCCL's trees have kinks. Between all points, prices are concave but for corrections by measurements.
const SAMPLES: u32 = 16;

/// Bytes of an op under its strategies.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct OpBytes {
    /// Bytes under every strategy.
    certain: f64,
    /// Fewest bytes with which the op takes part.
    first: f64,
    /// Most bytes.
    most: f64,
}

/// A sum over ops below the time of a collective or of a fused op.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct BytesBound {
    ops: Vec<OpBytes>,
    /// Seconds per certain byte.
    certain: f64,
    /// Seconds per byte with which an op takes part at least.
    first: f64,
    /// Seconds per byte beyond these.
    more: f64,
    /// Lower bound on the time in seconds, for any choices; 0 where no op may take part.
    least: f64,
}

impl BytesBound {
    /// A bound below `time` in seconds, for any choice of one of the bytes of each op.
    pub(crate) fn below(ops: &[Vec<Bytes>], time: impl Fn(Bytes) -> f64) -> BytesBound {
        let ops: Vec<OpBytes> = ops.iter().map(|strategies| OpBytes::of(strategies)).collect();
        let sum = |bytes: fn(&OpBytes) -> f64| ops.iter().map(bytes).sum::<f64>();
        let [certain, first, most] = [sum(|op| op.certain), sum(|op| op.first), sum(|op| op.most)];
        if most == 0.0 {
            return BytesBound::default();
        }
        // Without an op that always takes part, any may be alone.
        let least = match certain > 0.0 {
            true => certain,
            false => {
                ops.iter().map(|op| op.first).filter(|bytes| *bytes > 0.0).fold(most, f64::min)
            }
        };
        let ratio = (most / least).powf(1.0 / f64::from(SAMPLES));
        let between = (1..SAMPLES).map(|at| (least * ratio.powi(at as i32)).floor());
        let powers = (0..u64::BITS).map(|exponent| 2.0_f64.powi(exponent as i32));
        let inside = between.chain(powers).filter(|bytes| least < *bytes && *bytes < most);
        let points: Vec<(f64, f64)> = [least, first, most]
            .into_iter()
            .chain(inside)
            .map(|bytes| (bytes, time(Bytes(bytes as u64))))
            .collect();
        let minimum =
            |of: &dyn Fn(&(f64, f64)) -> f64| points.iter().map(of).fold(f64::INFINITY, f64::min);
        let least = if certain > 0.0 { minimum(&|(_, time)| *time) } else { 0.0 };
        // No price of more bytes is below that of the first.
        let per_first = minimum(&|(bytes, time)| (time - least) / (bytes.min(first) - certain));
        let per_first = if first > certain { per_first } else { 0.0 };
        let of_first = least + per_first * (first - certain);
        let per_more = points.iter().filter(|(bytes, _)| *bytes > first);
        let per_more = per_more.map(|(bytes, time)| (time - of_first) / (bytes - first));
        let limit = if first > certain { per_first } else { f64::INFINITY };
        let per_more = per_more.fold(limit, f64::min);
        BytesBound {
            certain: if certain > 0.0 { least / certain } else { 0.0 },
            first: per_first,
            more: if most > first { per_more } else { 0.0 },
            least,
            ops,
        }
    }

    /// The share of an op with these bytes.
    pub(crate) fn share(&self, op: usize, bytes: Bytes) -> Seconds {
        let OpBytes { certain, first, .. } = self.ops.get(op).copied().unwrap_or_default();
        let bytes = bytes.as_f64();
        let more = (bytes - first).max(0.0);
        Seconds(
            self.certain * bytes.min(certain)
                + self.first * (bytes.min(first) - certain).max(0.0)
                + self.more * more,
        )
    }

    /// Lower bound on the time, whatever the ops choose.
    pub(crate) fn least(&self) -> Seconds {
        Seconds(self.least)
    }
}

impl OpBytes {
    fn of(strategies: &[Bytes]) -> OpBytes {
        let bytes = || strategies.iter().map(|bytes| bytes.as_f64());
        let least = bytes().fold(f64::INFINITY, f64::min);
        let most = bytes().fold(0.0, f64::max);
        let first = bytes().filter(|bytes| *bytes > 0.0).fold(most, f64::min);
        OpBytes { certain: least.min(most), first, most }
    }
}

#[cfg(test)]
mod tests {
    use narrows_plan::random::SplitMix64;

    use super::*;

    /// The time of a collective with a latency and two protocols.
    fn time(payload: Bytes) -> f64 {
        let bytes = payload.as_f64();
        (20.0 + bytes / 10.0).min(60.0 + bytes / 100.0)
    }

    fn counted(bound: &BytesBound, chosen: &[Bytes]) -> f64 {
        chosen.iter().enumerate().map(|(op, bytes)| bound.share(op, *bytes).0).sum()
    }

    #[test]
    fn equal_bytes_are_priced_exactly() {
        let ops = [vec![Bytes(300), Bytes(300)], vec![Bytes(5000)], vec![Bytes(0)]];
        let bound = BytesBound::below(&ops, time);
        let chosen = [Bytes(300), Bytes(5000), Bytes(0)];
        assert!((counted(&bound, &chosen) - time(Bytes(5300))).abs() < 1e-9);
        assert!((bound.least().0 - time(Bytes(5300))).abs() < 1e-9);
    }

    /// Each op may have no bytes, some, or twice as many; a price with a latency is met where all have some or all have more.
    #[test]
    fn latency_counts_where_no_op_always_takes_part() {
        let op = |bytes: u64| vec![Bytes(0), Bytes(bytes), Bytes(2 * bytes)];
        let bound =
            BytesBound::below(&[op(3000), op(1000)], |payload| 50.0 + payload.as_f64() / 100.0);
        for (chosen, expected) in [([3000, 1000], 90.0), ([6000, 2000], 130.0), ([3000, 0], 67.5)] {
            assert!((counted(&bound, &chosen.map(Bytes)) - expected).abs() < 1e-6, "{bound:?}");
        }
        assert_eq!(bound.least(), Seconds(0.0));
    }

    /// Trees of NCCL reach a share of their bandwidth that depends on the powers of two around a size.
    #[test]
    fn no_bound_is_above_a_kink_at_a_power_of_two() {
        let time = |payload: Bytes| {
            let bytes = payload.as_f64();
            let position = bytes.log2() - 20.0;
            bytes * (1.0 + position.abs().min(1.0) * 0.3)
        };
        let ops =
            [vec![Bytes(1 << 19), Bytes(1 << 21)], [18, 19, 21].map(|e| Bytes(1 << e)).into()];
        let bound = BytesBound::below(&ops, time);
        let counted = counted(&bound, &[Bytes(1 << 19); 2]);
        let exact = time(Bytes(1 << 20));
        assert!(counted <= exact * (1.0 + 1e-9), "{counted} > {exact}");
    }

    #[test]
    fn no_choice_counts_more_than_its_collective() {
        let mut random = SplitMix64::new(5);
        let mut closest = 0.0_f64;
        for _ in 0..2000 {
            let mut draw = |below: u64| random.next_u64() % below;
            let always = draw(2);
            let ops: Vec<Vec<Bytes>> = (0..4)
                .map(|op| {
                    let whole = 1 << draw(16);
                    let least = if op == 0 { always * whole / 4 } else { draw(2) * whole / 2 };
                    vec![Bytes(whole), Bytes(least), Bytes(least.max(whole / 2))]
                })
                .collect();
            let bound = BytesBound::below(&ops, time);
            for number in 0..81_usize {
                let choice = |op: usize| number / 3_usize.pow(op as u32) % 3;
                let chosen: Vec<Bytes> =
                    ops.iter().enumerate().map(|(op, of)| of[choice(op)]).collect();
                let total: Bytes = chosen.iter().copied().sum();
                if total.0 == 0 {
                    continue;
                }
                let (counted, exact) = (counted(&bound, &chosen), time(total));
                assert!(counted <= exact * (1.0 + 1e-9), "{chosen:?}: {counted} > {exact}");
                assert!(bound.least().0 <= exact * (1.0 + 1e-9));
                closest = closest.max(counted / exact);
            }
        }
        assert!(closest > 0.999, "{closest}");
    }
}
