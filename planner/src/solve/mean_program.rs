//! Linear programs of means of bounds on the same decisions, with prices of memory and other limits.
//!
//! Several bounds hold for the decisions of a model, each a constant and a sum over the parts of the model, and so does any mean of
//! them. Let yₖ be the share of bound k, cₖ its constant, Bₗ the size of limit l, such as the bytes of a stage, and λₗ a price of each of
//! its units. Where the known decisions d of part p, of which there are nₚ, contribute aₖ(d) to bound k and take bₗ(d) of limit l,
//!
//! ```text
//! maximise    Σₖ yₖ·cₖ − Σₗ λₗ·Bₗ + Σₚ nₚ·μₚ
//! subject to  μₚ ≤ Σₖ yₖ·aₖ(d) + Σₗ λₗ·bₗ(d)              for all known decisions d of p
//!             Σ yₖ = 1 in each group of shares,  y, λ ≥ 0
//! ```
//! gives the best shares and prices if these decisions were all, and its dual a mix of decisions that is best for all bounds together.

use std::ops::Range;

use super::ilp::{LinearProgram, LinearRow, TIME_SCALE, solve_relaxation};

/// Linear programs that are solved for a bound from means.
pub(crate) const MEANS_MAX: usize = 40;
/// Relative difference of such a bound to the value of the linear program at which the search ends.
pub(crate) const MEAN_TOLERANCE: f64 = 1e-3;
/// Largest price of all that is within a limit, in the unit of time.
const PRICE_MAX: f64 = 2.0;

/// Decisions of a part.
pub(crate) struct MeanDecisions {
    pub part: usize,
    /// The contribution to each bound in seconds, in the order of the shares.
    pub times: Vec<f64>,
    /// Amounts of limits that they take, by the number of the limit.
    pub uses: Vec<(usize, f64)>,
}

/// Bounds, limits, and the decisions that are known.
pub(crate) struct MeanProgram {
    /// The constant of each bound in seconds, by group of shares.
    pub groups: Vec<Vec<f64>>,
    /// The size of each limit.
    pub limits: Vec<f64>,
    /// The number of each part.
    pub counts: Vec<f64>,
    pub decisions: Vec<MeanDecisions>,
    /// The order of magnitude of the bounds, in seconds.
    pub unit: f64,
}

/// Shares, and prices in seconds per unit of a limit.
pub(crate) struct MeanMultipliers {
    /// The bound that they would give if no other decisions were possible, in seconds.
    pub value: f64,
    /// The shares of each group.
    pub shares: Vec<Vec<f64>>,
    pub prices: Vec<f64>,
}

impl MeanProgram {
    /// The best multipliers.
    pub(crate) fn multipliers(&self) -> Option<MeanMultipliers> {
        let priced = self.exceeded_limits();
        let program = self.program(&priced);
        let values = solve_relaxation(&program)?;
        let value =
            -program.costs.iter().zip(&values).map(|(cost, value)| cost * value).sum::<f64>();
        let of_group = |of: Range<usize>| with_sum_one(&values[of]);
        let shares = self.share_ranges().map(of_group).collect();
        let mut prices = vec![0.0; self.limits.len()];
        for (limit, price) in priced.iter().zip(&values[self.shares()..]) {
            prices[*limit] = price.max(0.0) / self.scale() / self.limits[*limit];
        }
        Some(MeanMultipliers { value: value / self.scale(), shares, prices })
    }

    /// The number of each of the known decisions in a best mix, in which the instances of a part may have several.
    pub(crate) fn mix(&self) -> Option<Vec<f64>> {
        let dual = self.program(&self.exceeded_limits()).dual();
        let values = solve_relaxation(&dual)?.into_iter();
        // Those of upper bounds follow.
        Some(values.skip(self.groups.len()).take(self.decisions.len()).collect())
    }

    fn scale(&self) -> f64 {
        TIME_SCALE / self.unit
    }

    fn shares(&self) -> usize {
        self.groups.iter().map(Vec::len).sum()
    }

    /// The places of each group among the shares.
    fn share_ranges(&self) -> impl Iterator<Item = Range<usize>> {
        let ends = self.groups.iter().scan(0, |end, group| {
            *end += group.len();
            Some((group.len(), *end))
        });
        ends.map(|(size, end)| end - size..end)
    }

