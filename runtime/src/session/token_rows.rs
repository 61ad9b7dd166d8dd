//! The tokens of a step that a device computes on.

use std::ops::Range;

use narrows_plan::{Axis, Context, Dim};

use super::coordinates::MeshCoordinates;

/// The tokens of a microbatch that the rows of a buffer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRows {
    /// Number of sequences.
    pub sequences: usize,
    /// Positions of each sequence.
    pub positions: usize,
    /// First sequence, counted from the first of the microbatch.
    pub first_sequence: usize,
    /// First position.
    pub first_position: usize,
}

impl TokenRows {
    /// The tokens of a buffer of `rows` rows: those at the device's place of the context axis, their shard along the
    /// tensor axis, or the whole microbatch.
    pub fn of_device(context: &Context, coordinates: &MeshCoordinates, rows: u64) -> TokenRows {
        let work = &context.workload;
        let whole = TokenRows {
            sequences: work.micro_batch as usize,
            positions: work.sequence_length as usize,
            first_sequence: 0,
            first_position: 0,
        };
        if rows == work.tokens() {
            return whole;
        }
        let positions = context.positions() as usize;
        let place = coordinates.position(Axis::Context, &context.mesh) as usize;
        let whole = TokenRows { positions, first_position: positions * place, ..whole };
        if rows == context.tokens() {
            return whole;
        }
        let (devices, index) = (context.tensor_size() as usize, coordinates.tensor as usize);
        match context.token_dim() {
            Some(Dim::Position) => {
                let positions = whole.positions / devices;
                let first_position = whole.first_position + positions * index;
                TokenRows { positions, first_position, ..whole }
            }
            _ => {
                let sequences = whole.sequences / devices;
                TokenRows { sequences, first_sequence: sequences * index, ..whole }
            }
        }
    }

    /// For each sequence, the range of its positions among the ids of a step.
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
        (0..rows.sequences).map(move |row| {
            let sequence = first as usize + rows.first_sequence + row;
            let start = sequence * length + rows.first_position;
            start..start + rows.positions
        })
    }
}
