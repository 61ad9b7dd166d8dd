//! The lower convex hull of time against bytes over the assignments of a table, refined on demand.
//!
//! The vertices of the hull are the assignments that are cheapest for some multiplier of bytes:
//!
//! ```text
//! minimise  time + λ·bytes,   λ ≥ 0
//! ```
//! Each λ is one elimination. Many blocks that share a budget mix the two vertices around
//! their average bytes, and the edge between these bounds every mix from below; so only the edge over
//! that average must be known.

use std::cell::RefCell;
use std::sync::{Arc, Mutex};

use narrows_plan::{Bytes, Seconds};
use rustc_hash::FxHashMap;

use super::elimination::EliminationOrder;
use crate::lock::lock;

/// A table prepared for eliminations under many weights, with four rows of bytes that are counted, not limited. Its first nodes have
/// times and bytes of their own; the times of the others are multiples of times that tables share, and their bytes count in
/// the later rows only. Choices are numbered by node.
#[derive(Debug)]
pub(crate) struct WeightedTable {
    pub order: Arc<EliminationOrder>,
    /// Time in seconds and bytes in the first row of each choice of the first nodes.
    own: Vec<[f64; 2]>,
    shared: Arc<SharedCosts>,
    /// Factor on the shared times.
    factor: f64,
    /// Vertices found so far.
    known: Mutex<FxHashMap<WeightsKey, Option<Vertex>>>,
}

/// Costs that the tables of one segment share in all contexts with its tensor axis and microbatch.
#[derive(Debug)]
pub(crate) struct SharedCosts {
    /// Seconds of each choice of the nodes after the first ones.
    times: Vec<f64>,
    /// Bytes in each of the later rows of each choice of all nodes.
    later_rows: [Vec<f64>; LATER_ROWS],
}

impl SharedCosts {
    /// The costs from times and bytes by node and choice.
    pub(crate) fn new<'a>(
        times: impl Iterator<Item = &'a [Seconds]>,
        later_rows: [&[Vec<Bytes>]; LATER_ROWS],
    ) -> SharedCosts {
        SharedCosts {
            times: times.flatten().map(|time| time.0).collect(),
            later_rows: later_rows
                .map(|row| row.iter().flatten().map(|bytes| bytes.as_f64()).collect()),
        }
    }
}

/// The bits of all that an elimination depends on: the weights of the later rows, which are left out where bytes have no multiplier,
/// and the multipliers of time and of bytes.
pub(crate) type WeightsKey = [u64; LATER_ROWS + 2];

/// Number of rows after the first one.
const LATER_ROWS: usize = 3;

/// Weights of the rows after the first one.
pub(crate) type RowWeights = [f64; LATER_ROWS];

/// Identity of a vertex in its hull.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct VertexId(u32);

/// An assignment with its time and its weighted bytes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Vertex {
    /// Vertices of one hull differ in it.
    pub id: VertexId,
    /// Time in seconds.
    pub time: f64,
    /// Weighted sum of the bytes of the rows.
    pub bytes: f64,
    /// Index of its table, for hulls over several tables.
    pub table: usize,
    /// The assignment.
    pub assignment: Arc<[u32]>,
}

impl Vertex {
    /// Time and bytes at a multiplier in seconds per byte.
    fn value(&self, multiplier: f64) -> f64 {
        self.time + multiplier * self.bytes
    }
}

impl WeightedTable {
    /// A table whose first nodes have these times in seconds and bytes in the first row, by node and choice, and whose other
    /// nodes have the shared times multiplied by `factor`.
    pub(crate) fn new(
        order: Arc<EliminationOrder>,
        own_times: &[Vec<f64>],
        own_bytes: &[Vec<Bytes>],
        shared: Arc<SharedCosts>,
        factor: f64,
    ) -> WeightedTable {
        let bytes = own_bytes.iter().flatten().map(|bytes| bytes.as_f64());
        let own = own_times.iter().flatten().zip(bytes).map(|(time, bytes)| [*time, bytes]);
        WeightedTable { order, own: own.collect(), shared, factor, known: Mutex::default() }
    }

