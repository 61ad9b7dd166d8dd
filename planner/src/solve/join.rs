//! Joins the tables around an eliminated variable, once for any costs.
//!
//! The elimination of `v` with neighbours `N` leaves a table over `N`. A cell is stored only if some value of
//! `v` is compatible with it and with the tables so far; these values are the *entries* of the cell. An entry
//! holds its value of `v` and one cell of every table that mentions `v`, so that an elimination only adds and compares.

use fixedbitset::FixedBitSet;

use super::constraint_graph::ConstraintGraph;
use super::outcome::SolveError;

/// Largest number of cells of one table, stored or not.
const CELLS_MAX: f64 = (1 << 22) as f64;
/// Largest number of entries of one elimination.
const ENTRIES_MAX: usize = 1 << 24;

/// Index of no cell.
const NONE: u32 = u32::MAX;

/// The elimination of one variable.
#[derive(Clone, Debug)]
pub(super) struct Elimination {
    /// The variable.
    pub node: usize,
    /// Earlier eliminations whose tables mention the variable.
    pub children: Vec<usize>,
    /// First cell of the table it leaves, among the cells of all eliminations.
    pub base: usize,
    /// For each cell of the table it leaves, the index of its first entry; then the number of entries.
    pub starts: Vec<u32>,
    /// The value of the variable of each entry.
    pub values: Vec<u32>,
    /// For each entry and child, the child's cell among the cells of all eliminations.
    pub cells: Vec<u32>,
}

impl Elimination {
    /// Cells of an entry, one for each child.
    pub(super) fn below(&self, entry: usize) -> &[u32] {
        &self.cells[entry * self.children.len()..(entry + 1) * self.children.len()]
    }
}

/// Index of the cells of a table.
struct CellIndex {
    scope: Vec<usize>,
    /// The number of each cell, by the values of the scope, the last variable fastest.
    cell: Vec<u32>,
}

/// An earlier table to join: its strides for each scope variable, and for the variable to eliminate.
struct JoinedTable<'a> {
    strides: Vec<usize>,
    own: usize,
    index: &'a CellIndex,
}

/// Eliminates all variables in order. Also returns the number of cells of all tables.
pub(super) fn eliminations(
    graph: &ConstraintGraph,
    order: Vec<(usize, Vec<usize>)>,
) -> Result<(Vec<Elimination>, usize), SolveError> {
    let mut eliminations: Vec<Elimination> = vec![];
    let mut open: Vec<(usize, CellIndex)> = vec![];
    let mut relation_open = vec![true; graph.relations.len()];
    let mut base = 0;
    for (node, scope) in order {
        let cells: f64 = scope.iter().map(|&n| graph.sizes[n] as f64).product();
        if cells > CELLS_MAX {
            return Err(SolveError::TooWide { cells, max: CELLS_MAX });
        }
        let (children, kept): (Vec<_>, Vec<_>) =
            open.into_iter().partition(|(_, index)| index.scope.contains(&node));
        open = kept;
        // Values of each scope variable that go with each value of the node.
        let mut partners: Vec<Option<&[FixedBitSet]>> = vec![None; scope.len()];
        for (i, relation) in graph.relations.iter().enumerate() {
            let Some(end) = relation.endpoints.iter().position(|&end| end == node) else {
                continue;
            };
            if std::mem::take(&mut relation_open[i]) {
                let other = relation.endpoints[1 - end];
                let at =
                    scope.iter().position(|&n| n == other).expect("the other end is a neighbour");
                partners[at] = Some(&relation.compatible[end]);
            }
        }
        let join = Join { graph, node, scope: &scope, partners, base };
        let (elimination, cell) = join.run(&children)?;
        base += elimination.starts.len() - 1;
        open.push((eliminations.len(), CellIndex { scope, cell }));
        eliminations.push(elimination);
    }
    Ok((eliminations, base))
}

/// The join of all tables and relations that mention one variable.
struct Join<'a> {
    graph: &'a ConstraintGraph,
    node: usize,
    scope: &'a [usize],
    partners: Vec<Option<&'a [FixedBitSet]>>,
    base: usize,
}

