//! Lower bounds on the time of a collective or a fused op that the parameters of a segment share.
//!
//! The time f(b) depends on the sum b of the bytes that the choices of the ops have. A line below it is a sum over ops:
//!
//! ```text
//! fixed + per_byte·b ≤ f(b)    for all b that the choices of the ops allow
//! ```
//! Each op counts `per_byte` for its bytes and a share of `fixed`: all of it for an op that always takes part; without such
//! an op, each that takes part counts a share in proportion to its bytes at most, so that the shares of all add up to `fixed`.
//! The line is exact where all choices have the same bytes.

use narrows_plan::{Bytes, Seconds};

/// Points between the fewest and the most bytes at which a line is compared with prices, besides powers of two: there, prices of
/// NCCL's trees have kinks. Between all points, prices are concave but for corrections by measurements.
const SAMPLES: u32 = 16;

/// A line below the time of a collective or of a fused op.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct BytesLine {
    /// Seconds that each op counts where it takes part.
    fixed: Vec<f64>,
    /// Seconds per byte.
    per_byte: f64,
    /// Lower bound on the time in seconds, for any choices; 0 where no op may take part.
    least: f64,
}

impl BytesLine {
    /// A line below `time` in seconds, for any choice of one of the bytes of each op.
    pub(crate) fn below(ops: &[Vec<Bytes>], time: impl Fn(Bytes) -> f64) -> BytesLine {
        let extreme = |op: &Vec<Bytes>, pick: fn(Bytes, Bytes) -> Bytes| {
            op.iter().copied().reduce(pick).unwrap_or_default()
        };
        let most: Bytes = ops.iter().map(|op| extreme(op, Bytes::max)).sum();
        let least: Bytes = ops.iter().map(|op| extreme(op, Bytes::min)).sum();
        if most.0 == 0 {
            return BytesLine::default();
        }
        let carrier = ops.iter().position(|op| extreme(op, Bytes::min).0 > 0);
        let least_nonzero = |op: &Vec<Bytes>| op.iter().copied().filter(|bytes| bytes.0 > 0).min();
        // Without an op that always takes part, any nonzero choice may be alone.
        let least = match carrier {
            Some(_) => least,
            None => ops.iter().filter_map(least_nonzero).min().unwrap_or(most),
        };
        let ratio = (most.as_f64() / least.as_f64()).powf(1.0 / f64::from(SAMPLES));
        let between = (1..SAMPLES).map(|at| Bytes((least.as_f64() * ratio.powi(at as i32)) as u64));
        let powers = (0..u64::BITS).map(|exponent| Bytes(1 << exponent));
        let points: Vec<(f64, f64)> = [least, most]
            .into_iter()
            .chain(between.filter(|_| least < most))
            .chain(powers.filter(|power| least < *power && *power < most))
            .map(|payload| (payload.as_f64(), time(payload)))
            .collect();
        let minimum =
            |of: &dyn Fn(&(f64, f64)) -> f64| points.iter().map(of).fold(f64::MAX, f64::min);
        let through_zero = minimum(&|(bytes, time)| time / bytes);
        let chord = ((points[1].1 - points[0].1) / (points[1].0 - points[0].0).max(1.0)).max(0.0);
        let fixed = minimum(&|(bytes, time)| time - chord * bytes);
        // The line that counts more where every op takes part with as few bytes as it can.
        let all: f64 = ops.iter().filter_map(least_nonzero).map(|bytes| bytes.as_f64()).sum();
        let counts_more = fixed + chord * all > through_zero * all;
        let share = |(at, op): (usize, &Vec<Bytes>)| match carrier {
            Some(carrier) => f64::from(u8::from(at == carrier)),
            None => extreme(op, Bytes::max).as_f64() / most.as_f64(),
        };
        let has_fixed = least < most && fixed > 0.0 && counts_more;
        let fixed = if has_fixed { fixed } else { 0.0 };
        BytesLine {
            fixed: ops.iter().enumerate().map(|op| fixed * share(op)).collect(),
            per_byte: if has_fixed { chord } else { through_zero },
            least: if carrier.is_some() { minimum(&|(_, time)| *time) } else { 0.0 },
        }
    }

    /// The share of an op with these bytes.
    pub(crate) fn share(&self, op: usize, bytes: Bytes) -> Seconds {
        let fixed = self.fixed.get(op).copied().filter(|_| bytes.0 > 0).unwrap_or(0.0);
        Seconds(fixed + self.per_byte * bytes.as_f64())
    }

    /// Lower bound on the time, whatever the ops choose.
    pub(crate) fn least(&self) -> Seconds {
        Seconds(self.least)
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

    fn counted(line: &BytesLine, chosen: &[Bytes]) -> f64 {
        chosen.iter().enumerate().map(|(op, bytes)| line.share(op, *bytes).0).sum()
    }

    #[test]
    fn equal_bytes_are_priced_exactly() {
        let ops = [vec![Bytes(300), Bytes(300)], vec![Bytes(5000)], vec![Bytes(0)]];
        let line = BytesLine::below(&ops, time);
        let chosen = [Bytes(300), Bytes(5000), Bytes(0)];
        assert!((counted(&line, &chosen) - time(Bytes(5300))).abs() < 1e-9);
        assert!((line.least().0 - time(Bytes(5300))).abs() < 1e-9);
    }

    /// Each op may have no bytes, some, or twice as many; a price with a latency is met where all have some or all have more.
    #[test]
    fn latency_counts_where_no_op_always_takes_part() {
        let op = |bytes: u64| vec![Bytes(0), Bytes(bytes), Bytes(2 * bytes)];
        let line =
            BytesLine::below(&[op(3000), op(1000)], |payload| 50.0 + payload.as_f64() / 100.0);
        for (chosen, expected) in [([3000, 1000], 90.0), ([6000, 2000], 130.0), ([3000, 0], 67.5)] {
            assert!((counted(&line, &chosen.map(Bytes)) - expected).abs() < 1e-6, "{line:?}");
        }
        assert_eq!(line.least(), Seconds(0.0));
    }

    /// Trees of NCCL reach a share of their bandwidth that depends on the powers of two around a size.
    #[test]
    fn no_line_is_above_a_kink_at_a_power_of_two() {
        let time = |payload: Bytes| {
            let bytes = payload.as_f64();
            let position = bytes.log2() - 20.0;
            bytes * (1.0 + position.abs().min(1.0) * 0.3)
        };
        let ops =
            [vec![Bytes(1 << 19), Bytes(1 << 21)], [18, 19, 21].map(|e| Bytes(1 << e)).into()];
        let line = BytesLine::below(&ops, time);
        let counted = counted(&line, &[Bytes(1 << 19); 2]);
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
                    vec![Bytes(whole), Bytes(least)]
                })
                .collect();
            let line = BytesLine::below(&ops, time);
            for mask in 0..16_usize {
                let chosen: Vec<Bytes> =
                    ops.iter().enumerate().map(|(op, of)| of[mask >> op & 1]).collect();
                let total: Bytes = chosen.iter().copied().sum();
                if total.0 == 0 {
                    continue;
                }
                let (counted, exact) = (counted(&line, &chosen), time(total));
                assert!(counted <= exact * (1.0 + 1e-9), "{chosen:?}: {counted} > {exact}");
                assert!(line.least().0 <= exact * (1.0 + 1e-9));
                closest = closest.max(counted / exact);
            }
        }
        assert!(closest > 0.999, "{closest}");
    }
}
