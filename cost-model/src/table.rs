//! The priced search space as numbers: a solver's only input.
//!
//! A [`CostTable`] is a factor graph. Every *node* (an op, or a value's flow from its producer to its consumers) takes
//! exactly one of its *choices*. A *link* makes a choice of one node demand something of the choice of another:
//! layouts must match, a tensor that the backward pass reads must be kept or recomputed. A *row* limits a
//! sum of bytes over all choices.
//!
//! ```text
//! minimise    Σ time[node, choice]
//! subject to  one choice a node
//!             link: demand(choice of `from`) = Some(key)  ⇒  key ∈ offer(choice of `to`)
//!             row:  Σ bytes[row, choice] ≤ limit[row]
//! ```

use narrows_plan::{Bytes, Seconds};

/// Index of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableNodeId(pub u32);

/// Index of a memory row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryRowId(pub u32);

/// One alternative of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct TableChoice {
    /// Share of the choice in the objective. Finite and not negative.
    pub time: Seconds,
    /// Bytes of the choice in each memory row that it touches; each row at most once.
    pub bytes: Vec<(MemoryRowId, Bytes)>,
}

/// A decision with at least one alternative.
#[derive(Clone, Debug, PartialEq)]
pub struct TableNode {
    /// For messages.
    pub name: String,
    /// The alternatives.
    pub choices: Vec<TableChoice>,
}

/// An implication between the choices of two nodes. Keys are numbers below 64, local to the link.
#[derive(Clone, Debug, PartialEq)]
pub struct TableLink {
    /// The node whose choice demands.
    pub from: TableNodeId,
    /// The node whose choice must offer.
    pub to: TableNodeId,
    /// The key that each choice of `from` demands, if any.
    pub demand: Vec<Option<u8>>,
    /// The set of keys that each choice of `to` offers, as a bit mask.
    pub offer: Vec<u64>,
}

/// A limit on a sum of bytes over all choices.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryRow {
    /// The bytes that are limited, for messages.
    pub name: String,
    /// The limit of the sum over all choices.
    pub limit: Bytes,
}

/// The priced search space.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CostTable {
    /// Decisions.
    pub nodes: Vec<TableNode>,
    /// Implications between them.
    pub links: Vec<TableLink>,
    /// Memory limits.
    pub rows: Vec<MemoryRow>,
}

/// One choice for each node, by index.
pub type Assignment = Vec<u32>;

impl CostTable {
    /// The objective of an assignment.
    pub fn time(&self, assignment: &[u32]) -> Seconds {
        self.nodes.iter().zip(assignment).map(|(node, &c)| node.choices[c as usize].time).sum()
    }

    /// The bytes of an assignment in each row.
    pub fn bytes(&self, assignment: &[u32]) -> Vec<Bytes> {
        let mut total = vec![Bytes(0); self.rows.len()];
        for (node, &c) in self.nodes.iter().zip(assignment) {
            for &(row, bytes) in &node.choices[c as usize].bytes {
                total[row.0 as usize] += bytes;
            }
        }
        total
    }

    /// Whether an assignment satisfies every link.
    pub fn is_consistent(&self, assignment: &[u32]) -> bool {
        self.links.iter().all(|link| {
            let demand = link.demand[assignment[link.from.0 as usize] as usize];
            let offer = link.offer[assignment[link.to.0 as usize] as usize];
            demand.is_none_or(|key| offer & (1 << key) != 0)
        })
    }

    /// Whether an assignment satisfies every row.
    pub fn fits(&self, assignment: &[u32]) -> bool {
        self.bytes(assignment).iter().zip(&self.rows).all(|(used, row)| *used <= row.limit)
    }
}
