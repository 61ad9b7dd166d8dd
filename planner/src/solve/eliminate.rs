//! Variable elimination: dynamic programming over the graph of links.
//!
//! Variables are removed one at a time. Removing `v` with neighbours `N` leaves a table over `N`
//!
//! ```text
//! μᵥ(N) = min over c of  time(v, c) + Σ (tables that mention v)(N, c)
//! ```
//!
//! over those `(N, c)` that the links allow. After the last variable the minimum is a number; going
//! back through the recorded minimisers gives an assignment that attains it. Work and memory are
//! exponential only in the number of neighbours at removal (the width of the order, see
//! `order.rs`), which is 1 on a tree.
//!
//! Memory rows are ignored, so the minimum is a lower bound on the table's optimum, and it is the
//! optimum when its assignment fits the rows. [`EliminationOrder`] separates the links from the nodes' costs:
//! what goes together is found once (`join.rs`), and with other costs (bytes priced by
//! multipliers, say) only the sweep is repeated.

use narrows_cost_model::{Assignment, CostTable, TableLink};

use super::join::{Elimination, removals};
use super::order::ConstraintGraph;
use super::presolve::presolve;
use super::{Prover, SolveError, SolveLimits, SolveOutcome, Solver};

/// An order of removal for the links of one table, good for any costs of its nodes.
#[derive(Clone, Debug)]
pub struct EliminationOrder {
    /// How many choices each node has.
    sizes: Vec<usize>,
    removals: Vec<Elimination>,
    /// The removals that leave a number.
    roots: Vec<usize>,
    /// Cells of all tables that removals leave.
    cells: usize,
}

/// The cheapest assignment for some node costs.
#[derive(Clone, Debug, PartialEq)]
pub struct MinCostAssignment {
    /// The sum of the costs.
    pub cost: f64,
    /// An assignment that attains it and satisfies every link.
    pub assignment: Assignment,
}

/// What the cells of all removals cost, and the entry that each one's cost is of.
struct SweepTables {
    costs: Vec<f64>,
    entries: Vec<u32>,
}

impl EliminationOrder {
    /// Orders the removal of the nodes of `table`.
    pub fn new(table: &CostTable) -> Result<EliminationOrder, SolveError> {
        EliminationOrder::rooted(table, None)
    }

    /// Orders the removal of the nodes of `table`, `root` last.
    pub fn rooted(table: &CostTable, root: Option<usize>) -> Result<EliminationOrder, SolveError> {
        let sizes: Vec<usize> = table.nodes.iter().map(|node| node.choices.len()).collect();
        EliminationOrder::ordered(sizes, &table.links, root)
    }

    /// Orders the removal of nodes with so many choices each.
    pub fn of_links(sizes: &[usize], links: &[TableLink]) -> Result<EliminationOrder, SolveError> {
        EliminationOrder::ordered(sizes.to_vec(), links, None)
    }

    fn ordered(
        sizes: Vec<usize>,
        links: &[TableLink],
        root: Option<usize>,
    ) -> Result<EliminationOrder, SolveError> {
        let network = ConstraintGraph::new(sizes.clone(), links);
        let (removals, cells) = removals(&network, network.order(root))?;
        // What mentions a variable is joined when it is removed, and a number mentions none.
        let mut is_root = vec![true; removals.len()];
        removals.iter().flat_map(|r| &r.children).for_each(|&child| is_root[child] = false);
        let roots = (0..removals.len()).filter(|&i| is_root[i]).collect();
        Ok(EliminationOrder { sizes, removals, roots, cells })
    }

    /// The additions of one sweep.
    pub fn work(&self) -> usize {
        self.removals.iter().map(|removal| removal.values.len()).sum()
    }

    /// The cheapest assignment when choice `c` of node `n` costs `costs[n][c]`, ignoring memory
    /// rows. `None` when the links contradict each other.
    pub fn cheapest(&self, costs: &[Vec<f64>]) -> Option<MinCostAssignment> {
        if self.is_contradictory() {
            return None;
        }
        let swept = self.sweep(costs);
        let roots = || self.roots.iter().map(|&root| (root, self.removals[root].base));
        let cost = roots().map(|(_, cell)| swept.costs[cell]).sum();
        let mut assignment = vec![0; self.sizes.len()];
        let mut open: Vec<(usize, usize)> = roots().collect();
        while let Some((removal, cell)) = open.pop() {
            let removal = &self.removals[removal];
            let entry = swept.entries[cell] as usize;
            if let Some(choice) = assignment.get_mut(removal.node) {
                *choice = removal.values[entry];
            }
            let cells = removal.below(entry).iter().map(|&cell| cell as usize);
            open.extend(removal.children.iter().copied().zip(cells));
        }
        Some(MinCostAssignment { cost, assignment })
    }

