//! Parallel-for over the rows of a kernel's operands.
//!
//! The operands are a tuple whose members all have the same number of rows:
//!
//! | operand | what a task gets |
//! |---|---|
//! | [`MatrixView`], [`MatrixViewMut`], slices with an element per row | its rows |
//! | [`ColumnRows`] | its columns, for kernels that divide columns |
//! | [`GroupedRows`] | several rows or columns for each of its rows |
//! | [`SharedOperand`] | the whole operand |
//! | [`FirstRow`] | the index of its first row |
//! | [`TaskScratch`] | a piece of scratch memory |
//! | [`TaskPartialSums`] | a partial result of a reduction over rows |
//!
//! The rows are split recursively into as many tasks as there are threads, and each task runs a
//! [`SimdBody`], compiled for the vectors of the machine. With one thread there is no split and no
//! thread pool.

use std::num::NonZeroUsize;

use super::matrix::{MatrixView, MatrixViewMut};
use super::simd::{SimdBody, dispatch_simd};

/// Grain size: with fewer elements a second thread costs more than it saves.
const PARALLEL_ELEMENTS_MIN: usize = 1 << 14;

/// Number of threads of rayon's current thread pool that a kernel may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parallel(NonZeroUsize);

/// Operands that can be split by rows.
pub(crate) trait ParallelRows: Send + Sized {
    /// Number of elements, which decides whether more than one task pays off.
    fn elements(&self) -> usize;

    /// Splits at a row: the first `row` rows, which `tasks` tasks share, and the remaining ones.
    fn split(self, row: usize, tasks: usize) -> (Self, Self);
}

impl Parallel {
    /// The calling thread alone.
    pub const SERIAL: Parallel = Parallel(NonZeroUsize::MIN);

    /// Up to `threads` threads; 0 means the calling thread alone.
    pub fn new(threads: usize) -> Self {
        Parallel(NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN))
    }

    /// Maximum number of threads.
    pub fn threads(self) -> usize {
        self.0.get()
    }

    /// Scratch elements of a kernel that reduces over its rows to `width` sums.
    pub fn reduction_scratch_elements(self, width: usize) -> usize {
        (self.threads() - 1) * width
    }

    /// Runs `B` on `operands`, split into tasks if they have enough elements. Returns the number of
    /// tasks.
    pub(super) fn for_rows<B: SimdBody<W>, W: ParallelRows>(
        self,
        rows: usize,
        operands: W,
    ) -> usize {
        let is_worth_parallelizing = operands.elements() >= PARALLEL_ELEMENTS_MIN;
        let tasks = if is_worth_parallelizing { self.threads().min(rows).max(1) } else { 1 };
        fork_join(tasks, rows, operands, dispatch_simd::<B, W>);
        tasks
    }

    /// Runs `body` on `operands`, split into tasks however few elements they have: for kernels with
    /// much work per row, whose `body` dispatches SIMD code itself. Returns the number of tasks.
    pub(super) fn for_expensive_rows<W: ParallelRows>(
        self,
        rows: usize,
        operands: W,
        body: impl Fn(W) + Copy + Send + Sync,
    ) -> usize {
        let tasks = self.threads().min(rows).max(1);
        fork_join(tasks, rows, operands, body);
        tasks
    }
}

fn fork_join<W: ParallelRows>(
    tasks: usize,
    rows: usize,
    operands: W,
    body: impl Fn(W) + Copy + Send + Sync,
) {
    if tasks == 1 {
        return body(operands);
    }
    let left_tasks = tasks / 2;
    let row = split_row(rows, left_tasks, tasks);
    let (left, right) = operands.split(row, left_tasks);
    rayon::join(
        || fork_join(left_tasks, row, left, body),
        || fork_join(tasks - left_tasks, rows - row, right, body),
    );
}

/// The row at which `left_tasks` of `tasks` tasks end. With many rows it is a multiple of 16, so that
/// two tasks do not write to the same cache line of a slice with an element per row.
fn split_row(rows: usize, left_tasks: usize, tasks: usize) -> usize {
    let row = rows * left_tasks / tasks;
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

/// An operand that every task sees whole.
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

/// Index of the first row of a task.
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

/// A matrix whose columns count as rows of the loop.
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

/// An operand with `group_size` rows, columns or elements for each row of the loop.
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

/// Scratch memory with `elements_per_task` elements for every task.
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

/// A reduction over rows: the first task adds to the target, every other task to zeroed scratch
/// memory of its own, which [`reduce_partial_sums`] adds to the target afterwards.
pub(super) struct TaskPartialSums<'a> {
    /// The sums that a task adds to.
    pub sums: &'a mut [f32],
    /// The sums of the tasks that will be split off.
    scratch: &'a mut [f32],
}

