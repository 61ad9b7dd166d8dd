//! Limits of the numbers of blocks of stages.

use super::super::overhead::StageOverhead;

/// Smallest distance of a number of blocks from the nearest integer.
const FRACTION_MIN: f64 = 1e-3;

/// Numbers of blocks that stages may have.
#[derive(Clone, Debug)]
pub(super) struct StageCounts {
    pub(super) least: Vec<usize>,
    most: Vec<usize>,
    /// Blocks of the model.
    pub(super) all: usize,
    /// Blocks of each stage in the mix of decisions that paths are sought for.
    pub(super) mixed: Vec<f64>,
}

impl StageCounts {
    /// Any numbers of blocks, for which paths are first sought with equal ones.
    pub(super) fn any(overheads: &[StageOverhead], all: usize) -> StageCounts {
        let with_blocks = overheads.iter().filter(|overhead| !overhead.is_empty).count();
        let equal = |overhead: &StageOverhead| match overhead.is_empty {
            true => 0.0,
            false => all as f64 / with_blocks as f64,
        };
        let mixed = overheads.iter().map(equal).collect();
        StageCounts {
            least: vec![0; overheads.len()],
            most: vec![all; overheads.len()],
            all,
            mixed,
        }
    }

    /// Counts that only one division has.
    #[cfg(test)]
    pub(super) fn exactly(counts: &[usize]) -> StageCounts {
        let mixed = counts.iter().map(|count| *count as f64).collect();
        let all = counts.iter().sum();
        StageCounts { least: counts.to_vec(), most: counts.to_vec(), all, mixed }
    }

    /// Price of a block on a stage.
    pub(super) fn price_on(stage: usize, [most, least]: &[Vec<f64>; 2]) -> f64 {
        most[stage] + least.iter().sum::<f64>() - least[stage]
    }

    /// The price of all blocks within the limits.
    pub(super) fn price_within(&self, [most, least]: &[Vec<f64>; 2]) -> f64 {
        self.limits().zip(most.iter().chain(least)).map(|(limit, price)| limit * price).sum()
    }

    /// The blocks that may be on each stage, and those that may be on all others.
    pub(super) fn limits(&self) -> impl Iterator<Item = f64> {
        let others = self.least.iter().map(|least| self.all - least);
        self.most.iter().copied().chain(others).map(|count| count as f64)
    }

    /// The part of the blocks that a stage has in the mix.
    pub(super) fn share(&self, stage: usize) -> f64 {
        self.mixed[stage] / self.all.max(1) as f64
    }

    /// The counts with fewer blocks, and those with more, on the stage whose number in the mix is farthest from an integer. `None` where
    /// all numbers are integers.
    pub(super) fn branches(&self) -> Option<[StageCounts; 2]> {
        let fraction = |count: f64| (count - count.round()).abs();
        let stages = self.mixed.iter().enumerate();
        let (stage, count) = stages.max_by(|a, b| fraction(*a.1).total_cmp(&fraction(*b.1)))?;
        if fraction(*count) <= FRACTION_MIN {
            return None;
        }
        let [mut fewer, mut more] = [self.clone(), self.clone()];
        fewer.most[stage] = *count as usize;
        more.least[stage] = *count as usize + 1;
        Some([fewer, more])
    }

    /// The counts with one block on a stage that has any, and with several.
    pub(super) fn one_or_several(&self, stage: usize) -> [StageCounts; 2] {
        let [mut one, mut several] = [self.clone(), self.clone()];
        one.most[stage] = one.most[stage].min(1);
        several.least[stage] = several.least[stage].max(2);
        [one, several]
    }

    pub(super) fn are_possible(&self) -> bool {
        self.least.iter().zip(&self.most).all(|(least, most)| least <= most)
            && self.least.iter().sum::<usize>() <= self.all
            && self.most.iter().sum::<usize>() >= self.all
    }
}
