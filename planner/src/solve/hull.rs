//! The lower convex hull of time against bytes, refined where it is asked for.
//!
//! Its vertices are the assignments that are cheapest for some price of a byte:
//!
//! ```text
//! minimise  time + λ·bytes,   λ ≥ 0
//! ```
//! Each λ is one sweep of the elimination, where a point of the full front needs an integer program.
//! Many blocks that share a budget mix the two vertices around their average bytes, and the line
//! between these bounds every mix from below; so only the edge over that average must be known.

use std::sync::Arc;

use narrows_cost_model::{Assignment, CostTable, MemoryRowId};

use super::SolveError;
use super::eliminate::{EliminationOrder, times};

/// A table made ready for many sweeps. Its rows are counted, not limited.
#[derive(Clone, Debug)]
pub struct Sweeper {
    plan: Arc<EliminationOrder>,
    times: Vec<Vec<f64>>,
    /// By row, node and choice.
    bytes: Vec<Vec<Vec<f64>>>,
}

/// An assignment with its time and its weighted bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Vertex {
    /// Its time in seconds.
    pub time: f64,
    /// The bytes of its rows, weighted.
    pub bytes: f64,
    /// Which table it belongs to, for hulls over several.
    pub table: usize,
    /// The assignment that attains both.
    pub assignment: Assignment,
}

impl Sweeper {
    /// Prepares a table.
    pub fn new(table: &CostTable) -> Result<Sweeper, SolveError> {
        Ok(Sweeper::with_order(table, Arc::new(EliminationOrder::new(table)?)))
    }

    /// Prepares a table with the plan of one that has the same links.
    pub fn with_order(table: &CostTable, plan: Arc<EliminationOrder>) -> Sweeper {
        let rows = 0..table.rows.len() as u32;
        let bytes = rows.map(|row| bytes_of(table, MemoryRowId(row))).collect();
        Sweeper { plan, times: times(table), bytes }
    }

    /// By node and choice: Σ weightᵣ·bytesᵣ.
    fn weighted(&self, weights: &[f64]) -> Vec<Vec<f64>> {
        let bytes = |node: usize, choice: usize| {
            weights.iter().zip(&self.bytes).map(|(w, row)| w * row[node][choice]).sum()
        };
        let of = |(node, times): (usize, &Vec<f64>)| {
            (0..times.len()).map(|choice| bytes(node, choice)).collect()
        };
        self.times.iter().enumerate().map(of).collect()
    }

    /// The assignment that minimises `per_second`·time + `per_byte`·bytes.
    fn cheapest(&self, per_second: f64, per_byte: f64, bytes: &[Vec<f64>]) -> Option<Vertex> {
        let costs: Vec<Vec<f64>> = self
            .times
            .iter()
            .zip(bytes)
            .map(|(times, bytes)| {
                let cost = |(time, bytes): (&f64, &f64)| per_second * time + per_byte * bytes;
                times.iter().zip(bytes).map(cost).collect()
            })
            .collect();
        let assignment = self.plan.cheapest(&costs)?.assignment;
        let sum = |of: &[Vec<f64>]| -> f64 {
            assignment.iter().zip(of).map(|(&choice, of)| of[choice as usize]).sum()
        };
        Some(Vertex { time: sum(&self.times), bytes: sum(bytes), table: 0, assignment })
    }
}

fn bytes_of(table: &CostTable, row: MemoryRowId) -> Vec<Vec<f64>> {
    let of = |choice: &narrows_cost_model::TableChoice| {
        choice.bytes.iter().filter(|(r, _)| *r == row).map(|(_, bytes)| bytes.as_f64()).sum()
    };
    table.nodes.iter().map(|node| node.choices.iter().map(of).collect()).collect()
}

/// Two costs closer than this, relatively, are the same.
const ROUNDING: f64 = 1e-12;
/// A price too low to change which assignments are fastest, and high enough to tell them apart.
const TINY: f64 = 1e-13;

/// A hull over the assignments of several tables.
#[derive(Clone, Debug)]
pub struct Hull {
    sweepers: Vec<Arc<Sweeper>>,
    /// For each table, the weighted bytes by node and choice.
    bytes: Vec<Vec<Vec<f64>>>,
    /// From the fastest to the smallest; times rise, bytes fall.
    vertices: Vec<Vertex>,
    /// For each edge, whether no vertex lies below it.
    known: Vec<bool>,
    /// For each table, the least of time + λ·bytes at the prices λ swept so far.
    values: Vec<Vec<(f64, f64)>>,
    sweeps: u64,
}

