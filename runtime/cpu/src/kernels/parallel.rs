//! Divides the rows of a kernel's operands among tasks.
//!
//! The work is a tuple of operands that all have the same rows: views, slices with one number a
//! row, `SharedOperand` for what every task sees whole, `TaskScratch` for scratch memory of which each task gets
//! its own piece, `PartialSums` for a sum over rows. It is split into as many parts as there are threads,
//! and each part goes to a [`SimdBody`], compiled for the machine's vectors. With one thread
//! there is no split and no pool.

use std::num::NonZeroUsize;

use super::simd::{SimdBody, dispatch_simd};
use super::{MatrixView, MatrixViewMut};

/// Below this many numbers a second thread costs more than it saves.
const ELEMENTS_MIN: usize = 1 << 14;

/// How many threads of rayon's current pool a kernel may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parallel(NonZeroUsize);

/// Operands that are divided by rows.
pub trait ParallelRows: Send + Sized {
    /// Numbers in it: what decides whether division pays.
    fn elements(&self) -> usize;

    /// The first `row` rows, for `tasks` tasks, and the others.
    fn split(self, row: usize, tasks: usize) -> (Self, Self);
}

impl Parallel {
    /// The calling thread alone.
    pub const SERIAL: Parallel = Parallel(NonZeroUsize::MIN);

    /// Up to `threads` threads; at least the calling one.
    pub fn new(threads: usize) -> Self {
        Parallel(NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN))
    }

    /// How many threads.
    pub fn threads(self) -> usize {
        self.0.get()
    }

    /// Scratch numbers that a kernel with a sum of `width` numbers over its rows needs.
    pub fn reduction_scratch_elements(self, width: usize) -> usize {
        (self.threads() - 1) * width
    }

    /// Runs `B` on the parts of `work`, which has `rows` rows. Returns the number of parts.
    pub(super) fn for_rows<B: SimdBody<W>, W: ParallelRows>(self, rows: usize, work: W) -> usize {
        let pays = work.elements() >= ELEMENTS_MIN;
        let tasks = if pays { self.threads().min(rows).max(1) } else { 1 };
        fork_join(tasks, rows, work, dispatch_simd::<B, W>);
        tasks
    }

    /// Runs `body` on the parts of `work`, however little the operands hold: each row is much work,
    /// and the body calls what is vectorised.
    pub(super) fn for_expensive_rows<W: ParallelRows>(
        self,
        rows: usize,
        work: W,
        body: impl Fn(W) + Copy + Send + Sync,
    ) -> usize {
        let tasks = self.threads().min(rows).max(1);
        fork_join(tasks, rows, work, body);
        tasks
    }
}

fn fork_join<W: ParallelRows>(
    tasks: usize,
    rows: usize,
    work: W,
    body: impl Fn(W) + Copy + Send + Sync,
) {
    if tasks == 1 {
        return body(work);
    }
    let left = tasks / 2;
    let row = split_row(rows, left, tasks);
    let (first, second) = work.split(row, left);
    rayon::join(
        || fork_join(left, row, first, body),
        || fork_join(tasks - left, rows - row, second, body),
    );
}

/// The share of `left` of `tasks` tasks; of many rows a multiple of 16, so that numbers of one
/// cache line stay together.
fn split_row(rows: usize, left: usize, tasks: usize) -> usize {
    let row = rows * left / tasks;
    if rows >= 64 * tasks { row.next_multiple_of(16) } else { row }
}

impl ParallelRows for MatrixView<'_> {
    fn elements(&self) -> usize {
        self.rows() * self.columns()
    }

    fn split(self, row: usize, _: usize) -> (Self, Self) {
        (self.row_range(0, row), self.row_range(row, self.rows() - row))
    }
}

impl ParallelRows for MatrixViewMut<'_> {
    fn elements(&self) -> usize {
        self.rows() * self.columns()
    }

    fn split(self, row: usize, _: usize) -> (Self, Self) {
        self.split_rows(row)
    }
}

impl<T: Sync> ParallelRows for &[T] {
    fn elements(&self) -> usize {
        self.len()
    }

    fn split(self, row: usize, _: usize) -> (Self, Self) {
        self.split_at(row)
    }
}

impl<T: Send> ParallelRows for &mut [T] {
    fn elements(&self) -> usize {
        self.len()
    }

    fn split(self, row: usize, _: usize) -> (Self, Self) {
        self.split_at_mut(row)
    }
}

/// What every task sees whole.
#[derive(Clone, Copy)]
pub(super) struct SharedOperand<T>(pub T);

impl<T: Copy + Send> ParallelRows for SharedOperand<T> {
    fn elements(&self) -> usize {
        0
    }

    fn split(self, _: usize, _: usize) -> (Self, Self) {
        (self, self)
    }
}

/// The number of the first row of a part.
#[derive(Clone, Copy)]
pub(super) struct FirstRow(pub usize);

impl ParallelRows for FirstRow {
    fn elements(&self) -> usize {
        0
    }

    fn split(self, row: usize, _: usize) -> (Self, Self) {
        (self, FirstRow(self.0 + row))
    }
}

/// The columns of a matrix as rows of the work: for kernels that divide columns.
pub(super) struct ColumnRows<T>(pub T);

impl ParallelRows for ColumnRows<MatrixView<'_>> {
    fn elements(&self) -> usize {
        self.0.elements()
    }

    fn split(self, row: usize, _: usize) -> (Self, Self) {
        let rest = self.0.columns() - row;
        (ColumnRows(self.0.column_range(0, row)), ColumnRows(self.0.column_range(row, rest)))
    }
}