    /// For each choice of the last node removed, the cost of the cheapest assignment with it;
    /// infinite where there is none.
    pub fn marginals(&self, costs: &[Vec<f64>]) -> Vec<f64> {
        let Some((last, before)) = self.removals.split_last() else { return Vec::new() };
        let mut totals = vec![f64::INFINITY; self.sizes[last.node]];
        if self.is_contradictory() {
            return totals;
        }
        let swept = self.sweep(costs);
        let others = self.roots.iter().filter_map(|&root| before.get(root));
        let elsewhere: f64 = others.map(|root| swept.costs[root.base]).sum();
        for (entry, &choice) in last.values.iter().enumerate() {
            let below: f64 = last.below(entry).iter().map(|&cell| swept.costs[cell as usize]).sum();
            totals[choice as usize] = costs[last.node][choice as usize] + below + elsewhere;
        }
        totals
    }

    fn is_contradictory(&self) -> bool {
        self.removals.iter().any(|removal| removal.values.is_empty())
    }

    /// The cheapest entry of every cell of every removal.
    fn sweep(&self, costs: &[Vec<f64>]) -> SweepTables {
        let mut swept = SweepTables { costs: vec![0.0; self.cells], entries: vec![0; self.cells] };
        let keys = self.removals.iter().filter(|removal| removal.node >= self.sizes.len());
        let keys_max = keys.flat_map(|removal| &removal.values).max();
        let free = vec![0.0; keys_max.map_or(0, |&value| value as usize + 1)];
        for removal in &self.removals {
            let own = costs.get(removal.node).unwrap_or(&free);
            // The numbers of children that are common, known to the compiler.
            match removal.children.len() {
                0 => remove(removal, own, &mut swept, 0),
                1 => remove(removal, own, &mut swept, 1),
                2 => remove(removal, own, &mut swept, 2),
                3 => remove(removal, own, &mut swept, 3),
                children => remove(removal, own, &mut swept, children),
            }
        }
        swept
    }
}

/// The cheapest entry of every cell of one removal.
#[inline(always)]
fn remove(removal: &Elimination, own: &[f64], swept: &mut SweepTables, children: usize) {
    let (below, costs) = swept.costs.split_at_mut(removal.base);
    let chosen = &mut swept.entries[removal.base..];
    for (cell, span) in removal.starts.windows(2).enumerate() {
        let (mut best, mut best_entry) = (f64::INFINITY, span[0]);
        for entry in span[0]..span[1] {
            let at = entry as usize;
            let mut cost = own[removal.values[at] as usize];
            for &cell in &removal.cells[at * children..at * children + children] {
                cost += below[cell as usize];
            }
            if cost < best {
                (best, best_entry) = (cost, entry);
            }
        }
        costs[cell] = best;
        chosen[cell] = best_entry;
    }
}

/// The times of all choices: the costs of the plain objective.
pub fn times(table: &CostTable) -> Vec<Vec<f64>> {
    let node = |node: &narrows_cost_model::TableNode| {
        node.choices.iter().map(|choice| choice.time.0).collect()
    };
    table.nodes.iter().map(node).collect()
}

/// The fastest assignment of a table, ignoring its memory rows; `None` when its links contradict
/// each other. The table without rows is presolved first, which merges choices that differ in
/// bytes alone.
pub fn fastest(table: &CostTable) -> Result<Option<Assignment>, SolveError> {
    let mut free = table.clone();
    free.rows.clear();
    free.nodes.iter_mut().flat_map(|node| &mut node.choices).for_each(|c| c.bytes.clear());
    let Ok(reduced) = presolve(&free) else { return Ok(None) };
    let plan = EliminationOrder::new(&reduced.table)?;
    let cheapest = plan.cheapest(&times(&reduced.table));
    Ok(cheapest.map(|cheapest| reduced.lift(&cheapest.assignment)))
}

/// [`fastest`] as a solver: fails when a memory row binds.
#[derive(Clone, Copy, Debug)]
pub struct Eliminate;

impl Solver for Eliminate {
    fn solve(&self, table: &CostTable, _: &SolveLimits) -> Result<SolveOutcome, SolveError> {
        match fastest(table)? {
            None => Ok(SolveOutcome::infeasible(Prover::Eliminate, None)),
            Some(a) if table.fits(&a) => Ok(SolveOutcome::optimal(table, a, Prover::Eliminate)),
            Some(a) => Err(SolveError::RowsBind { bound: table.time(&a) }),
        }
    }
}
