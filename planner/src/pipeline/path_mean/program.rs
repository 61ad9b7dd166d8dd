//! The linear program of the best multipliers over the paths and the decisions that are known, and its mix of decisions.

use narrows_cost_model::StepWeights;

use super::{Candidate, DivisionPaths, Multipliers, PathMean};
use crate::pipeline::step_path::{ClassTimes, SegmentClass};
use crate::solve::{MeanDecisions, MeanMultipliers, MeanProgram};

impl PathMean<'_> {
    /// The best multipliers if the known decisions were all, with the bound that they would give, in seconds; `unit` is the order of
    /// magnitude of a step.
    pub(super) fn multipliers(
        &self,
        paths: &DivisionPaths,
        unit: f64,
    ) -> Option<(f64, Multipliers)> {
        let MeanMultipliers { value, shares, prices } = self.program(paths, unit).multipliers()?;
        let [shares, updates] = shares.try_into().ok()?;
        let [prices, most, least] = split_by_stage(prices);
        let block_prices = [most, least];
        Some((value, Multipliers { shares, updates, prices, block_prices, found: vec![] }))
    }

    /// The number of each of the known decisions that the divisions allow in a best mix.
    pub(super) fn mix(&self, paths: &DivisionPaths, unit: f64) -> Option<Vec<f64>> {
        self.program(paths, unit).mix()
    }

    /// The times of each virtual stage with a best mix of the known decisions, in which equal segments may have parts of several.
    pub(super) fn mixed_times(
        &self,
        paths: &mut DivisionPaths,
        unit: f64,
    ) -> Option<Vec<ClassTimes>> {
        let mix = self.mix(paths, unit)?;
        let mut times = vec![ClassTimes::default(); self.context.virtual_stages()];
        let mut blocks = vec![0.0; self.budgets.len()];
        for ((_, virtual_stage, class, candidate), count) in self.candidates(paths).zip(mix) {
            let of_class = &mut times[virtual_stage][class as usize];
            *of_class = of_class.plus(candidate.times, count);
            if class.is_block() {
                blocks[self.context.stage_and_chunk(virtual_stage).0] += count;
            }
        }
        paths.counts.mixed = blocks;
        Some(times)
    }

    /// The known decisions that the division allows, with the numbers of their parts and virtual stages.
    pub(super) fn candidates<'p>(
        &'p self,
        paths: &'p DivisionPaths,
    ) -> impl Iterator<Item = (usize, usize, SegmentClass, &'p Candidate)> {
        self.parts.iter().enumerate().flat_map(move |(number, part)| {
            let of_stages = part.candidates.iter().enumerate();
            let allowed = of_stages.filter(move |(stage, _)| part.may_be_on(*stage, paths));
            allowed.flat_map(move |(virtual_stage, candidates)| {
                candidates
                    .iter()
                    .map(move |candidate| (number, virtual_stage, candidate.class, candidate))
            })
        })
    }

    /// The program of the shares of paths, those of the updates of each stage, and the prices of each stage's bytes.
    fn program(&self, paths: &DivisionPaths, unit: f64) -> MeanProgram {
        let stages = self.budgets.len();
        let update = StepWeights { update: 1.0, ..StepWeights::default() };
        let of_candidate =
            |(part, virtual_stage, class, candidate): (_, _, SegmentClass, &Candidate)| {
                let (stage, _) = self.context.stage_and_chunk(virtual_stage);
                let of_paths = paths.all.iter().map(|path| path.weights(virtual_stage, class));
                let mut times: Vec<f64> =
                    of_paths.map(|weights| candidate.times.weighted(weights)).collect();
                let of_update = candidate.times.weighted(&update);
                times.extend((0..stages).map(|other| if other == stage { of_update } else { 0.0 }));
                let uses = match class.is_block() {
                    true => {
                        let most = (stages + stage, 1.0);
                        let others = (0..stages).filter(|other| *other != stage);
                        let least = others.map(|other| (2 * stages + other, 1.0));
                        [(stage, candidate.decisions.bytes), most]
                            .into_iter()
                            .chain(least)
                            .collect()
                    }
                    false => vec![],
                };
                MeanDecisions { part, times, uses }
            };
        let budgets = self.budgets.iter().map(|budget| budget.as_f64());
        MeanProgram {
            groups: vec![
                paths.all.iter().map(|path| path.besides_segments).collect(),
                vec![0.0; stages],
            ],
            limits: budgets.chain(paths.counts.limits()).collect(),
            counts: self.parts.iter().map(|part| part.count).collect(),
            decisions: self.candidates(paths).map(of_candidate).collect(),
            unit,
        }
    }
}

/// Prices of bytes, of blocks on stages that may have no more, and of blocks on other stages than those that may have no fewer.
fn split_by_stage(mut prices: Vec<f64>) -> [Vec<f64>; 3] {
    let stages = prices.len() / 3;
    let least = prices.split_off(2 * stages);
    let most = prices.split_off(stages);
    [prices, most, least]
}