    /// The variables are the shares, the prices of all that is within these limits, and the costs of the parts. The rows of the groups come
    /// first.
    fn program(&self, priced: &[usize]) -> LinearProgram {
        let scale = self.scale();
        let first_price = self.shares();
        let first_part = first_price + priced.len();
        let mut costs: Vec<f64> =
            self.groups.iter().flatten().map(|constant| -constant * scale).collect();
        costs.extend(priced.iter().map(|_| 1.0));
        costs.extend(self.counts.iter().map(|count| -count));
        // That shares are no larger than one follows from their sum.
        let mut upper_bounds = vec![TIME_SCALE; first_price];
        upper_bounds.resize(first_part, PRICE_MAX * TIME_SCALE);
        upper_bounds.resize(costs.len(), TIME_SCALE * TIME_SCALE);
        let sum = |shares: Range<usize>| LinearRow {
            terms: shares.map(|share| (share, 1.0)).collect(),
            is_equality: true,
            rhs: 1.0,
        };
        let of_decisions = |decisions: &MeanDecisions| {
            let mut terms = vec![(first_part + decisions.part, 1.0)];
            terms.extend(decisions.times.iter().map(|time| -scale * time).enumerate());
            terms.extend(decisions.uses.iter().filter_map(|(limit, amount)| {
                let price = priced.iter().position(|priced| priced == limit)?;
                Some((first_price + price, -amount / self.limits[*limit]))
            }));
            terms.retain(|(_, coefficient)| *coefficient != 0.0);
            LinearRow { terms, is_equality: false, rhs: 0.0 }
        };
        let rows = self.share_ranges().map(sum).chain(self.decisions.iter().map(of_decisions));
        LinearProgram { costs, upper_bounds, rows: rows.collect() }
    }

    /// The limits that some known decisions exceed.
    fn exceeded_limits(&self) -> Vec<usize> {
        let is_exceeded = |limit: &usize| {
            let mut most = vec![0.0_f64; self.counts.len()];
            for decisions in &self.decisions {
                let uses = decisions.uses.iter().filter(|(used, _)| used == limit);
                for (_, amount) in uses {
                    let of_part = &mut most[decisions.part];
                    *of_part = of_part.max(amount * self.counts[decisions.part]);
                }
            }
            let within = self.limits[*limit];
            within > 0.0 && most.iter().sum::<f64>() > within
        };
        (0..self.limits.len()).filter(is_exceeded).collect()
    }
}

/// Shares in proportion to these values.
fn with_sum_one(values: &[f64]) -> Vec<f64> {
    let shares = values.iter().map(|share| share.max(0.0));
    let sum: f64 = shares.clone().sum();
    shares.map(|share| share / sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One part with two decisions, each slow in one of two bounds: the mean counts both.
    #[test]
    fn a_mean_is_larger_than_either_bound() {
        let decisions = [[3.0, 1.0], [1.0, 3.0]].map(|times| MeanDecisions {
            part: 0,
            times: times.into(),
            uses: vec![],
        });
        let program = MeanProgram {
            groups: vec![vec![0.5, 0.5]],
            limits: vec![],
            counts: vec![2.0],
            decisions: decisions.into(),
            unit: 4.0,
        };
        let MeanMultipliers { value, shares, .. } = program.multipliers().expect("a solution");
        assert!((value - 4.5).abs() < 1e-6, "{value}");
        assert!(shares[0].iter().all(|share| (share - 0.5).abs() < 1e-6), "{shares:?}");
        let mix = program.mix().expect("a solution");
        assert!(mix.iter().all(|count| (count - 1.0).abs() < 1e-6), "{mix:?}");
    }

    /// Within fewer bytes than all fast decisions take, some are slow.
    #[test]
    fn a_price_counts_the_memory_limit() {
        let of = |time, bytes| MeanDecisions { part: 0, times: vec![time], uses: vec![(0, bytes)] };
        let program = MeanProgram {
            groups: vec![vec![0.0]],
            limits: vec![6.0],
            counts: vec![4.0],
            decisions: vec![of(1.0, 2.0), of(2.0, 1.0)],
            unit: 4.0,
        };
        let MeanMultipliers { value, prices, .. } = program.multipliers().expect("a solution");
        assert!((value - 6.0).abs() < 1e-6, "{value}");
        assert!((prices[0] - 1.0).abs() < 1e-6, "{prices:?}");
    }
}
