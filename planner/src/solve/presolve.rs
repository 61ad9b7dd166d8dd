//! Shrinks a table without losing its optimum.
//!
//! All links between two nodes are first fused into one relation `R ⊆ choices(a) × choices(b)`.
//! Then four rules run to a fixpoint:
//!
//! - *support*: a choice of `a` without remaining partners in `R` is removed (arc consistency);
//! - *capacity*: a choice whose bytes plus the least bytes of all other nodes exceed a row is removed;
//! - *slack*: a row that even the largest choices respect is dropped;
//! - *dominance*: `c` is removed when another choice of its node is compatible with all partners of `c`, no
//!   slower, and no larger in any remaining row.
//!
//! The first three rules keep all assignments; dominance keeps at least one of the fastest.
//! A relation is written back as links: choices of one side with the same partners share a key.

use std::collections::BTreeMap;

use fixedbitset::FixedBitSet;
use narrows_cost_model::{
    Assignment, CostTable, MemoryRow, MemoryRowId, TableChoice, TableLink, TableNode, TableNodeId,
};
use narrows_plan::Bytes;

use super::constraint_graph::{Relation, links_between, self_consistent};
use super::outcome::Conflict;

/// A smaller table with the same optimum. Node ids stay; choices and rows are renumbered.
#[derive(Clone, Debug)]
pub struct ReducedTable {
    /// The smaller table.
    pub table: CostTable,
    /// For each node, the original indices of its remaining choices.
    kept: Vec<Vec<u32>>,
}

impl ReducedTable {
    /// The original table's assignment for an assignment of the reduced one.
    pub fn lift(&self, assignment: &[u32]) -> Assignment {
        self.kept.iter().zip(assignment).map(|(kept, &c)| kept[c as usize]).collect()
    }
}

/// Shrinks `table`.
///
/// # Errors
/// A conflict that proves that the table has no solution.
pub fn presolve(table: &CostTable) -> Result<ReducedTable, Conflict> {
    let mut state = PresolveState::new(table);
    loop {
        state.support()?;
        let any_removed = state.capacity()?;
        if !any_removed && !state.dominance() {
            return Ok(state.reduced_table());
        }
    }
}

/// The table as relations, and the remaining choices and active rows.
struct PresolveState<'a> {
    table: &'a CostTable,
    domains: Vec<FixedBitSet>,
    relations: Vec<Relation>,
    /// The relations of each node, with the end that the node is.
    incident_relations: Vec<Vec<(usize, usize)>>,
    active_rows: Vec<bool>,
    /// `bytes[node][choice][row]`.
    bytes: Vec<Vec<Vec<u64>>>,
    /// Nodes whose neighbourhood changed since dominance was last tested.
    changed: Vec<bool>,
}

