//! What goes together when a variable is removed, found once for any costs.
//!
//! The removal of `v` with neighbours `N` leaves a table over `N`. Of its cells only those are
//! written down that some value of `v` and the tables so far allow, and for each of them the values
//! of `v` that do: its *entries*. An entry names its value of `v` and one cell in every table that
//! mentions `v`; a sweep then only adds and compares.

use super::SolveError;
use super::bits::Bits;
use super::order::ConstraintGraph;

/// The most cells of one table, written down or not.
const CELLS_MAX: f64 = (1 << 22) as f64;
/// The most entries of one removal.
const ENTRIES_MAX: usize = 1 << 24;

/// Not a cell.
const NONE: u32 = u32::MAX;

/// The removal of one variable.
#[derive(Clone, Debug)]
pub(super) struct Elimination {
    /// Which variable.
    pub(super) node: usize,
    /// The earlier removals whose tables mention it.
    pub(super) children: Vec<usize>,
    /// Where the cells of the table it leaves begin, among those of all removals.
    pub(super) base: usize,
    /// For each cell of the table it leaves, where its entries begin; then where they end.
    pub(super) starts: Vec<u32>,
    /// For each entry, the value of the variable.
    pub(super) values: Vec<u32>,
    /// For each entry and child, the child's cell among those of all removals.
    pub(super) cells: Vec<u32>,
}

impl Elimination {
    /// The cells of an entry, one for each child.
    pub(super) fn below(&self, entry: usize) -> &[u32] {
        &self.cells[entry * self.children.len()..(entry + 1) * self.children.len()]
    }
}

/// Where the cells of a table are.
struct CellIndex {
    scope: Vec<usize>,
    /// By the values of the scope, the last fastest: the number of the cell.
    cell: Vec<u32>,
}

/// An earlier table to be joined: how far a step of each scope variable, and of the variable to be
/// removed, moves in it.
struct JoinedTable<'a> {
    strides: Vec<usize>,
    own: usize,
    index: &'a CellIndex,
}

/// Removes all variables in their order. The last value is the number of cells of all tables.
pub(super) fn removals(
    network: &ConstraintGraph,
    order: Vec<(usize, Vec<usize>)>,
) -> Result<(Vec<Elimination>, usize), SolveError> {
    let mut made: Vec<Elimination> = vec![];
    let mut open: Vec<(usize, CellIndex)> = vec![];
    let mut relation_open = vec![true; network.relations.len()];
    let mut base = 0;
    for (node, scope) in order {
        let cells: f64 = scope.iter().map(|&n| network.sizes[n] as f64).product();
        if cells > CELLS_MAX {
            return Err(SolveError::TooWide { cells, max: CELLS_MAX });
        }
        let (children, kept): (Vec<_>, Vec<_>) =
            open.into_iter().partition(|(_, index)| index.scope.contains(&node));
        open = kept;
        // Which values of each scope variable go with each value of the node.
        let mut partners: Vec<Option<&[Bits]>> = vec![None; scope.len()];
        for (i, relation) in network.relations.iter().enumerate() {
            let Some(end) = relation.ends.iter().position(|&end| end == node) else { continue };
            if std::mem::take(&mut relation_open[i]) {
                let other = relation.ends[1 - end];
                let at = scope.iter().position(|&n| n == other).expect("a neighbour");
                partners[at] = Some(&relation.partners[end]);
            }
        }
        let join = Join { network, node, scope: &scope, partners, base };
        let (removal, cell) = join.run(&children)?;
        base += removal.starts.len() - 1;
        open.push((made.len(), CellIndex { scope, cell }));
        made.push(removal);
    }
    Ok((made, base))
}

/// The join of all that mentions one variable.
struct Join<'a> {
    network: &'a ConstraintGraph,
    node: usize,
    scope: &'a [usize],
    partners: Vec<Option<&'a [Bits]>>,
    base: usize,
}

/// The entries found so far, in the order of the variable's values.
#[derive(Default)]
struct JoinEntries {
    values: Vec<u32>,
    at: Vec<u32>,
    cells: Vec<u32>,
}

impl Join<'_> {
    fn run(&self, children: &[(usize, CellIndex)]) -> Result<(Elimination, Vec<u32>), SolveError> {
        let sizes = &self.network.sizes;
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
        let mut found = JoinEntries::default();
        for value in 0..sizes[self.node] {
            if self.network.allowed.get(self.node).is_some_and(|allowed| !allowed.contains(value)) {
                continue;
            }
            let mut offsets: Vec<usize> = parts.iter().map(|part| part.own * value).collect();
            self.extend(value, 0, 0, &parts, &mut offsets, &mut found);
            if found.values.len() > ENTRIES_MAX {
                let cells = found.values.len() as f64;
                return Err(SolveError::TooWide { cells, max: ENTRIES_MAX as f64 });
            }
        }
        let children = children.iter().map(|(child, _)| *child).collect();
        Ok(self.sorted(found, children))
    }

    /// Goes through the values of the scope from its variable `depth` on.
    fn extend(
        &self,
        value: usize,
        depth: usize,
        at: usize,
        parts: &[JoinedTable],
        offsets: &mut [usize],
        found: &mut JoinEntries,
    ) {
        if depth == self.scope.len() {
            let cells = parts.iter().zip(&*offsets).map(|(part, &at)| part.index.cell[at]);
            let before = found.cells.len();
            found.cells.extend(cells);
            if found.cells[before..].contains(&NONE) {
                found.cells.truncate(before);
            } else {
                found.values.push(value as u32);
                found.at.push(at as u32);
            }
            return;
        }
        let size = self.network.sizes[self.scope[depth]];
        let mut step = |other: usize| {
            let steps = || parts.iter().map(|part| part.strides[depth] * other);
            offsets.iter_mut().zip(steps()).for_each(|(offset, step)| *offset += step);
            self.extend(value, depth + 1, at * size + other, parts, offsets, found);
            offsets.iter_mut().zip(steps()).for_each(|(offset, step)| *offset -= step);
        };
        match self.partners[depth] {
            Some(partners) => partners[value].iter().for_each(&mut step),
            None => (0..size).for_each(&mut step),
        }
    }

    /// The entries by cell, and the numbers of the cells.
    fn sorted(&self, found: JoinEntries, children: Vec<usize>) -> (Elimination, Vec<u32>) {
        let dense: usize = self.scope.iter().map(|&n| self.network.sizes[n]).product();
        let mut count = vec![0_u32; dense];
        found.at.iter().for_each(|&at| count[at as usize] += 1);
        let mut starts = vec![0];
        // First where the next entry of each cell goes, then the cells' numbers.
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
        let mut values = vec![0; found.values.len()];
        let mut cells = vec![0; found.cells.len()];
        for (entry, &at) in found.at.iter().enumerate() {
            let to = next[at as usize] as usize;
            next[at as usize] += 1;
            values[to] = found.values[entry];
            let (from, to) = (entry * width, to * width);
            cells[to..to + width].copy_from_slice(&found.cells[from..from + width]);
        }
        (Elimination { node: self.node, children, base: self.base, starts, values, cells }, cell)
    }
}