impl Hull {
    /// The two ends of the hull; `weights` are those of the rows. `None` without any assignment.
    pub fn new(sweepers: Vec<Arc<Sweeper>>, weights: &[f64]) -> Option<Hull> {
        let values = vec![vec![]; sweepers.len()];
        let (vertices, known) = (vec![], vec![]);
        let bytes = sweepers.iter().map(|sweeper| sweeper.weighted(weights)).collect();
        let mut hull = Hull { sweepers, bytes, vertices, known, values, sweeps: 0 };
        let fastest = hull.cheapest(1.0, 0.0)?;
        // The least bytes among the fastest, as far as a tiny price of bytes can tell.
        let fastest = hull.cheapest(1.0, TINY * fastest.time / fastest.bytes.max(1.0))?;
        // The least time among the smallest, as far as a tiny price of time can tell.
        let per_second = 1e-9 * fastest.bytes.max(1.0) / fastest.time.max(f64::MIN_POSITIVE);
        let smallest = hull.cheapest(per_second, 1.0)?;
        hull.vertices = vec![fastest];
        if smallest.bytes < hull.vertices[0].bytes {
            hull.vertices.push(smallest);
            hull.known.push(false);
        }
        Some(hull)
    }

    /// Sweeps run so far.
    pub fn sweeps(&self) -> u64 {
        self.sweeps
    }

    /// The vertices known so far, from the fastest to the smallest.
    pub fn vertices(&self) -> &[Vertex] {
        &self.vertices
    }

    /// Makes the edge over `bytes` known.
    pub fn refine(&mut self, bytes: f64) {
        while let Some(edge) = self.edge_over(bytes).filter(|edge| !self.known[*edge]) {
            self.split(edge);
        }
    }

    /// Makes every edge known.
    pub fn refine_all(&mut self) {
        while let Some(edge) = self.known.iter().position(|known| !known) {
            self.split(edge);
        }
    }

    fn edge_over(&self, bytes: f64) -> Option<usize> {
        (0..self.known.len())
            .find(|e| self.vertices[*e].bytes >= bytes && bytes >= self.vertices[e + 1].bytes)
    }

    /// Finds a vertex below an edge, or that there is none.
    fn split(&mut self, edge: usize) {
        let (fast, small) = (self.vertices[edge].clone(), self.vertices[edge + 1].clone());
        let price = (small.time - fast.time) / (fast.bytes - small.bytes);
        let value = |vertex: &Vertex| vertex.time + price * vertex.bytes;
        let below = self.cheapest(1.0, price).filter(|vertex| {
            value(vertex) < value(&fast) * (1.0 - ROUNDING)
                && vertex.bytes < fast.bytes
                && vertex.bytes > small.bytes
        });
        match below {
            None => self.known[edge] = true,
            Some(vertex) => {
                self.vertices.insert(edge + 1, vertex);
                self.known.insert(edge, false);
            }
        }
    }

    /// The cheapest assignment of all tables. The least cost of a table is concave in the price, so
    /// between two prices it lies above their chord: a table whose chord is no better than what
    /// another has attained is not swept.
    fn cheapest(&mut self, per_second: f64, per_byte: f64) -> Option<Vertex> {
        let price = per_byte / per_second;
        let mut best: Option<(f64, Vertex)> = None;
        for table in 0..self.sweepers.len() {
            let attained = best.as_ref().map_or(f64::INFINITY, |(value, _)| *value);
            if per_second * chord(&self.values[table], price) >= attained {
                continue;
            }
            self.sweeps += 1;
            let Some(found) =
                self.sweepers[table].cheapest(per_second, per_byte, &self.bytes[table])
            else {
                continue;
            };
            let value = per_second * found.time + per_byte * found.bytes;
            if price.is_finite() {
                let known = &mut self.values[table];
                let at = known.partition_point(|(other, _)| *other < price);
                known.insert(at, (price, value / per_second));
            }
            if value < attained {
                best = Some((value, Vertex { table, ..found }));
            }
        }
        best.map(|(_, vertex)| vertex)
    }
}

/// What a concave function with these values at least has at a price; below the first and above
/// the last nothing is known but that it does not fall.
fn chord(values: &[(f64, f64)], price: f64) -> f64 {
    let after = values.partition_point(|(other, _)| *other < price);
    match (after.checked_sub(1).map(|before| values[before]), values.get(after)) {
        (Some((low, from)), Some(&(high, to))) if high > low => {
            from + (to - from) * (price - low) / (high - low)
        }
        (Some((_, from)), _) => from,
        (None, _) => f64::NEG_INFINITY,
    }
}
