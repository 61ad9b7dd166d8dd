//! Enumeration of a cost table: the oracle for solvers.
//!
//! Depth-first search over the nodes in their order. A choice that violates a link to an earlier node is
//! skipped, and every complete assignment is evaluated. Costs prune nothing, so no error in a bound can
//! affect the result.

use narrows_cost_model::{Assignment, CostTable, TableLink};
use narrows_plan::Seconds;

/// Limit of the number of combinations of choices.
const COMBINATIONS_MAX: f64 = 1e8;

/// The fastest assignment that satisfies all links and memory rows, with its time; `None` if the table is
/// infeasible.
///
/// # Panics
/// When the table has more than 10⁸ combinations of choices.
pub fn fastest_by_enumeration(table: &CostTable) -> Option<(Seconds, Assignment)> {
    let combinations: f64 = table.nodes.iter().map(|node| node.choices.len() as f64).product();
    assert!(combinations <= COMBINATIONS_MAX, "{combinations:.0e} combinations");
    let mut links_by_later_node = vec![vec![]; table.nodes.len()];
    for link in &table.links {
        links_by_later_node[link.from.max(link.to).0 as usize].push(link);
    }
    let mut search = Enumeration { table, links_by_later_node, best: None };
    search.complete(&mut Vec::with_capacity(table.nodes.len()));
    search.best
}

struct Enumeration<'a> {
    table: &'a CostTable,
    links_by_later_node: Vec<Vec<&'a TableLink>>,
    best: Option<(Seconds, Assignment)>,
}

impl Enumeration<'_> {
    /// Evaluates every completion of `chosen`.
    fn complete(&mut self, chosen: &mut Assignment) {
        let node = chosen.len();
        if node == self.table.nodes.len() {
            let time = self.table.time(chosen);
            let is_faster = self.best.as_ref().is_none_or(|(best, _)| time < *best);
            if is_faster && self.table.fits(chosen) {
                self.best = Some((time, chosen.clone()));
            }
            return;
        }
        for choice in 0..self.table.nodes[node].choices.len() {
            chosen.push(choice as u32);
            let is_consistent = self.links_by_later_node[node].iter().all(|link| {
                let offer = link.offer[chosen[link.to.0 as usize] as usize];
                let demand = link.demand[chosen[link.from.0 as usize] as usize];
                demand.is_none_or(|key| offer & (1 << key) != 0)
            });
            if is_consistent {
                self.complete(chosen);
            }
            chosen.pop();
        }
    }
}