    /// Time and weighted bytes of a choice.
    fn choice(&self, choice: usize, weights: RowWeights) -> (f64, f64) {
        let rows = self.shared.later_rows.iter().zip(weights);
        let later: f64 = rows.map(|(row, weight)| weight * row[choice]).sum();
        match self.own.get(choice) {
            Some([time, first]) => (*time, first + later),
            None => (self.shared.times[choice - self.own.len()] * self.factor, later),
        }
    }

    /// The assignment that minimises `per_second`·time + `per_byte`·bytes, with `weights` on the later rows. Known
    /// vertices need no elimination.
    fn cheapest(&self, per_second: f64, per_byte: f64, weights: RowWeights) -> Option<Vertex> {
        // The fastest assignment is the same for all weights.
        let is_fastest = per_byte == 0.0;
        let key_weights = if is_fastest { RowWeights::default() } else { weights };
        let [kept, operands_kept, operands_written] = key_weights;
        let key = [kept, operands_kept, operands_written, per_second, per_byte].map(f64::to_bits);
        let known = lock(&self.known).get(&key).cloned();
        let mut vertex = known.unwrap_or_else(|| {
            let vertex = self.eliminate(per_second, per_byte, key_weights);
            lock(&self.known).insert(key, vertex.clone());
            vertex
        })?;
        if is_fastest {
            vertex.bytes = self.chosen(&vertex.assignment, weights).map(|(_, bytes)| bytes).sum();
        }
        Some(vertex)
    }

    /// Time and weighted bytes of the choice of each node.
    fn chosen(&self, assignment: &[u32], weights: RowWeights) -> impl Iterator<Item = (f64, f64)> {
        assignment.iter().enumerate().map(move |(node, choice)| {
            self.choice(self.order.first_choice(node) + *choice as usize, weights)
        })
    }

    fn eliminate(&self, per_second: f64, per_byte: f64, weights: RowWeights) -> Option<Vertex> {
        thread_local! {
            /// The costs of the last call, whose memory the next one uses again.
            static COSTS: RefCell<Vec<f64>> = RefCell::default();
        }
        let cost = |time: f64, bytes: f64| per_second * time + per_byte * bytes;
        let [kept, other_rows @ ..] = &self.shared.later_rows;
        let [weight, other_weights @ ..] = weights;
        let (own_kept, shared_kept) = kept.split_at(self.own.len());
        let own = self.own.iter().zip(own_kept);
        let own = own.map(|([time, first], kept)| cost(*time, first + weight * kept));
        let shared = self.shared.times.iter().zip(shared_kept);
        let shared = shared.map(|(time, kept)| cost(time * self.factor, weight * kept));
        // Most stages defer no weight gradients.
        let others = other_rows.iter().zip(other_weights);
        let others = others.filter(|(_, weight)| *weight * per_byte > 0.0);
        let assignment = COSTS.with_borrow_mut(|costs| {
            costs.clear();
            costs.extend(own);
            costs.extend(shared);
            for (row, weight) in others {
                let per_byte = per_byte * weight;
                costs.iter_mut().zip(row).for_each(|(cost, bytes)| *cost += per_byte * bytes);
            }
            self.order.cheapest_of_flat(costs)
        })?;
        let assignment: Arc<[u32]> = assignment.assignment.into();
        Some(Vertex {
            time: self.chosen(&assignment, weights).map(|(time, _)| time).sum(),
            bytes: self.chosen(&assignment, weights).map(|(_, bytes)| bytes).sum(),
            table: 0,
            id: VertexId(0),
            assignment,
        })
    }
}

/// A line that lies below all assignments of a hull: time ≥ intercept − multiplier·bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SupportingLine {
    /// Seconds at zero bytes.
    pub intercept: f64,
    /// Seconds per byte, at least 0.
    pub multiplier: f64,
    /// Weighted bytes of the smallest assignment, up to rounding.
    pub bytes_min: f64,
}

