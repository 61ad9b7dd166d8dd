//! Positions of the rows of a sequence: one run of consecutive positions, or two.

use std::ops::Range;

use narrows_plan::Context;

/// Positions of each sequence of a buffer, in the order of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PositionRuns {
    /// Position of the first row.
    pub first: usize,
    /// Number of rows.
    pub count: usize,
    /// First row of the second run; `count` where there is none.
    pub second_row: usize,
    /// Positions between the two runs.
    pub gap: usize,
}

impl PositionRuns {
    /// One run.
    pub const fn consecutive(first: usize, count: usize) -> PositionRuns {
        PositionRuns { first, count, second_row: count, gap: 0 }
    }

    /// The positions at one place of the context axis. The order of positions is defined here alone.
    pub fn at_place(context: &Context, place: usize) -> PositionRuns {
        let count = context.positions() as usize;
        if !context.has_zigzag_positions() {
            return PositionRuns::consecutive(place * count, count);
        }
        let (chunk, places) = (count / 2, context.mesh.context as usize);
        // Chunk `place` from the front, and chunk `place` from the back.
        let gap = 2 * (places - 1 - place) * chunk;
        PositionRuns { first: place * chunk, count, second_row: chunk, gap }
    }

    /// Position of a row.
    #[inline(always)]
    pub fn position(&self, row: usize) -> usize {
        self.first + row + if row < self.second_row { 0 } else { self.gap }
    }

    /// Some of the rows.
    pub fn rows(&self, rows: Range<usize>) -> PositionRuns {
        let count = rows.len();
        let second_row = match self.second_row.checked_sub(rows.start) {
            Some(second_row) if second_row > 0 => second_row.min(count),
            _ => count,
        };
        PositionRuns { first: self.position(rows.start), count, second_row, gap: self.gap }
    }

    /// The positions of each run.
    pub fn runs(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let second = self.first + self.second_row + self.gap;
        let runs = [
            self.first..self.first + self.second_row,
            second..second + self.count - self.second_row,
        ];
        runs.into_iter().filter(|run| !run.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use narrows_plan::{ContextAttention, Mesh, Precision, Workload, Zero};

    use super::*;

    #[test]
    fn queries_that_stay_are_in_zigzag_order() {
        let mesh = Mesh { tensor: 1, pipeline: 1, data: 1, context: 3 };
        let workload = Workload { global_batch: 1, sequence_length: 12, micro_batch: 1 };
        let context = Context::new(mesh, workload, Precision::Fp32, Zero::Off);
        let positions = |attention, place| -> Vec<usize> {
            let context = Context { context_attention: attention, ..context };
            let at_place = PositionRuns::at_place(&context, place);
            let rows: Vec<usize> = (0..at_place.count).map(|row| at_place.position(row)).collect();
            assert_eq!(rows, at_place.runs().flatten().collect::<Vec<_>>());
            for (first, end) in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 4), (2, 4), (3, 4), (0, 4)] {
                let part = at_place.rows(first..end);
                assert_eq!(part.runs().flatten().collect::<Vec<_>>(), rows[first..end]);
            }
            rows
        };
        assert_eq!(positions(ContextAttention::Exchange, 1), [4, 5, 6, 7]);
        let zigzag = [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]];
        for (place, expected) in zigzag.into_iter().enumerate() {
            for attention in [ContextAttention::Gather, ContextAttention::Ring] {
                assert_eq!(positions(attention, place), expected);
            }
        }
    }
}
