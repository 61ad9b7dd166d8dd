//! Variable elimination: dynamic programming over the graph of links.
//!
//! Nodes are removed one at a time. Removing `v` with neighbours `N` leaves a table over `N`
//!
//! ```text
//! μᵥ(N) = min over c of  time(v, c) + Σ (tables that mention v)(N, c)
//! ```
//!
//! where a link is a table of 0 (allowed) and ∞. After the last node the minimum is a number;
//! going back through the recorded minimisers gives an assignment that attains it. Work and
//! memory are exponential only in the number of neighbours at removal (the width of the order),
//! which is 1 on a tree. The order is greedy: smallest table next, fewest new edges on ties.
//!
//! Memory rows are ignored, so the minimum is a lower bound on the table's optimum, and it is the
//! optimum when its assignment fits the rows. [`Plan`] separates the order and the links from the
//! nodes' costs: with other costs (bytes priced by multipliers, say) only the sweep is repeated.

use std::collections::BTreeSet;

use narrows_cost_model::CostTable;
use narrows_cost_model::table::Assignment;

use super::presolve::presolve;
use super::{Limits, Outcome, Prover, SolveError, Solver};

/// The most cells of one intermediate table.
const CELLS_MAX: f64 = (1 << 22) as f64;
/// The most additions of one removal.
const WORK_MAX: f64 = (1 << 28) as f64;

/// A cost over the choices of a few nodes. The last node varies fastest.
#[derive(Clone, Debug)]
struct Factor {
    nodes: Vec<usize>,
    cost: Vec<f64>,
}

/// The removal of one node.
#[derive(Clone, Debug)]
struct Removal {
    node: usize,
    /// The neighbours left at that time: the scope of the table it leaves.
    scope: Vec<usize>,
    /// Which link tables mention the node and no node removed before.
    links: Vec<usize>,
    /// Which earlier removals left a table that mentions the node first.
    messages: Vec<usize>,
}

/// An order of removal for the links of one table, good for any costs of its nodes.
#[derive(Clone, Debug)]
pub struct Plan {
    sizes: Vec<usize>,
    links: Vec<Factor>,
    removals: Vec<Removal>,
}

/// The cheapest assignment for some node costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Cheapest {
    /// The sum of the costs.
    pub cost: f64,
    /// An assignment that attains it and satisfies every link.
    pub assignment: Assignment,
}

impl Plan {
    /// Orders the removal of the nodes of `table`.
    pub fn new(table: &CostTable) -> Result<Plan, SolveError> {
        Plan::rooted(table, None)
    }

    /// Orders the removal of the nodes of `table`, `root` last.
    pub fn rooted(table: &CostTable, root: Option<usize>) -> Result<Plan, SolveError> {
        let sizes: Vec<usize> = table.nodes.iter().map(|node| node.choices.len()).collect();
        let links = link_factors(table);
        let mut neighbours = vec![BTreeSet::new(); sizes.len()];
        for factor in &links {
            if let [a, b] = factor.nodes[..] {
                neighbours[a].insert(b);
                neighbours[b].insert(a);
            }
        }
        let mut plan = Plan { removals: Vec::with_capacity(sizes.len()), sizes, links };
        let mut left: BTreeSet<usize> = (0..plan.sizes.len()).collect();
        let mut link_open = vec![true; plan.links.len()];
        let mut message_open: Vec<bool> = Vec::new();
        while let Some(node) = plan.next(&left, &neighbours, root)? {
            left.remove(&node);
            let scope: Vec<usize> = neighbours[node].iter().copied().collect();
            for &a in &scope {
                neighbours[a].remove(&node);
                neighbours[a].extend(scope.iter().copied().filter(|&b| b != a));
            }
            let claim = |open: &mut Vec<bool>, mentions: &dyn Fn(usize) -> bool| {
                let claimed: Vec<usize> =
                    (0..open.len()).filter(|&i| open[i] && mentions(i)).collect();
                claimed.iter().for_each(|&i| open[i] = false);
                claimed
            };
            let links = claim(&mut link_open, &|i| plan.links[i].nodes.contains(&node));
            let messages = claim(&mut message_open, &|i| plan.removals[i].scope.contains(&node));
            plan.removals.push(Removal { node, scope, links, messages });
            message_open.push(true);
        }
        Ok(plan)
    }

