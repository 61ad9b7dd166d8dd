//! Bytes that the stages of a context keep free for memory outside the counts of their blocks.
//!
//! Where an arena is too large, its stage reserves the bytes that no block counts; reserves that do not suffice grow faster.
//! A reserve that leaves no partition, or none that is fast enough, is halved towards the last one of its stage that left some.
//! Once a plan fits, reserves between its own and the last too small ones follow.

use narrows_plan::Bytes;

/// Corrections after which steps between reserves double on one stage, and reserves at least double on several, which share the
/// corrections.
const CORRECTIONS_BY_ARENA: usize = 3;

/// Largest number of corrections after a plan fits.
const IMPROVEMENTS_MAX: usize = 4;

/// The reserves of all stages, corrected by the arenas that they led to. Corrections return whether there are other reserves to try.
pub(super) struct StageReserves {
    current: Vec<Bytes>,
    /// The last reserves that led to an arena that was too large; none at first.
    low: Vec<Bytes>,
    /// The last reserves that led to a plan that fits, or after one to none that is better.
    high: Option<Vec<Bytes>>,
    /// Until a plan fits: the stage whose reserve was changed last.
    changed: Option<usize>,
    /// Until a plan fits: the least reserve of each stage that left no partition.
    too_high: Vec<Option<Bytes>>,
    corrections: usize,
    improvements: usize,
}

impl StageReserves {
    /// No reserves.
    pub fn none(stages: usize) -> StageReserves {
        StageReserves {
            current: vec![Bytes(0); stages],
            low: vec![Bytes(0); stages],
            high: None,
            changed: None,
            too_high: vec![None; stages],
            corrections: 0,
            improvements: 0,
        }
    }

    /// The reserve of each stage.
    pub fn current(&self) -> &[Bytes] {
        &self.current
    }

    /// Whether no smaller reserves are left to try.
    pub fn are_least(&self) -> bool {
        self.current == self.low
    }

    /// Whether any reserves have led to a plan that fits.
    pub fn have_plan(&self) -> bool {
        self.high.is_some()
    }

    /// Lowers reserves that led to a plan that fits, or after one to none that is better.
    pub fn lower(&mut self) -> bool {
        self.high = Some(self.current.clone());
        self.improve()
    }

    /// Corrects reserves that leave no partition.
    pub fn lower_without_partition(&mut self) -> bool {
        if self.are_least() {
            return false;
        }
        if self.have_plan() {
            return self.lower();
        }
        let Some(stage) = self.changed else { return false };
        let reserve = &mut self.current[stage];
        self.too_high[stage] = Some(*reserve);
        *reserve = self.low[stage].midpoint(*reserve);
        self.corrections += 1;
        true
    }

    /// Corrects reserves with which the arena of a stage is too large and has this many bytes that no block counts.
    pub fn raise(&mut self, stage: usize, uncounted: Bytes) -> bool {
        self.low.clone_from(&self.current);
        if self.have_plan() {
            return self.improve();
        }
        let is_only_stage = self.current.len() == 1;
        let reserve = &mut self.current[stage];
        let missing = uncounted.saturating_sub(*reserve).max(Bytes(1));
        let doublings = self.corrections.saturating_sub(CORRECTIONS_BY_ARENA - 1);
        let raised = *reserve
            + match is_only_stage {
                true => missing * (1 << doublings),
                false if doublings == 0 => missing,
                false => missing.max(*reserve),
            };
        *reserve = match self.too_high[stage] {
            Some(high) if raised >= high => reserve.midpoint(high),
            _ => raised,
        };
        self.changed = Some(stage);
        self.corrections += 1;
        true
    }

    /// Halves the distance between the reserves that were too small and the reserves of a plan.
    fn improve(&mut self) -> bool {
        for ((current, low), high) in
            self.current.iter_mut().zip(&self.low).zip(self.high.iter().flatten())
        {
            *current = low.midpoint(*high);
        }
        self.improvements += 1;
        self.improvements <= IMPROVEMENTS_MAX && !self.are_least()
    }
}
