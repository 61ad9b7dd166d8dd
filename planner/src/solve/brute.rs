//! Enumeration: the oracle for the other solvers.
//!
//! Depth first over the nodes in their order; a choice that contradicts a link to an earlier node
//! is skipped, and every complete assignment is measured. Costs never prune, so nothing here can
//! be wrong about them.

use narrows_cost_model::{Assignment, CostTable, TableLink};
use narrows_plan::Seconds;

use super::{Prover, SolveClock, SolveError, SolveLimits, SolveOutcome, Solver};

/// The most combinations of choices to enumerate.
const COMBINATIONS_MAX: f64 = 1e8;

/// Enumeration as a solver; refuses tables with too many combinations.
#[derive(Clone, Copy, Debug)]
pub struct Brute;

impl Solver for Brute {
    fn solve(&self, table: &CostTable, limits: &SolveLimits) -> Result<SolveOutcome, SolveError> {
        let combinations = table.nodes.iter().map(|node| node.choices.len() as f64).product();
        if combinations > COMBINATIONS_MAX {
            return Err(SolveError::TooManyCombinations { combinations, max: COMBINATIONS_MAX });
        }
        let mut closing = vec![Vec::new(); table.nodes.len()];
        for link in &table.links {
            closing[link.from.max(link.to).0 as usize].push(link);
        }
        let mut search =
            Enumeration { table, closing, clock: SolveClock::start(limits), visits: 0, best: None };
        let finished = search.descend(&mut Vec::with_capacity(table.nodes.len()));
        let best = search.best.map(|(_, assignment)| assignment);
        let expired = if finished { None } else { search.clock.expired() };
        Ok(match (expired, best) {
            (Some(status), best) => {
                SolveOutcome::stopped(status, table, best, Seconds(0.0), Prover::Brute)
            }
            (None, Some(best)) => SolveOutcome::optimal(table, best, Prover::Brute),
            (None, None) => SolveOutcome::infeasible(Prover::Brute, None),
        })
    }
}

struct Enumeration<'a> {
    table: &'a CostTable,
    /// The links whose later end is each node.
    closing: Vec<Vec<&'a TableLink>>,
    clock: SolveClock,
    visits: u64,
    best: Option<(f64, Assignment)>,
}

impl Enumeration<'_> {
    /// Tries every completion of `chosen`; false when the time ran out.
    fn descend(&mut self, chosen: &mut Assignment) -> bool {
        self.visits += 1;
        if self.visits.is_multiple_of(4096) && self.clock.expired().is_some() {
            return false;
        }
        let node = chosen.len();
        if node == self.table.nodes.len() {
            let time = self.table.time(chosen).0;
            let better = self.best.as_ref().is_none_or(|(best, _)| time < *best);
            if better && self.table.fits(chosen) {
                self.best = Some((time, chosen.clone()));
            }
            return true;
        }
        for c in 0..self.table.nodes[node].choices.len() {
            chosen.push(c as u32);
            let consistent = self.closing[node].iter().all(|link| {
                let offer = link.offer[chosen[link.to.0 as usize] as usize];
                let demand = link.demand[chosen[link.from.0 as usize] as usize];
                demand.is_none_or(|key| offer & (1 << key) != 0)
            });
            let finished = !consistent || self.descend(chosen);
            chosen.pop();
            if !finished {
                return false;
            }
        }
        true
    }
}