    /// The node whose removal leaves the smallest table.
    fn next(
        &self,
        left: &BTreeSet<usize>,
        neighbours: &[BTreeSet<usize>],
        root: Option<usize>,
    ) -> Result<Option<usize>, SolveError> {
        let cells = |node: usize| neighbours[node].iter().map(|&n| self.sizes[n] as f64).product();
        let fill = |node: usize| -> usize {
            let around = &neighbours[node];
            let missing = |&a: &usize| around.iter().filter(|b| !neighbours[a].contains(b)).count();
            around.iter().map(missing).sum()
        };
        let mut best: Option<(f64, f64, usize)> = None;
        for &node in left.iter().filter(|&&node| Some(node) != root || left.len() == 1) {
            let cells: f64 = cells(node);
            let work = cells * self.sizes[node] as f64;
            let better = best.is_none_or(|(best_work, _, best_node)| {
                work < best_work || work == best_work && fill(node) < fill(best_node)
            });
            if better {
                best = Some((work, cells, node));
            }
        }
        match best {
            Some((work, cells, _)) if cells > CELLS_MAX || work > WORK_MAX => {
                Err(SolveError::TooWide { cells, max: CELLS_MAX })
            }
            best => Ok(best.map(|(.., node)| node)),
        }
    }

    /// The cheapest assignment when choice `c` of node `n` costs `costs[n][c]`, ignoring memory
    /// rows. `None` when the links contradict each other.
    pub fn cheapest(&self, costs: &[Vec<f64>]) -> Option<Cheapest> {
        let (messages, minimisers) = self.sweep(&self.removals, costs);
        let cost: f64 = messages.iter().filter(|m| m.nodes.is_empty()).map(|m| m.cost[0]).sum();
        if cost == f64::INFINITY {
            return None;
        }
        let mut assignment = vec![0; self.sizes.len()];
        for (removal, minimiser) in self.removals.iter().zip(&minimisers).rev() {
            let cell = removal
                .scope
                .iter()
                .fold(0, |cell, &n| cell * self.sizes[n] + assignment[n] as usize);
            assignment[removal.node] = minimiser[cell];
        }
        Some(Cheapest { cost, assignment })
    }

    /// For each choice of the last node removed, the cost of the cheapest assignment with it;
    /// infinite where there is none.
    pub fn marginals(&self, costs: &[Vec<f64>]) -> Vec<f64> {
        let Some((last, before)) = self.removals.split_last() else { return Vec::new() };
        let (messages, _) = self.sweep(before, costs);
        let elsewhere: f64 =
            messages.iter().filter(|m| m.nodes.is_empty()).map(|m| m.cost[0]).sum();
        let mut totals = costs[last.node].clone();
        for part in self.parts(last, &messages) {
            totals.iter_mut().zip(&part.cost).for_each(|(total, cost)| *total += cost);
        }
        totals.iter().map(|total| total + elsewhere).collect()
    }

    /// Removes nodes in turn: the tables they leave, and their best choices.
    fn sweep(&self, removals: &[Removal], costs: &[Vec<f64>]) -> (Vec<Factor>, Vec<Vec<u32>>) {
        let mut messages: Vec<Factor> = Vec::with_capacity(removals.len());
        let mut minimisers = Vec::with_capacity(removals.len());
        for removal in removals {
            let parts = self.parts(removal, &messages);
            let (message, minimiser) = self.remove(removal, &costs[removal.node], &parts);
            messages.push(message);
            minimisers.push(minimiser);
        }
        (messages, minimisers)
    }

    fn parts<'a>(&'a self, removal: &Removal, messages: &'a [Factor]) -> Vec<&'a Factor> {
        let links = removal.links.iter().map(|&i| &self.links[i]);
        links.chain(removal.messages.iter().map(|&i| &messages[i])).collect()
    }