impl SupportingLine {
    /// The line at a multiplier over the assignments of several tables, with these weights on the later rows of each: one
    /// elimination of each table. `None` without any assignment.
    pub(crate) fn at_multiplier<'a>(
        tables: impl Iterator<Item = &'a WeightedTable>,
        weights: RowWeights,
        multiplier: f64,
    ) -> Option<SupportingLine> {
        let minimum = |table: &WeightedTable| {
            Some(table.cheapest(1.0, multiplier, weights)?.value(multiplier))
        };
        let minimum = tables.filter_map(minimum).min_by(f64::total_cmp)?;
        Some(SupportingLine { intercept: minimum * (1.0 - ROUNDING), multiplier, bytes_min: 0.0 })
    }
}

/// Costs with a smaller relative difference are equal.
const ROUNDING: f64 = 1e-12;
/// A relative multiplier too low to change the fastest time, and high enough to choose the smallest of the fastest
/// assignments.
const TINY_MULTIPLIER: f64 = 1e-13;

/// A hull over the assignments of several tables.
#[derive(Clone, Debug)]
pub(crate) struct Hull {
    weighted_tables: Vec<Arc<WeightedTable>>,
    weights: RowWeights,
    /// From the fastest to the smallest: times rise, bytes fall.
    vertices: Vec<Vertex>,
    /// For each edge, whether no vertex lies below it.
    is_final: Vec<bool>,
    /// For each table, the minimum of time + λ·bytes at the multipliers λ so far.
    minima: Vec<Vec<(f64, f64)>>,
    eliminations: u64,
}

impl Hull {
    /// The two extreme vertices of the hull, with these weights on the later rows of each table. `None` without
    /// any assignment.
    pub(crate) fn new(
        weighted_tables: Vec<Arc<WeightedTable>>,
        weights: RowWeights,
    ) -> Option<Hull> {
        let minima = vec![vec![]; weighted_tables.len()];
        let (vertices, is_final) = (vec![], vec![]);
        let mut hull =
            Hull { weighted_tables, weights, vertices, is_final, minima, eliminations: 0 };
        let fastest = hull.cheapest(1.0, 0.0)?;
        // The smallest of the fastest assignments, up to the resolution of a tiny multiplier of bytes.
        let fastest =
            hull.cheapest(1.0, TINY_MULTIPLIER * fastest.time / fastest.bytes.max(1.0))?;
        // The fastest of the smallest assignments, up to the resolution of a tiny multiplier of time.
        let per_second = 1e-9 * fastest.bytes.max(1.0) / fastest.time.max(f64::MIN_POSITIVE);
        let smallest = hull.cheapest(per_second, 1.0)?;
        hull.vertices = vec![fastest];
        if smallest.bytes < hull.vertices[0].bytes {
            hull.vertices.push(Vertex { id: VertexId(1), ..smallest });
            hull.is_final.push(false);
        }
        Some(hull)
    }

    /// Number of eliminations so far, with those whose vertices were known.
    pub(crate) fn eliminations(&self) -> u64 {
        self.eliminations
    }

    /// The known vertices, from the fastest to the smallest.
    pub(crate) fn vertices(&self) -> &[Vertex] {
        &self.vertices
    }

    /// Refines the hull until the edge over `bytes` is final.
    pub(crate) fn refine(&mut self, bytes: f64) {
        while let Some(edge) = self.edge_over(bytes).filter(|edge| !self.is_final[*edge]) {
            self.split(edge);
        }
    }

    /// Refines the hull until every edge is final.
    pub(crate) fn refine_all(&mut self) {
        while let Some(edge) = self.is_final.iter().position(|is_final| !is_final) {
            self.split(edge);
        }
    }

