//! Which tokens of a step a device sees.

use std::ops::Range;

use narrows_plan::Dim;
use narrows_plan::strategy::Context;

use super::MeshCoordinates;

/// Which tokens of a microbatch some rows of a device are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRows {
    /// Sequences.
    pub sequences: usize,
    /// Positions of each.
    pub positions: usize,
    /// The first sequence of the microbatch.
    pub first_sequence: usize,
    /// The first position.
    pub first_position: usize,
}

impl TokenRows {
    /// Those of `rows` rows: all of the microbatch, or the device's part along the tensor axis.
    pub fn of_device(context: &Context, at: &MeshCoordinates, rows: u64) -> TokenRows {
        let work = &context.workload;
        let whole = TokenRows {
            sequences: work.micro_batch as usize,
            positions: work.sequence_length as usize,
            first_sequence: 0,
            first_position: 0,
        };
        if rows == context.tokens() {
            return whole;
        }
        let (devices, me) = (context.tensor() as usize, at.tensor as usize);
        match context.token_dim() {
            Some(Dim::Position) => {
                let positions = whole.positions / devices;
                TokenRows { positions, first_position: positions * me, ..whole }
            }
            _ => {
                let sequences = whole.sequences / devices;
                TokenRows { sequences, first_sequence: sequences * me, ..whole }
            }
        }
    }

    /// Where the positions of each sequence are among the ids of a step.
    pub fn id_ranges(
        &self,
        context: &Context,
        at: &MeshCoordinates,
        microbatch: u64,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let (work, tokens) = (context.workload, *self);
        let microbatches = work.microbatches(&context.mesh);
        let first = (at.data * microbatches + microbatch) * work.micro_batch;
        let length = work.sequence_length as usize;
        (0..tokens.sequences).map(move |row| {
            let sequence = first as usize + tokens.first_sequence + row;
            let from = sequence * length + tokens.first_position;
            from..from + tokens.positions
        })
    }
}