    /// The table that a node leaves over its neighbours, and its best choice for each cell.
    fn remove(&self, removal: &Removal, own: &[f64], parts: &[&Factor]) -> (Factor, Vec<u32>) {
        let scope = &removal.scope;
        // For each part: how far one step of each scope node, and of the node itself, moves in it.
        let strides: Vec<(Vec<usize>, usize)> = parts
            .iter()
            .map(|part| {
                let of = |node: usize| stride(part, &self.sizes, node);
                (scope.iter().map(|&n| of(n)).collect(), of(removal.node))
            })
            .collect();
        let cells: usize = scope.iter().map(|&n| self.sizes[n]).product();
        let mut message = Vec::with_capacity(cells);
        let mut minimiser = Vec::with_capacity(cells);
        let mut at = vec![0; scope.len()];
        let mut offsets = vec![0; parts.len()];
        let mut sum = vec![0.0; own.len()];
        for _ in 0..cells {
            sum.copy_from_slice(own);
            for ((part, (_, step)), &offset) in parts.iter().zip(&strides).zip(&offsets) {
                let entries = part.cost[offset..].iter().step_by((*step).max(1));
                sum.iter_mut().zip(entries).for_each(|(total, entry)| *total += entry);
            }
            let mut best = 0;
            for (c, &cost) in sum.iter().enumerate() {
                if cost < sum[best] {
                    best = c;
                }
            }
            message.push(sum[best]);
            minimiser.push(best as u32);
            for i in (0..scope.len()).rev() {
                at[i] += 1;
                offsets.iter_mut().zip(&strides).for_each(|(offset, (s, _))| *offset += s[i]);
                let size = self.sizes[scope[i]];
                if at[i] < size {
                    break;
                }
                at[i] = 0;
                offsets.iter_mut().zip(&strides).for_each(|(o, (s, _))| *o -= s[i] * size);
            }
        }
        (Factor { nodes: scope.clone(), cost: message }, minimiser)
    }
}

/// How far one step of `node`'s choice moves in a factor; zero when it is not mentioned.
fn stride(factor: &Factor, sizes: &[usize], node: usize) -> usize {
    match factor.nodes.iter().position(|&n| n == node) {
        Some(at) => factor.nodes[at + 1..].iter().map(|&n| sizes[n]).product(),
        None => 0,
    }
}

/// Every link as a table of 0 and ∞.
fn link_factors(table: &CostTable) -> Vec<Factor> {
    let factor = |link: &narrows_cost_model::table::Link| {
        let (from, to) = (link.from.0 as usize, link.to.0 as usize);
        let cost = |demand: Option<u8>, offer: u64| match demand {
            Some(key) if offer & (1 << key) == 0 => f64::INFINITY,
            _ => 0.0,
        };
        if from == to {
            let both = link.demand.iter().zip(&link.offer);
            return Factor { nodes: vec![from], cost: both.map(|(&d, &o)| cost(d, o)).collect() };
        }
        let row = |&demand: &Option<u8>| link.offer.iter().map(move |&offer| cost(demand, offer));
        Factor { nodes: vec![from, to], cost: link.demand.iter().flat_map(row).collect() }
    };
    table.links.iter().map(factor).collect()
}

/// The times of all choices: the costs of the plain objective.
pub fn times(table: &CostTable) -> Vec<Vec<f64>> {
    let node = |node: &narrows_cost_model::table::Node| {
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
    let plan = Plan::new(&reduced.table)?;
    let cheapest = plan.cheapest(&times(&reduced.table));
    Ok(cheapest.map(|cheapest| reduced.lift(&cheapest.assignment)))
}

/// [`fastest`] as a solver: fails when a memory row binds.
#[derive(Clone, Copy, Debug)]
pub struct Eliminate;

impl Solver for Eliminate {
    fn solve(&self, table: &CostTable, _: &Limits) -> Result<Outcome, SolveError> {
        match fastest(table)? {
            None => Ok(Outcome::infeasible(Prover::Eliminate, None)),
            Some(a) if table.fits(&a) => Ok(Outcome::optimal(table, a, Prover::Eliminate)),
            Some(a) => Err(SolveError::RowsBind { bound: table.time(&a) }),
        }
    }
}