impl<'a> TaskPartialSums<'a> {
    /// Prepares a reduction to `target`; `scratch` holds
    /// [`reduction_scratch_elements`](Parallel::reduction_scratch_elements) of its length.
    pub(super) fn new(target: &'a mut [f32], scratch: &'a mut [f32], parallel: Parallel) -> Self {
        let scratch = &mut scratch[..parallel.reduction_scratch_elements(target.len())];
        scratch.fill(0.0);
        TaskPartialSums { sums: target, scratch }
    }
}

impl ParallelRows for TaskPartialSums<'_> {
    fn elements(&self) -> usize {
        0
    }

    fn split(self, _: usize, tasks: usize) -> (Self, Self) {
        let width = self.sums.len();
        let (left_scratch, rest) = self.scratch.split_at_mut((tasks - 1) * width);
        let (right_sums, right_scratch) = rest.split_at_mut(width);
        let left = TaskPartialSums { sums: self.sums, scratch: left_scratch };
        (left, TaskPartialSums { sums: right_sums, scratch: right_scratch })
    }
}

/// Adds the partial sums of `tasks` tasks, from the scratch memory of [`TaskPartialSums`], to `target`
/// in the order of their rows.
pub(super) fn reduce_partial_sums(target: &mut [f32], scratch: &[f32], tasks: usize) {
    if target.is_empty() {
        return;
    }
    for partial_sums in scratch.chunks_exact(target.len()).take(tasks - 1) {
        for (sum, partial) in target.iter_mut().zip(partial_sums) {
            *sum += partial;
        }
    }
}

macro_rules! impl_parallel_rows_for_tuples {
    ($(($($member:ident $index:tt),+))+) => {$(
        impl<$($member: ParallelRows),+> ParallelRows for ($($member,)+) {
            fn elements(&self) -> usize {
                0 $(+ self.$index.elements())+
            }

            fn split(self, row: usize, tasks: usize) -> (Self, Self) {
                let halves = ($(self.$index.split(row, tasks),)+);
                (($(halves.$index.0,)+), ($(halves.$index.1,)+))
            }
        }
    )+};
}

impl_parallel_rows_for_tuples! {
    (A 0)
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::simd::Simd;

    struct RowIndexKernel;

    type RowIndexOperands<'a> = (FirstRow, &'a mut [f32], TaskPartialSums<'a>);

    impl SimdBody<RowIndexOperands<'_>> for RowIndexKernel {
        fn run<S: Simd>(operands: RowIndexOperands<'_>) {
            number_rows(operands);
        }
    }

    /// Writes each row's index to it, and reduces to the sum of the indices and the number of rows.
    fn number_rows(
        (FirstRow(first), rows, TaskPartialSums { sums, .. }): (
            FirstRow,
            &mut [f32],
            TaskPartialSums<'_>,
        ),
    ) {
        for (index, row) in rows.iter_mut().enumerate() {
            *row = (first + index) as f32;
            sums[0] += *row;
            sums[1] += 1.0;
        }
    }

    #[test]
    fn every_row_is_visited_once_with_any_number_of_threads() {
        for threads in [1, 2, 3, 5, 8] {
            let parallel = Parallel::new(threads);
            let mut rows = vec![-1.0; 200];
            let mut sums = [10.0, 20.0];
            let mut scratch = vec![f32::NAN; parallel.reduction_scratch_elements(2)];
            let partial = TaskPartialSums::new(&mut sums, &mut scratch, parallel);
            let operands = (FirstRow(0), &mut rows[..], partial);
            let tasks = parallel.for_expensive_rows(200, operands, number_rows);
            assert_eq!(tasks, threads);
            reduce_partial_sums(&mut sums, &scratch, tasks);
            assert!(rows.iter().enumerate().all(|(index, row)| *row == index as f32));
            assert_eq!(sums, [10.0 + 19_900.0, 220.0]);
        }
    }

    #[test]
    fn few_rows_run_as_one_task() {
        let parallel = Parallel::new(4);
        let mut sums = [0.0; 2];
        let mut scratch = [0.0; 6];
        let empty =
            (FirstRow(0), &mut [][..], TaskPartialSums::new(&mut sums, &mut scratch, parallel));
        assert_eq!(parallel.for_expensive_rows(0, empty, number_rows), 1);
        let mut few = [0.0; 3];
        let operands =
            (FirstRow(0), &mut few[..], TaskPartialSums::new(&mut sums, &mut scratch, parallel));
        assert_eq!(parallel.for_rows::<RowIndexKernel, _>(3, operands), 1, "below the grain size");
    }
}
