//! Variable elimination: dynamic programming over the graph of links.
//!
//! Variables are removed one at a time. Removing `v` with neighbours `N` leaves a table over `N`
//!
//! ```text
//! μᵥ(N) = min over c of  time(v, c) + Σ (tables that mention v)(N, c)
//! ```
//!
//! over the pairs `(N, c)` that the links allow. After the last variable the minimum is a number; going
//! back through the recorded minimisers gives an assignment that attains it. Work and memory are
//! exponential only in the number of neighbours at removal (the width of the order, see
//! `constraint_graph`), which is 1 on a tree.
//!
//! Memory rows are ignored, so the minimum is a lower bound on the table's optimum, and the optimum
//! itself when its assignment fits the rows. [`EliminationOrder`] depends on the links alone: which
//! choices are compatible is computed once (`join`), and other costs (bytes weighted by multipliers, for
//! instance) only repeat the eliminations.

use std::cell::RefCell;

use narrows_cost_model::{Assignment, CostTable, TableLink, TableNode};

use super::constraint_graph::ConstraintGraph;
use super::join::{Elimination, eliminations};
use super::outcome::SolveError;
use super::presolve::presolve;

/// An order of elimination for the links of one table, good for any costs of its nodes.
#[derive(Clone, Debug)]
pub struct EliminationOrder {
    /// Number of choices of each node.
    sizes: Vec<usize>,
    /// The first choice of each node among the choices of all nodes, and their number.
    first_choices: Vec<usize>,
    /// Costs of the values of any key: none.
    free: Vec<f64>,
    eliminations: Vec<Elimination>,
    /// Eliminations that leave a number.
    roots: Vec<usize>,
    /// Cells of the tables that all eliminations leave.
    cells: usize,
}

/// The cheapest assignment for some node costs.
#[derive(Clone, Debug, PartialEq)]
pub struct MinCostAssignment {
    /// Sum of the costs.
    pub cost: f64,
    /// An assignment that attains it and satisfies every link.
    pub assignment: Assignment,
}

/// Cost of every cell of all eliminations, and the entry that attains it.
#[derive(Default)]
struct EliminationTables {
    costs: Vec<f64>,
    entries: Vec<u32>,
}

impl EliminationOrder {
    /// An order for the nodes of `table`.
    ///
    /// # Errors
    /// The links are too far from a tree.
    pub fn new(table: &CostTable) -> Result<EliminationOrder, SolveError> {
        EliminationOrder::rooted(table, None)
    }

    /// An order for the nodes of `table` that eliminates `root` last.
    pub(super) fn rooted(
        table: &CostTable,
        root: Option<usize>,
    ) -> Result<EliminationOrder, SolveError> {
        let sizes: Vec<usize> = table.nodes.iter().map(|node| node.choices.len()).collect();
        EliminationOrder::ordered(sizes, &table.links, root)
    }

    /// An order for nodes with these numbers of choices.
    ///
    /// # Errors
    /// The links are too far from a tree.
    pub(crate) fn of_links(
        sizes: &[usize],
        links: &[TableLink],
    ) -> Result<EliminationOrder, SolveError> {
        EliminationOrder::ordered(sizes.to_vec(), links, None)
    }

    fn ordered(
        sizes: Vec<usize>,
        links: &[TableLink],
        root: Option<usize>,
    ) -> Result<EliminationOrder, SolveError> {
        let graph = ConstraintGraph::new(sizes.clone(), links);
        let (eliminations, cells) = eliminations(&graph, graph.order(root))?;
        // A table is joined when a variable that it mentions is eliminated; a number mentions none.
        let mut is_root = vec![true; eliminations.len()];
        eliminations.iter().flat_map(|e| &e.children).for_each(|&child| is_root[child] = false);
        let roots = (0..eliminations.len()).filter(|&i| is_root[i]).collect();
        let keys = eliminations.iter().filter(|elimination| elimination.node >= sizes.len());
        let keys_max = keys.flat_map(|elimination| &elimination.values).max();
        let free = vec![0.0; keys_max.map_or(0, |&value| value as usize + 1)];
        let mut first_choices = vec![0];
        for size in &sizes {
            first_choices.push(first_choices[first_choices.len() - 1] + size);
        }
        Ok(EliminationOrder { sizes, first_choices, free, eliminations, roots, cells })
    }

    /// The cheapest assignment when choice `c` of node `n` costs `costs[n][c]`, ignoring memory
    /// rows. `None` when the links contradict each other.
    pub fn cheapest(&self, costs: &[Vec<f64>]) -> Option<MinCostAssignment> {
        let cost = |node: usize| costs.get(node).map_or(&self.free[..], Vec::as_slice);
        self.cheapest_by(cost)
    }

    /// As [`cheapest`](EliminationOrder::cheapest), with the costs of all nodes one after the other.
    pub(crate) fn cheapest_of_flat(&self, costs: &[f64]) -> Option<MinCostAssignment> {
        let cost = |node: usize| match self.first_choices.get(node..node + 2) {
            Some(choices) => &costs[choices[0]..choices[1]],
            None => &self.free,
        };
        self.cheapest_by(cost)
    }

