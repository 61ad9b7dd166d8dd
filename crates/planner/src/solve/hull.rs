//! The lower convex hull of time against the bytes of one row.
//!
//! Its vertices are the assignments that are cheapest for some price of a byte:
//!
//! ```text
//! minimise  time + λ·bytes,   λ ≥ 0
//! ```
//! Each λ is one sweep of the elimination, so a hull costs a few milliseconds where the full front
//! needs an integer program a point. Many blocks that share a budget mix two neighbouring vertices,
//! and the line between them bounds every mix from below.

use narrows_cost_model::CostTable;
use narrows_cost_model::table::{Assignment, RowId};
use narrows_plan::{Bytes, Seconds};

use super::SolveError;
use super::eliminate::{Plan, times};
use super::presolve::presolve;

/// A vertex of the hull.
#[derive(Clone, Debug, PartialEq)]
pub struct Vertex {
    /// Its time.
    pub time: Seconds,
    /// The bytes it uses in the row.
    pub bytes: Bytes,
    /// The assignment that attains both.
    pub assignment: Assignment,
}

/// Two prices closer than this, relatively, are the same.
const ROUNDING: f64 = 1e-12;

/// The hull of a table, the fastest vertex first; empty when no assignment is consistent. Limits of
/// rows are ignored.
pub fn hull(table: &CostTable, row: RowId) -> Result<Vec<Vertex>, SolveError> {
    let mut table = table.clone();
    table.rows.iter_mut().for_each(|row| row.limit = Bytes(u64::MAX));
    let Ok(reduced) = presolve(&table) else { return Ok(vec![]) };
    let search = Search {
        plan: Plan::new(&reduced.table)?,
        times: times(&reduced.table),
        bytes: bytes_of(&reduced.table, row),
    };
    let Some(fastest) = search.cheapest(1.0, 0.0) else { return Ok(vec![]) };
    let Some(smallest) = search.cheapest(0.0, 1.0) else { return Ok(vec![]) };
    let mut points = vec![fastest.clone(), smallest.clone()];
    search.between(&fastest, &smallest, &mut points);
    points.sort_by(|a, b| a.time.total_cmp(&b.time).then(a.bytes.total_cmp(&b.bytes)));
    // The ends may be beaten by a vertex that is as good in one and better in the other.
    let mut least = f64::INFINITY;
    points.retain(|point| {
        let keep = point.bytes < least;
        least = least.min(point.bytes);
        keep
    });
    Ok(points
        .into_iter()
        .map(|point| Vertex {
            time: Seconds(point.time),
            bytes: Bytes(point.bytes as u64),
            assignment: reduced.lift(&point.assignment),
        })
        .collect())
}

fn bytes_of(table: &CostTable, row: RowId) -> Vec<Vec<f64>> {
    let of = |choice: &narrows_cost_model::table::Choice| {
        choice.bytes.iter().filter(|(r, _)| *r == row).map(|(_, bytes)| bytes.as_f64()).sum()
    };
    table.nodes.iter().map(|node| node.choices.iter().map(of).collect()).collect()
}

#[derive(Clone, Debug)]
struct Point {
    time: f64,
    bytes: f64,
    assignment: Assignment,
}

struct Search {
    plan: Plan,
    times: Vec<Vec<f64>>,
    bytes: Vec<Vec<f64>>,
}

impl Search {
    fn cheapest(&self, per_second: f64, per_byte: f64) -> Option<Point> {
        let costs: Vec<Vec<f64>> = self
            .times
            .iter()
            .zip(&self.bytes)
            .map(|(times, bytes)| {
                times.iter().zip(bytes).map(|(t, b)| per_second * t + per_byte * b).collect()
            })
            .collect();
        let assignment = self.plan.cheapest(&costs)?.assignment;
        let sum = |table: &[Vec<f64>]| {
            table.iter().zip(&assignment).map(|(node, &c)| node[c as usize]).sum::<f64>()
        };
        let (time, bytes) = (sum(&self.times), sum(&self.bytes));
        Some(Point { time, bytes, assignment })
    }

    /// Adds every vertex between two.
    fn between(&self, fast: &Point, small: &Point, points: &mut Vec<Point>) {
        let (slower, fewer) = (small.time - fast.time, fast.bytes - small.bytes);
        if slower <= 0.0 || fewer <= 0.0 {
            return;
        }
        let price = slower / fewer;
        let Some(point) = self.cheapest(1.0, price) else { return };
        let value = |point: &Point| point.time + price * point.bytes;
        if value(&point) >= value(fast) * (1.0 - ROUNDING) {
            return;
        }
        points.push(point.clone());
        self.between(fast, &point, points);
        self.between(&point, small, points);
    }
}