impl<'a> PresolveState<'a> {
    fn new(table: &'a CostTable) -> PresolveState<'a> {
        let sizes: Vec<usize> = table.nodes.iter().map(|node| node.choices.len()).collect();
        let domains = self_consistent(&sizes, &table.links);
        let relations: Vec<Relation> = links_between(&table.links)
            .into_iter()
            .map(|(endpoints, links)| Relation::fused(&sizes, endpoints, &links))
            .collect();
        let mut incident_relations = vec![Vec::new(); table.nodes.len()];
        for (i, relation) in relations.iter().enumerate() {
            (0..2).for_each(|end| incident_relations[relation.endpoints[end]].push((i, end)));
        }
        let dense = |choice: &TableChoice| {
            let mut row_bytes = vec![0; table.rows.len()];
            choice.bytes.iter().for_each(|(row, bytes)| row_bytes[row.0 as usize] += bytes.0);
            row_bytes
        };
        let bytes =
            table.nodes.iter().map(|node| node.choices.iter().map(dense).collect()).collect();
        let active_rows = vec![true; table.rows.len()];
        let changed = vec![true; table.nodes.len()];
        PresolveState { table, domains, relations, incident_relations, active_rows, bytes, changed }
    }

    /// Removes choices without partners.
    fn support(&mut self) -> Result<(), Conflict> {
        let mut pending: Vec<usize> = (0..self.relations.len()).collect();
        let mut queued = vec![true; self.relations.len()];
        while let Some(i) = pending.pop() {
            queued[i] = false;
            for end in 0..2 {
                let node = self.relations[i].endpoints[end];
                let other = self.relations[i].endpoints[1 - end];
                let partners = &self.relations[i].compatible[end];
                let removed: Vec<usize> = self.domains[node]
                    .ones()
                    .filter(|&c| partners[c].is_disjoint(&self.domains[other]))
                    .collect();
                if removed.is_empty() {
                    continue;
                }
                self.remove(node, &removed);
                for &(next, _) in &self.incident_relations[node] {
                    if !queued[next] {
                        queued[next] = true;
                        pending.push(next);
                    }
                }
            }
        }
        match self.domains.iter().position(FixedBitSet::is_clear) {
            Some(node) => Err(Conflict::Node(TableNodeId(node as u32))),
            None => Ok(()),
        }
    }

    /// Removes choices too large for a row, and rows that cannot bind. Returns whether a choice was
    /// removed.
    fn capacity(&mut self) -> Result<bool, Conflict> {
        let mut any = false;
        for row in 0..self.table.rows.len() {
            if !self.active_rows[row] {
                continue;
            }
            let limit = u128::from(self.table.rows[row].limit.0);
            let used = |state: &PresolveState, node: usize| -> (u64, u64) {
                let bytes = state.domains[node].ones().map(|c| state.bytes[node][c][row]);
                bytes.fold((u64::MAX, 0), |(low, high), b| (low.min(b), high.max(b)))
            };
            let ranges: Vec<(u64, u64)> = (0..self.domains.len()).map(|n| used(self, n)).collect();
            let least: u128 = ranges.iter().map(|r| u128::from(r.0)).sum();
            let most: u128 = ranges.iter().map(|r| u128::from(r.1)).sum();
            if least > limit {
                let least = Bytes(u64::try_from(least).unwrap_or(u64::MAX));
                return Err(Conflict::Row { row: MemoryRowId(row as u32), least });
            }
            if most <= limit {
                self.active_rows[row] = false;
                self.changed.fill(true);
                continue;
            }
            for (node, &(low, _)) in ranges.iter().enumerate() {
                let slack = limit - (least - u128::from(low));
                let bytes = &self.bytes[node];
                let removed: Vec<usize> = self.domains[node]
                    .ones()
                    .filter(|&c| u128::from(bytes[c][row]) > slack)
                    .collect();
                any |= !removed.is_empty();
                self.remove(node, &removed);
            }
        }
        Ok(any)
    }

    /// Removes dominated choices of nodes whose neighbourhood changed. Returns whether any was removed.
    fn dominance(&mut self) -> bool {
        let mut any = false;
        for node in 0..self.domains.len() {
            if !std::mem::take(&mut self.changed[node]) || self.domains[node].count_ones(..) < 2 {
                continue;
            }
            let removed = self.dominated(node);
            any |= !removed.is_empty();
            self.remove(node, &removed);
            self.changed[node] = false;
        }
        any
    }

    /// The choices of a node that another choice dominates.
    fn dominated(&self, node: usize) -> Vec<usize> {
        let rows: Vec<usize> =
            (0..self.active_rows.len()).filter(|&r| self.active_rows[r]).collect();
        let views: Vec<(&[FixedBitSet], &FixedBitSet)> = self.incident_relations[node]
            .iter()
            .map(|&(i, end)| {
                let relation = &self.relations[i];
                (relation.compatible[end].as_slice(), &self.domains[relation.endpoints[1 - end]])
            })
            .collect();
        let bytes = &self.bytes[node];
        let time = |c: usize| self.table.nodes[node].choices[c].time.0;
        let volume = |c: usize| rows.iter().map(|&r| u128::from(bytes[c][r])).sum::<u128>();
        let freedom = |c: usize| {
            views.iter().map(|(partners, on)| partners[c].intersection_count(on)).sum::<usize>()
        };
        // In this order a choice is dominated by earlier ones only.
        let mut order: Vec<(usize, u128, usize)> =
            self.domains[node].ones().map(|c| (c, volume(c), freedom(c))).collect();
        order.sort_by(|a, b| {
            let by_time = time(a.0).total_cmp(&time(b.0));
            by_time.then(a.1.cmp(&b.1)).then(b.2.cmp(&a.2)).then(a.0.cmp(&b.0))
        });
        let mut kept: Vec<usize> = Vec::new();
        let mut removed = Vec::new();
        for &(c, ..) in &order {
            let is_dominated = kept.iter().any(|&k| {
                rows.iter().all(|&r| bytes[k][r] <= bytes[c][r])
                    && views
                        .iter()
                        .all(|(partners, on)| covers_within(&partners[k], &partners[c], on))
            });
            if is_dominated { removed.push(c) } else { kept.push(c) }
        }
        removed
    }

    fn remove(&mut self, node: usize, removed: &[usize]) {
        if removed.is_empty() {
            return;
        }
        removed.iter().for_each(|&c| self.domains[node].remove(c));
        self.changed[node] = true;
        for &(i, end) in &self.incident_relations[node] {
            self.changed[self.relations[i].endpoints[1 - end]] = true;
        }
    }

    fn reduced_table(&self) -> ReducedTable {
        let kept: Vec<Vec<u32>> =
            self.domains.iter().map(|domain| domain.ones().map(|c| c as u32).collect()).collect();
        let mut renumbered = vec![None; self.table.rows.len()];
        let mut rows: Vec<MemoryRow> = Vec::new();
        for (row, _) in self.active_rows.iter().enumerate().filter(|(_, is_active)| **is_active) {
            renumbered[row] = Some(MemoryRowId(rows.len() as u32));
            rows.push(self.table.rows[row].clone());
        }
        let choice = |node: usize, c: u32| {
            let bytes = &self.bytes[node][c as usize];
            let used = bytes.iter().zip(&renumbered).filter(|(bytes, _)| **bytes > 0);
            TableChoice {
                time: self.table.nodes[node].choices[c as usize].time,
                bytes: used.filter_map(|(&b, row)| row.map(|row| (row, Bytes(b)))).collect(),
            }
        };
        let node = |(n, node): (usize, &TableNode)| TableNode {
            name: node.name.clone(),
            choices: kept[n].iter().map(|&c| choice(n, c)).collect(),
        };
        let nodes = self.table.nodes.iter().enumerate().map(node).collect();
        let links = self.relations.iter().flat_map(|relation| relation.links(&self.domains));
        ReducedTable { table: CostTable { nodes, links: links.collect(), rows }, kept }
    }
}

impl Relation {
    /// The relation among the remaining choices as links, demanded from the side with fewer keys.
    fn links(&self, domains: &[FixedBitSet]) -> Vec<TableLink> {
        let seen = |end: usize| -> (Vec<Option<usize>>, Vec<FixedBitSet>) {
            let other = &domains[self.endpoints[1 - end]];
            let mut classes: BTreeMap<FixedBitSet, usize> = BTreeMap::new();
            let mut demand = Vec::new();
            for c in domains[self.endpoints[end]].ones() {
                let mut partners = self.compatible[end][c].clone();
                partners.intersect_with(other);
                let next = classes.len();
                let free = other.is_subset(&partners);
                demand.push((!free).then(|| *classes.entry(partners).or_insert(next)));
            }
            let mut keys: Vec<(usize, FixedBitSet)> =
                classes.into_iter().map(|(b, k)| (k, b)).collect();
            keys.sort_by_key(|(key, _)| *key);
            (demand, keys.into_iter().map(|(_, partners)| partners).collect())
        };
        let sides = [seen(0), seen(1)];
        let from = usize::from(sides[1].1.len() < sides[0].1.len());
        let (demand, keys) = &sides[from];
        let [from, to] =
            [self.endpoints[from], self.endpoints[1 - from]].map(|node| TableNodeId(node as u32));
        // A link has room for 64 keys.
        keys.chunks(64)
            .enumerate()
            .map(|(chunk, keys)| {
                let span = chunk * 64..chunk * 64 + keys.len();
                let local = |key: usize| span.contains(&key).then(|| (key - span.start) as u8);
                let offered = |c: usize| {
                    let offers = keys.iter().enumerate().filter(|(_, set)| set.contains(c));
                    offers.fold(0, |mask, (key, _)| mask | 1 << key)
                };
                TableLink {
                    from,
                    to,
                    demand: demand.iter().map(|key| key.and_then(local)).collect(),
                    offer: domains[to.0 as usize].ones().map(offered).collect(),
                }
            })
            .collect()
    }
}

/// Whether `set` covers the part of `other` that lies in `within`.
fn covers_within(set: &FixedBitSet, other: &FixedBitSet, within: &FixedBitSet) -> bool {
    let blocks = set.as_slice().iter().zip(other.as_slice()).zip(within.as_slice());
    blocks.into_iter().all(|((set, other), within)| other & within & !set == 0)
}
