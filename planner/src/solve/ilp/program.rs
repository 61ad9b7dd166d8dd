//! The integer program of a table.
//!
//! One binary `x[n,c]` for each choice of each node that has several, `Σ_c x[n,c] = 1`.
//! A link with keys `k` and `N(k)` = the choices of `to` that offer `k` becomes
//!
//! ```text
//! Σ {x[from,c] : N(demand(c)) ⊆ U}  ≤  Σ {x[to,c] : c ∈ U}
//! ```
//!
//! for the sets `U` that are unions of overlapping `N(k)`. By Hall's theorem these describe the
//! marginals of the link exactly, so on a tree the relaxation is integral: branching can only
//! come from cycles and memory rows. When every choice demands and the `N(k)` are disjoint, the
//! inequalities sum to 1 = 1 and are equalities, one of them redundant.
//!
//! Times are counted from each node's fastest choice and scaled so that the bound is
//! [`TIME_SCALE`]. Bytes are counted from each node's smallest choice and divided by a power of
//! two that brings the limit near one: libraries solve to about 1e-10 of a row's largest
//! coefficient and then check to an absolute 1e-7, which large coefficients fail. Then they are
//! rounded down to multiples of a grain, because coefficients that differ by a billionth make
//! bases that libraries take for singular. A rounded row is a relaxation; assignments that exceed the
//! exact row are cut off by covers.

use std::collections::BTreeSet;
use std::ops::Range;

use fixedbitset::FixedBitSet;
use narrows_cost_model::{CostTable, MemoryRowId, TableLink};
use narrows_plan::Seconds;

use super::library::{LinearProgram, LinearRow, TIME_SCALE, bytes_unit};

/// Largest number of sets `U` of one group of overlapping keys.
const UNIONS_MAX: usize = 128;

/// The integer program of a table.
#[derive(Clone, Debug)]
pub(super) struct TableProgram {
    linear: LinearProgram,
    /// The variables of each node; empty where there is nothing to choose.
    variables: Vec<Range<usize>>,
    /// `time = base + objective / scale`.
    base: f64,
    scale: f64,
    /// Scaled bytes are multiples of this.
    grain: f64,
}

impl TableProgram {
    /// The program without memory rows. Rows that are added later are rounded to multiples of `grain`.
    pub(super) fn new(table: &CostTable, bound: Seconds, grain: f64) -> TableProgram {
        let mut variables = Vec::with_capacity(table.nodes.len());
        let mut excess = Vec::new();
        let mut base = 0.0;
        for node in &table.nodes {
            let least = node.choices.iter().map(|c| c.time.0).fold(f64::INFINITY, f64::min);
            base += least;
            let first = excess.len();
            if node.choices.len() > 1 {
                excess.extend(node.choices.iter().map(|c| c.time.0 - least));
            }
            variables.push(first..excess.len());
        }
        let largest = excess.iter().copied().fold(0.0, f64::max);
        let unit = base.max(bound.0).max(largest * 1e-6);
        let scale = if unit > 0.0 { TIME_SCALE / unit } else { 1.0 };
        let costs: Vec<f64> = excess.iter().map(|t| t * scale).collect();
        let one_hot = |span: &Range<usize>| LinearRow {
            terms: span.clone().map(|x| (x, 1.0)).collect(),
            is_equality: true,
            rhs: 1.0,
        };
        let rows = variables.iter().filter(|span| !span.is_empty()).map(one_hot).collect();
        let linear = LinearProgram { upper_bounds: vec![1.0; costs.len()], costs, rows };
        let mut program = TableProgram { linear, variables, base, scale, grain };
        table.links.iter().for_each(|link| program.add_link(link));
        program
    }

    /// The current program.
    pub(super) fn linear(&self) -> &LinearProgram {
        &self.linear
    }

    /// The time for an objective.
    pub(super) fn time(&self, objective: f64) -> Seconds {
        Seconds(self.base + objective / self.scale)
    }

    /// The 0/1 values of an assignment.
    pub(super) fn values(&self, assignment: &[u32]) -> Vec<f64> {
        let mut values = vec![0.0; self.linear.costs.len()];
        for (span, &c) in self.variables.iter().zip(assignment) {
            if !span.is_empty() {
                values[span.start + c as usize] = 1.0;
            }
        }
        values
    }

    /// The assignment closest to these values.
    pub(super) fn assignment(&self, values: &[f64]) -> Vec<u32> {
        let largest = |span: &Range<usize>| {
            span.clone()
                .max_by(|&a, &b| values[a].total_cmp(&values[b]))
                .map_or(0, |x| (x - span.start) as u32)
        };
        self.variables.iter().map(largest).collect()
    }

    fn add_link(&mut self, link: &TableLink) {
        let (from, to) = (link.from.0 as usize, link.to.0 as usize);
        let offered = LinkOffers::new(link);
        let exact = offered.is_partition && link.demand.iter().all(Option::is_some);
        let mut rows: Vec<(Vec<usize>, Vec<usize>)> = Vec::new();
        for (keys, union) in offered.unions() {
            let demanding = |c: &usize| link.demand[*c].is_some_and(|k| keys & (1 << k) != 0);
            rows.push(((0..link.demand.len()).filter(demanding).collect(), union.ones().collect()));
        }
        if exact {
            rows.sort_by_key(|(from, to)| from.len() + to.len());
            rows.pop();
        }
        for (demanding, offering) in rows {
            let mut row = LinearRow { terms: Vec::new(), is_equality: exact, rhs: 0.0 };
            // The only choice of a node without variables is a constant.
            match self.variables[from].clone() {
                span if span.is_empty() => row.rhs -= demanding.len() as f64,
                span => row.terms.extend(demanding.iter().map(|c| (span.start + c, 1.0))),
            }
            match self.variables[to].clone() {
                span if span.is_empty() => row.rhs += offering.len() as f64,
                span => row.terms.extend(offering.iter().map(|c| (span.start + c, -1.0))),
            }
            self.linear.rows.push(row);
        }
    }

