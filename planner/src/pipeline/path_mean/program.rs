//! The linear program of the best multipliers over the paths and the decisions that are known, and its dual.

use std::ops::Range;

use narrows_cost_model::StepWeights;
use narrows_plan::graph::SegmentKind;

use super::{Candidate, DivisionPaths, Multipliers, PathMean};
use crate::pipeline::step_path::{KindTimes, StepPath};
use crate::solve::{LinearProgram, LinearRow, TIME_SCALE, solve_relaxation};

/// Largest price of memory: of a stage's bytes, in steps.
const PRICE_MAX: f64 = 2.0;
/// Rows of a linear program that hold sums of shares: of paths, and of updates.
const SHARE_ROWS: usize = 2;

impl PathMean<'_> {
    /// The best multipliers if the known decisions were all, with the bound that they would give, in seconds; `unit` is the order of
    /// magnitude of a step.
    pub(super) fn multipliers(
        &self,
        paths: &DivisionPaths,
        unit: f64,
    ) -> Option<(f64, Multipliers)> {
        let priced = self.stages_with_limits();
        let (program, _) = self.program(paths, &priced, unit);
        let values = solve_relaxation(&program)?;
        let value =
            -program.costs.iter().zip(&values).map(|(cost, value)| cost * value).sum::<f64>();
        let scale = TIME_SCALE / unit;
        let (shares, values) = values.split_at(paths.all.len());
        let (updates, values) = values.split_at(self.budgets.len());
        let mut prices = vec![0.0; self.budgets.len()];
        for (stage, price) in priced.iter().zip(values) {
            prices[*stage] = price.max(0.0) / scale / self.budgets[*stage].as_f64();
        }
        let [shares, updates] = [shares, updates].map(with_sum_one);
        Some((value / scale, Multipliers { shares, updates, prices, found: vec![] }))
    }

    /// The times of each virtual stage with a best mix of the known decisions, in which equal segments may have parts of several.
    pub(super) fn mixed_times(&self, paths: &DivisionPaths, unit: f64) -> Option<Vec<KindTimes>> {
        let (program, candidates) = self.program(paths, &self.stages_with_limits(), unit);
        let values = solve_relaxation(&program.dual())?;
        let mut times = vec![KindTimes::default(); self.context.virtual_stages()];
        for ((virtual_stage, kind, candidate), count) in
            candidates.into_iter().zip(&values[SHARE_ROWS..])
        {
            let of_kind = &mut times[virtual_stage][kind as usize];
            *of_kind = of_kind.plus(candidate.times, *count);
        }
        Some(times)
    }

    /// The program of the best multipliers: the shares of paths, those of the updates of each stage, the prices of all bytes of these
    /// stages, and the costs of parts. And the decisions of its rows after those of the shares, with their virtual stages.
    fn program(
        &self,
        paths: &DivisionPaths,
        priced: &[usize],
        unit: f64,
    ) -> (LinearProgram, Vec<(usize, SegmentKind, &Candidate)>) {
        let scale = TIME_SCALE / unit;
        let first_update = paths.all.len();
        let first_price = first_update + self.budgets.len();
        let first_part = first_price + priced.len();
        let mut costs: Vec<f64> =
            paths.all.iter().map(|path| -path.besides_segments * scale).collect();
        costs.resize(first_price, 0.0);
        costs.extend(priced.iter().map(|_| 1.0));
        costs.extend(self.parts.iter().map(|part| -part.count));
        // That shares are no larger than one follows from their sum.
        let mut upper_bounds = vec![TIME_SCALE; first_price];
        upper_bounds.resize(first_part, PRICE_MAX * TIME_SCALE);
        upper_bounds.resize(costs.len(), TIME_SCALE * TIME_SCALE);
        let shares: [Range<usize>; SHARE_ROWS] = [0..first_update, first_update..first_price];
        let sum = |shares: Range<usize>| LinearRow {
            terms: shares.map(|share| (share, 1.0)).collect(),
            is_equality: true,
            rhs: 1.0,
        };
        let mut rows: Vec<LinearRow> = shares.map(sum).into();
        let mut of_rows = vec![];
        for (at, part) in self.parts.iter().enumerate() {
            let kind = part.spec.kind;
            for (virtual_stage, candidates) in part.candidates.iter().enumerate() {
                let (stage, _) = self.context.stage_and_chunk(virtual_stage);
                let price = priced.iter().position(|other| *other == stage);
                let price = price.filter(|_| kind == SegmentKind::Block);
                let is_allowed = part.may_be_on(virtual_stage, paths);
                for candidate in candidates.iter().filter(|_| is_allowed) {
                    let mut terms = vec![(first_part + at, 1.0)];
                    let of_path = |(at, path): (usize, &StepPath)| {
                        let weights = path.weights(virtual_stage, kind);
                        (at, -scale * candidate.times.weighted(weights))
                    };
                    terms.extend(paths.all.iter().enumerate().map(of_path));
                    let update = StepWeights { update: 1.0, ..StepWeights::default() };
                    terms.push((first_update + stage, -scale * candidate.times.weighted(&update)));
                    if let Some(price) = price {
                        let share = candidate.decisions.bytes / self.budgets[stage].as_f64();
                        terms.push((first_price + price, -share));
                    }
                    terms.retain(|(_, coefficient)| *coefficient != 0.0);
                    rows.push(LinearRow { terms, is_equality: false, rhs: 0.0 });
                    of_rows.push((virtual_stage, kind, candidate));
                }
            }
        }
        (LinearProgram { costs, upper_bounds, rows }, of_rows)
    }

    /// The stages that cannot have all blocks with any known decisions.
    fn stages_with_limits(&self) -> Vec<usize> {
        let mut most = vec![0.0; self.budgets.len()];
        for part in self.parts.iter().filter(|part| part.spec.kind == SegmentKind::Block) {
            for (virtual_stage, candidates) in part.candidates.iter().enumerate() {
                let (stage, _) = self.context.stage_and_chunk(virtual_stage);
                let bytes = candidates.iter().map(|candidate| candidate.decisions.bytes);
                most[stage] += part.count * bytes.fold(0.0, f64::max);
            }
        }
        let needs_more = |stage: &usize| {
            let budget = self.budgets[*stage].as_f64();
            budget > 0.0 && most[*stage] > budget
        };
        (0..self.budgets.len()).filter(needs_more).collect()
    }
}

/// Shares in proportion to these values.
fn with_sum_one(values: &[f64]) -> Vec<f64> {
    let shares = values.iter().map(|share| share.max(0.0));
    let sum: f64 = shares.clone().sum();
    shares.map(|share| share / sum).collect()
}
