//! The tokens of a step that a device computes on.

use std::ops::Range;

use narrows_plan::{Axis, Context, Dim};

use super::coordinates::MeshCoordinates;
use super::position_runs::PositionRuns;

/// The tokens of a microbatch that the rows of a buffer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRows {
    /// Number of sequences.
    pub sequences: usize,
    /// Positions of each sequence.
    pub positions: PositionRuns,
    /// First sequence, counted from the first of the microbatch.
    pub first_sequence: usize,
}

impl TokenRows {
    /// The tokens of a buffer of `rows` rows: those at the device's place of the context axis, their shard along the
    /// tensor axis, or the whole microbatch.
    pub fn of_device(context: &Context, coordinates: &MeshCoordinates, rows: u64) -> TokenRows {
        let work = &context.workload;
        let whole = TokenRows {
            sequences: work.micro_batch as usize,
            positions: PositionRuns::consecutive(0, work.sequence_length as usize),
            first_sequence: 0,
        };
        if rows == work.tokens() {
            return whole;
        }
        let place = coordinates.position(Axis::Context, &context.mesh) as usize;
        let whole = TokenRows { positions: PositionRuns::at_place(context, place), ..whole };
        if rows == context.tokens() {
            return whole;
        }
        let (devices, index) = (context.tensor_size() as usize, coordinates.tensor as usize);
        match context.token_dim() {
            Some(Dim::Position) => {
                let count = whole.positions.count / devices;
                let positions = whole.positions.rows(count * index..count * (index + 1));
                TokenRows { positions, ..whole }
            }
            _ => {
                let sequences = whole.sequences / devices;
                TokenRows { sequences, first_sequence: sequences * index, ..whole }
            }
        }
    }

    /// For each run of positions of each sequence, its range among the ids of a step, in the order of the rows.
    pub fn id_ranges(
        &self,
        context: &Context,
        coordinates: &MeshCoordinates,
        microbatch: u64,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let (work, rows) = (context.workload, *self);
        let microbatches = work.microbatches(&context.mesh);
        let first =
            (coordinates.batch_part(&context.mesh) * microbatches + microbatch) * work.micro_batch;
        let length = work.sequence_length as usize;
        (0..rows.sequences).flat_map(move |row| {
            let start = (first as usize + rows.first_sequence + row) * length;
            rows.positions.runs().map(move |run| start + run.start..start + run.end)
        })
    }
}