    /// The line through the edge over `bytes`, or through the nearest vertex where no edge is over them.
    pub(crate) fn supporting_line(&mut self, bytes: f64) -> SupportingLine {
        let (fastest, smallest) = (&self.vertices[0], &self.vertices[self.vertices.len() - 1]);
        // The smallest vertex is exact up to the resolution of a tiny multiplier of time.
        let bytes_min = smallest.bytes * (1.0 - 1e-6);
        if bytes >= fastest.bytes || self.vertices.len() == 1 {
            let intercept = fastest.time * (1.0 - ROUNDING);
            return SupportingLine { intercept, multiplier: 0.0, bytes_min };
        }
        let bytes = bytes.max(smallest.bytes);
        self.refine(bytes);
        let edge = self.edge_over(bytes).expect("the vertices span these bytes");
        let multiplier = self.multiplier(edge);
        let intercept = self.vertices[edge].value(multiplier) * (1.0 - ROUNDING);
        SupportingLine { intercept, multiplier, bytes_min }
    }

    fn edge_over(&self, bytes: f64) -> Option<usize> {
        (0..self.is_final.len())
            .find(|e| self.vertices[*e].bytes >= bytes && bytes >= self.vertices[e + 1].bytes)
    }

    /// The multiplier of bytes at which both ends of an edge cost the same, in seconds.
    fn multiplier(&self, edge: usize) -> f64 {
        let (fast, small) = (&self.vertices[edge], &self.vertices[edge + 1]);
        (small.time - fast.time) / (fast.bytes - small.bytes)
    }

    /// Inserts a vertex below an edge, or marks the edge as final.
    fn split(&mut self, edge: usize) {
        let (fast, small) = (&self.vertices[edge], &self.vertices[edge + 1]);
        let multiplier = self.multiplier(edge);
        let (value_max, between) =
            (fast.value(multiplier) * (1.0 - ROUNDING), small.bytes..fast.bytes);
        let below = self.cheapest(1.0, multiplier).filter(|vertex| {
            vertex.value(multiplier) < value_max
                && vertex.bytes < between.end
                && vertex.bytes > between.start
        });
        match below {
            None => self.is_final[edge] = true,
            Some(vertex) => {
                let id = VertexId(self.vertices.len() as u32);
                self.vertices.insert(edge + 1, Vertex { id, ..vertex });
                self.is_final.insert(edge, false);
            }
        }
    }

    /// The cheapest assignment of all tables. The minimum of a table is concave in the multiplier, so between
    /// two multipliers it lies above their chord: a table whose chord is no better than another table's
    /// minimum is left out.
    fn cheapest(&mut self, per_second: f64, per_byte: f64) -> Option<Vertex> {
        let multiplier = per_byte / per_second;
        let mut best: Option<(f64, Vertex)> = None;
        for table in 0..self.weighted_tables.len() {
            let attained = best.as_ref().map_or(f64::INFINITY, |(value, _)| *value);
            if per_second * chord(&self.minima[table], multiplier) >= attained {
                continue;
            }
            self.eliminations += 1;
            let Some(vertex) =
                self.weighted_tables[table].cheapest(per_second, per_byte, self.weights)
            else {
                continue;
            };
            let value = per_second * vertex.time + per_byte * vertex.bytes;
            if multiplier.is_finite() {
                let minima = &mut self.minima[table];
                let at = minima.partition_point(|(other, _)| *other < multiplier);
                minima.insert(at, (multiplier, value / per_second));
            }
            if value < attained {
                best = Some((value, Vertex { table, ..vertex }));
            }
        }
        best.map(|(_, vertex)| vertex)
    }
}

/// Lower bound at a multiplier on a concave, non-decreasing function with these values.
pub(crate) fn chord(values: &[(f64, f64)], multiplier: f64) -> f64 {
    let after = values.partition_point(|(other, _)| *other < multiplier);
    match (after.checked_sub(1).map(|before| values[before]), values.get(after)) {
        (Some((low, from)), Some(&(high, to))) if high > low => {
            from + (to - from) * (multiplier - low) / (high - low)
        }
        (Some((_, from)), _) => from,
        (None, _) => f64::NEG_INFINITY,
    }
}
