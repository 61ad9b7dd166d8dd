//! The bytes of the arena that instructions access.

use std::ops::Range;

use crate::launch::{Argument, Launch, MemoryAccess, MemorySpace};
use crate::matmul::Matmul;

/// A range of the arena that an instruction accesses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AccessedRange {
    pub bytes: Range<u64>,
    pub writes: bool,
}

/// Whether two instructions access the same bytes, at least one of them to write.
pub(super) fn conflict(one: &[AccessedRange], other: &[AccessedRange]) -> bool {
    one.iter().any(|a| {
        other.iter().any(|b| {
            (a.writes || b.writes) && a.bytes.start < b.bytes.end && b.bytes.start < a.bytes.end
        })
    })
}

pub(super) fn launch_accesses(launches: &[Launch]) -> Vec<AccessedRange> {
    let arguments = launches.iter().flat_map(|launch| &launch.arguments);
    let spans = arguments.filter_map(|argument| match argument {
        Argument::Pointer(span) if span.memory == MemorySpace::Arena && span.rows > 0 => Some(span),
        _ => None,
    });
    spans
        .map(|span| AccessedRange {
            bytes: span.begin..span.row_range(span.rows - 1).end,
            writes: span.access != MemoryAccess::Read,
        })
        .collect()
}

pub(super) fn matmul_accesses(matmul: &Matmul) -> Vec<AccessedRange> {
    let key = &matmul.key;
    let matrices = [(&key.a, matmul.a, false), (&key.b, matmul.b, false), (&key.c, matmul.c, true)];
    matrices
        .map(|(stored, address, writes)| {
            let columns = stored.columns.saturating_sub(1) * stored.leading_dimension + stored.rows;
            let last_member = key.batch.saturating_sub(1) * stored.batch_stride;
            let bytes = stored.dtype.width() * (columns + last_member);
            AccessedRange { bytes: address.offset..address.offset + bytes, writes }
        })
        .into()
}