/// Entries so far, in the order of the variable's values.
#[derive(Default)]
struct JoinEntries {
    values: Vec<u32>,
    at: Vec<u32>,
    cells: Vec<u32>,
}

impl Join<'_> {
    fn run(&self, children: &[(usize, CellIndex)]) -> Result<(Elimination, Vec<u32>), SolveError> {
        let sizes = &self.graph.sizes;
        let stride = |scope: &[usize], node: usize| -> usize {
            let at = scope.iter().position(|&n| n == node);
            at.map_or(0, |at| scope[at + 1..].iter().map(|&n| sizes[n]).product())
        };
        let parts: Vec<JoinedTable> = children
            .iter()
            .map(|(_, index)| JoinedTable {
                strides: self.scope.iter().map(|&n| stride(&index.scope, n)).collect(),
                own: stride(&index.scope, self.node),
                index,
            })
            .collect();
        let mut entries = JoinEntries::default();
        for value in 0..sizes[self.node] {
            if self.graph.allowed.get(self.node).is_some_and(|allowed| !allowed.contains(value)) {
                continue;
            }
            let mut offsets: Vec<usize> = parts.iter().map(|part| part.own * value).collect();
            self.extend(value, 0, 0, &parts, &mut offsets, &mut entries);
            if entries.values.len() > ENTRIES_MAX {
                let cells = entries.values.len() as f64;
                return Err(SolveError::TooWide { cells, max: ENTRIES_MAX as f64 });
            }
        }
        let children = children.iter().map(|(child, _)| *child).collect();
        Ok(self.sorted(entries, children))
    }

    /// Extends a partial tuple of the scope from its variable `depth` on.
    fn extend(
        &self,
        value: usize,
        depth: usize,
        at: usize,
        parts: &[JoinedTable],
        offsets: &mut [usize],
        entries: &mut JoinEntries,
    ) {
        if depth == self.scope.len() {
            let cells = parts.iter().zip(&*offsets).map(|(part, &at)| part.index.cell[at]);
            let before = entries.cells.len();
            entries.cells.extend(cells);
            if entries.cells[before..].contains(&NONE) {
                entries.cells.truncate(before);
            } else {
                entries.values.push(value as u32);
                entries.at.push(at as u32);
            }
            return;
        }
        let size = self.graph.sizes[self.scope[depth]];
        let mut step = |other: usize| {
            let steps = || parts.iter().map(|part| part.strides[depth] * other);
            offsets.iter_mut().zip(steps()).for_each(|(offset, step)| *offset += step);
            self.extend(value, depth + 1, at * size + other, parts, offsets, entries);
            offsets.iter_mut().zip(steps()).for_each(|(offset, step)| *offset -= step);
        };
        match self.partners[depth] {
            Some(partners) => partners[value].ones().for_each(&mut step),
            None => (0..size).for_each(&mut step),
        }
    }

    /// Sorts the entries by cell; also returns the number of each cell.
    fn sorted(&self, entries: JoinEntries, children: Vec<usize>) -> (Elimination, Vec<u32>) {
        let dense: usize = self.scope.iter().map(|&n| self.graph.sizes[n]).product();
        let mut count = vec![0_u32; dense];
        entries.at.iter().for_each(|&at| count[at as usize] += 1);
        let mut starts = vec![0];
        // The position of the next entry of each cell, and the number of each cell.
        let mut next = vec![0_u32; dense];
        let mut cell = vec![NONE; dense];
        let mut total = 0;
        for (at, &count) in count.iter().enumerate().filter(|(_, count)| **count > 0) {
            cell[at] = (self.base + starts.len() - 1) as u32;
            next[at] = total;
            total += count;
            starts.push(total);
        }
        let width = children.len();
        let mut values = vec![0; entries.values.len()];
        let mut cells = vec![0; entries.cells.len()];
        for (entry, &at) in entries.at.iter().enumerate() {
            let to = next[at as usize] as usize;
            next[at as usize] += 1;
            values[to] = entries.values[entry];
            let (from, to) = (entry * width, to * width);
            cells[to..to + width].copy_from_slice(&entries.cells[from..from + width]);
        }
        (Elimination { node: self.node, children, base: self.base, starts, values, cells }, cell)
    }
}