impl ParallelRows for ColumnRows<MatrixViewMut<'_>> {
    fn elements(&self) -> usize {
        self.0.elements()
    }

    fn split(self, row: usize, _: usize) -> (Self, Self) {
        let (left, right) = self.0.split_columns(row);
        (ColumnRows(left), ColumnRows(right))
    }
}

/// Operands of which a row of the work takes `each` rows or columns.
pub(super) struct GroupedRows<T> {
    pub group_size: usize,
    pub operand: T,
}

impl<T: ParallelRows> ParallelRows for GroupedRows<T> {
    fn elements(&self) -> usize {
        self.operand.elements()
    }

    fn split(self, row: usize, tasks: usize) -> (Self, Self) {
        let (left, right) = self.operand.split(row * self.group_size, tasks);
        (GroupedRows { operand: left, ..self }, GroupedRows { operand: right, ..self })
    }
}

/// Scratch memory: `each` numbers for every task.
pub(super) struct TaskScratch<'a> {
    pub elements_per_task: usize,
    pub memory: &'a mut [f32],
}

impl ParallelRows for TaskScratch<'_> {
    fn elements(&self) -> usize {
        0
    }

    fn split(self, _: usize, tasks: usize) -> (Self, Self) {
        let (left, right) = self.memory.split_at_mut(tasks * self.elements_per_task);
        (TaskScratch { memory: left, ..self }, TaskScratch { memory: right, ..self })
    }
}

/// A sum over rows: the first task adds to the target, every other to a piece of scratch memory.
pub(super) struct PartialSums<'a> {
    pub sums: &'a mut [f32],
    spare: &'a mut [f32],
}

impl<'a> PartialSums<'a> {
    /// Lends `target` and `scratch`; after the tasks, [`add_sums`] brings them together.
    pub(super) fn new(target: &'a mut [f32], scratch: &'a mut [f32], parallel: Parallel) -> Self {
        let spare = &mut scratch[..parallel.reduction_scratch_elements(target.len())];
        spare.fill(0.0);
        PartialSums { sums: target, spare }
    }
}

impl ParallelRows for PartialSums<'_> {
    fn elements(&self) -> usize {
        0
    }

    fn split(self, _: usize, tasks: usize) -> (Self, Self) {
        let width = self.sums.len();
        let (left, rest) = self.spare.split_at_mut((tasks - 1) * width);
        let (own, spare) = rest.split_at_mut(width);
        (PartialSums { sums: self.sums, spare: left }, PartialSums { sums: own, spare })
    }
}

/// Adds what `tasks` tasks left in scratch memory to the target, in the order of their rows.
pub(super) fn reduce_partial_sums(target: &mut [f32], scratch: &[f32], tasks: usize) {
    if target.is_empty() {
        return;
    }
    for part in scratch.chunks_exact(target.len()).take(tasks - 1) {
        for (sum, part) in target.iter_mut().zip(part) {
            *sum += part;
        }
    }
}

macro_rules! tuples {
    ($(($($part:ident $at:tt),+))+) => {$(
        impl<$($part: ParallelRows),+> ParallelRows for ($($part,)+) {
            fn elements(&self) -> usize {
                0 $(+ self.$at.elements())+
            }

            fn split(self, row: usize, tasks: usize) -> (Self, Self) {
                let parts = ($(self.$at.split(row, tasks),)+);
                (($(parts.$at.0,)+), ($(parts.$at.1,)+))
            }
        }
    )+};
}

tuples! {
    (A 0)
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::simd::Simd;

    struct Tell;

    type Told<'a> = (FirstRow, &'a mut [f32], PartialSums<'a>);

    impl SimdBody<Told<'_>> for Tell {
        fn run<S: Simd>(work: Told<'_>) {
            tell(work);
        }
    }

    fn tell(
        (FirstRow(first), rows, PartialSums { sums: own, .. }): (
            FirstRow,
            &mut [f32],
            PartialSums<'_>,
        ),
    ) {
        for (at, row) in rows.iter_mut().enumerate() {
            *row = (first + at) as f32;
            own[0] += *row;
            own[1] += 1.0;
        }
    }

    #[test]
    fn every_row_is_met_once_whatever_the_threads() {
        for threads in [1, 2, 3, 5, 8] {
            let parallel = Parallel::new(threads);
            let mut rows = vec![-1.0; 200];
            let mut sums = [10.0, 20.0];
            let mut scratch = vec![f32::NAN; parallel.reduction_scratch_elements(2)];
            let lent = PartialSums::new(&mut sums, &mut scratch, parallel);
            let tasks = parallel.for_expensive_rows(200, (FirstRow(0), &mut rows[..], lent), tell);
            assert_eq!(tasks, threads);
            reduce_partial_sums(&mut sums, &scratch, tasks);
            assert!(rows.iter().enumerate().all(|(at, row)| *row == at as f32));
            assert_eq!(sums, [10.0 + 19_900.0, 220.0]);
        }
    }

    #[test]
    fn no_rows_and_few_rows() {
        let parallel = Parallel::new(4);
        let mut sums = [0.0; 2];
        let mut scratch = [0.0; 6];
        let none = (FirstRow(0), &mut [][..], PartialSums::new(&mut sums, &mut scratch, parallel));
        assert_eq!(parallel.for_expensive_rows(0, none, tell), 1);
        let mut few = [0.0; 3];
        let work = (FirstRow(0), &mut few[..], PartialSums::new(&mut sums, &mut scratch, parallel));
        assert_eq!(parallel.for_rows::<Tell, _>(3, work), 1, "too little to divide");
    }
}