    fn cheapest_by<'a>(&self, cost: impl Fn(usize) -> &'a [f64]) -> Option<MinCostAssignment> {
        if self.is_contradictory() {
            return None;
        }
        self.eliminate(cost, |tables| self.trace_back(tables))
    }

    /// The first choice of a node among the choices of all nodes.
    pub(super) fn first_choice(&self, node: usize) -> usize {
        self.first_choices[node]
    }

    /// The assignment that the tables of an elimination record.
    fn trace_back(&self, tables: &EliminationTables) -> Option<MinCostAssignment> {
        let roots = || self.roots.iter().map(|&root| (root, self.eliminations[root].base));
        let cost = roots().map(|(_, cell)| tables.costs[cell]).sum();
        let mut assignment = vec![0; self.sizes.len()];
        let mut open: Vec<(usize, usize)> = roots().collect();
        while let Some((elimination, cell)) = open.pop() {
            let elimination = &self.eliminations[elimination];
            let entry = tables.entries[cell] as usize;
            if let Some(choice) = assignment.get_mut(elimination.node) {
                *choice = elimination.values[entry];
            }
            let cells = elimination.below(entry).iter().map(|&cell| cell as usize);
            open.extend(elimination.children.iter().copied().zip(cells));
        }
        Some(MinCostAssignment { cost, assignment })
    }

    /// For each choice of the last node eliminated, the cost of the cheapest assignment with it;
    /// infinite where there is none.
    pub(super) fn marginals(&self, costs: &[Vec<f64>]) -> Vec<f64> {
        let Some((last, before)) = self.eliminations.split_last() else { return Vec::new() };
        let mut totals = vec![f64::INFINITY; self.sizes[last.node]];
        if self.is_contradictory() {
            return totals;
        }
        let cost = |node: usize| costs.get(node).map_or(&self.free[..], Vec::as_slice);
        self.eliminate(cost, |tables| {
            let other_roots = self.roots.iter().filter_map(|&root| before.get(root));
            let elsewhere: f64 = other_roots.map(|root| tables.costs[root.base]).sum();
            for (entry, &choice) in last.values.iter().enumerate() {
                let below = last.below(entry).iter().map(|&cell| tables.costs[cell as usize]);
                let below: f64 = below.sum();
                totals[choice as usize] = costs[last.node][choice as usize] + below + elsewhere;
            }
        });
        totals
    }

    fn is_contradictory(&self) -> bool {
        self.eliminations.iter().any(|elimination| elimination.values.is_empty())
    }

    /// Computes the cheapest entry of every cell of every elimination for these costs of the choices of a variable, and
    /// passes the tables on.
    fn eliminate<'a, R>(
        &self,
        cost: impl Fn(usize) -> &'a [f64],
        read: impl FnOnce(&EliminationTables) -> R,
    ) -> R {
        thread_local! {
            /// The tables of the last call. Every cell is written before it is read.
            static TABLES: RefCell<EliminationTables> = RefCell::default();
        }
        TABLES.with_borrow_mut(|tables| {
            self.fill(cost, tables);
            read(tables)
        })
    }

    fn fill<'a>(&self, cost: impl Fn(usize) -> &'a [f64], tables: &mut EliminationTables) {
        tables.costs.resize(self.cells.max(tables.costs.len()), 0.0);
        tables.entries.resize(self.cells.max(tables.entries.len()), 0);
        for elimination in &self.eliminations {
            let own = cost(elimination.node);
            // Constant numbers of children let the compiler unroll the inner loop.
            match elimination.children.len() {
                0 => eliminate_one(elimination, own, tables, 0),
                1 => eliminate_one(elimination, own, tables, 1),
                2 => eliminate_one(elimination, own, tables, 2),
                3 => eliminate_one(elimination, own, tables, 3),
                children => eliminate_one(elimination, own, tables, children),
            }
        }
    }
}

/// The cheapest entry of every cell of one elimination.
#[inline(always)]
fn eliminate_one(
    elimination: &Elimination,
    own: &[f64],
    tables: &mut EliminationTables,
    children: usize,
) {
    let (below, costs) = tables.costs.split_at_mut(elimination.base);
    let chosen = &mut tables.entries[elimination.base..];
    for (cell, span) in elimination.starts.windows(2).enumerate() {
        let (mut best, mut best_entry) = (f64::INFINITY, span[0]);
        for entry in span[0]..span[1] {
            let at = entry as usize;
            let mut cost = own[elimination.values[at] as usize];
            for &cell in &elimination.cells[at * children..at * children + children] {
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

/// Times of all choices in seconds, by node: the costs of the objective.
pub fn choice_times(table: &CostTable) -> Vec<Vec<f64>> {
    let node = |node: &TableNode| node.choices.iter().map(|choice| choice.time.0).collect();
    table.nodes.iter().map(node).collect()
}

/// The fastest assignment of a table, ignoring its memory rows; `None` when its links contradict
/// each other. The table without rows is presolved first, which merges choices that differ in
/// bytes alone.
pub(super) fn fastest_ignoring_rows(table: &CostTable) -> Result<Option<Assignment>, SolveError> {
    let mut free = table.clone();
    free.rows.clear();
    free.nodes.iter_mut().flat_map(|node| &mut node.choices).for_each(|c| c.bytes.clear());
    let Ok(reduced) = presolve(&free) else { return Ok(None) };
    let order = EliminationOrder::new(&reduced.table)?;
    let cheapest = order.cheapest(&choice_times(&reduced.table));
    Ok(cheapest.map(|cheapest| reduced.lift(&cheapest.assignment)))
}