    /// Adds a memory row.
    pub(super) fn add_memory(&mut self, table: &CostTable, row: MemoryRowId) {
        let bytes = relative_bytes(table, row);
        let residual_bytes = bytes.residual_bytes;
        let unit = bytes_unit(residual_bytes);
        let mut terms = Vec::new();
        for (span, choice_bytes) in self.variables.iter().zip(&bytes.by_choice) {
            let grains = |&b: &u64| (b as f64 / unit / self.grain).floor() * self.grain;
            terms.extend(
                span.clone().zip(choice_bytes.iter().map(grains)).filter(|(_, b)| *b > 0.0),
            );
        }
        self.linear.rows.push(LinearRow {
            terms,
            is_equality: false,
            rhs: residual_bytes as f64 / unit,
        });
    }

    /// Cuts off `assignment`, which exceeds `row`, and all assignments that use at least as much at each
    /// of its nodes: for sums so close to the limit that rounding hides the excess.
    pub(super) fn add_cover(&mut self, table: &CostTable, row: MemoryRowId, assignment: &[u32]) {
        let bytes = relative_bytes(table, row);
        let mut cover = LinearRow { terms: Vec::new(), is_equality: false, rhs: -1.0 };
        for ((span, choice_bytes), &c) in
            self.variables.iter().zip(&bytes.by_choice).zip(assignment)
        {
            let taken = choice_bytes[c as usize];
            if taken > 0 {
                cover.rhs += 1.0;
                let as_large = span.clone().zip(choice_bytes).filter(|(_, b)| **b >= taken);
                cover.terms.extend(as_large.map(|(x, _)| (x, 1.0)));
            }
        }
        self.linear.rows.push(cover);
    }
}

/// Bytes of every choice in one row, relative to the least of its node.
struct RelativeBytes {
    /// Bytes by node and choice.
    by_choice: Vec<Vec<u64>>,
    /// The limit minus the least bytes of all nodes.
    residual_bytes: u64,
}

fn relative_bytes(table: &CostTable, row: MemoryRowId) -> RelativeBytes {
    let mut residual_bytes = table.rows[row.0 as usize].limit.0;
    let mut by_choice = Vec::with_capacity(table.nodes.len());
    for node in &table.nodes {
        let used = |choice: &narrows_cost_model::TableChoice| {
            choice.bytes.iter().filter(|(r, _)| *r == row).map(|(_, bytes)| bytes.0).sum::<u64>()
        };
        let used: Vec<u64> = node.choices.iter().map(used).collect();
        let least = used.iter().copied().min().unwrap_or(0);
        residual_bytes = residual_bytes.saturating_sub(least);
        by_choice.push(used.iter().map(|bytes| bytes - least).collect());
    }
    RelativeBytes { by_choice, residual_bytes }
}

/// The choices of `to` that offer each demanded key of a link.
struct LinkOffers {
    keys: Vec<(u8, FixedBitSet)>,
    is_partition: bool,
}

impl LinkOffers {
    fn new(link: &TableLink) -> LinkOffers {
        let demanded: BTreeSet<u8> = link.demand.iter().flatten().copied().collect();
        let offering = |key: u8| {
            let mut set = FixedBitSet::with_capacity(link.offer.len());
            let offers = link.offer.iter().enumerate().filter(|(_, o)| **o & (1 << key) != 0);
            offers.for_each(|(c, _)| set.insert(c));
            set
        };
        let keys: Vec<(u8, FixedBitSet)> =
            demanded.iter().map(|&key| (key, offering(key))).collect();
        let total: usize = keys.iter().map(|(_, set)| set.count_ones(..)).sum();
        let mut all = FixedBitSet::with_capacity(link.offer.len());
        keys.iter().for_each(|(_, set)| all.union_with(set));
        LinkOffers { is_partition: total == all.count_ones(..) && total == link.offer.len(), keys }
    }

    /// The unions of overlapping offers, each with the keys (as a mask) that it contains. The set of
    /// each key is among them.
    fn unions(&self) -> BTreeSet<(u64, FixedBitSet)> {
        let mut seen: BTreeSet<FixedBitSet> =
            self.keys.iter().map(|(_, set)| set.clone()).collect();
        let mut pending: Vec<FixedBitSet> = seen.iter().cloned().collect();
        while let Some(union) = pending.pop() {
            for (_, set) in &self.keys {
                let wider = &union | set;
                if seen.len() < UNIONS_MAX && !set.is_disjoint(&union) && seen.insert(wider.clone())
                {
                    pending.push(wider);
                }
            }
        }
        let inside = |union: &FixedBitSet| {
            let keys = self.keys.iter().filter(|(_, set)| set.is_subset(union));
            keys.fold(0, |mask, (key, _)| mask | 1 << key)
        };
        seen.into_iter().map(|union| (inside(&union), union)).collect()
    }
}
