//! Attention ops with the layout of their operands, and values for them.

use std::ops::Range;

use narrows_cpu::kernels::AttentionShape;
use narrows_plan::kernel::{Attention, Direction};
use narrows_plan::program::Action;
use narrows_plan::{ContextAttention, DType};
use narrows_runtime::session::PositionRuns;

use super::super::case::KernelCase;
use super::super::formats::{random_values, rounded};

pub(super) const FORMATS: [DType; 2] = [DType::Bf16, DType::F32];
/// Which of q, k and v share an operand.
#[derive(Clone, Copy, Debug)]
pub(super) enum OperandSharing {
    All,
    KeysAndValues,
    None,
    QueriesAndKeys,
}

pub(super) const OPERAND_SHARINGS: [OperandSharing; 4] = [
    OperandSharing::All,
    OperandSharing::KeysAndValues,
    OperandSharing::None,
    OperandSharing::QueriesAndKeys,
];

/// An attention op and the layout of its operands.
#[derive(Clone, Debug)]
pub(super) struct AttentionProblem {
    pub(super) op: Attention,
    /// KV heads in the operands; more than the op's where several devices use the same ones.
    pub(super) local_kv_heads: u64,
    /// Number of devices, and index of this one.
    pub(super) devices: (u64, u64),
    /// Place on a context axis of `op.query_parts` devices.
    pub(super) place: u64,
    /// Layout of q, k and v.
    pub(super) operands: OperandSharing,
    /// Scale of q and k.
    pub(super) scale: f32,
}

pub(super) fn problem(
    (sequences, length): (u64, u64),
    (heads, kv_heads, head_dim): (u64, u64, u64),
    input: DType,
) -> AttentionProblem {
    let direction = Direction::Forward;
    let window = None;
    let op = Attention {
        direction,
        sequences,
        length,
        heads,
        kv_heads,
        head_dim,
        input,
        window,
        query_parts: 1,
        ring: None,
    };
    AttentionProblem {
        op,
        local_kv_heads: kv_heads,
        devices: (1, 0),
        place: 0,
        operands: OperandSharing::All,
        scale: 3.0,
    }
}

/// A problem of the queries at a place of a context axis, with the keys of all positions.
pub(super) fn gathered(
    (parts, place, chunk): (u64, u64, u64),
    heads: (u64, u64, u64),
    input: DType,
) -> AttentionProblem {
    let mut gathered = problem((1, 2 * parts * chunk), heads, input);
    gathered.op.query_parts = parts;
    (gathered.place, gathered.operands) = (place, OperandSharing::None);
    gathered
}

/// Values of q, k and v side by side, and of the gradient of the output.
pub(super) struct Values {
    pub(super) all: Vec<f32>,
    pub(super) dout: Vec<f32>,
}

impl AttentionProblem {
    pub(super) fn tokens(&self) -> u64 {
        self.op.sequences * self.op.length
    }

    /// Rows of queries.
    pub(super) fn query_rows(&self) -> u64 {
        self.op.sequences * self.op.queries()
    }

    pub(super) fn positions(&self) -> PositionRuns {
        let context = self.case(Direction::Forward).context;
        PositionRuns::at_place(&context, self.place as usize)
    }

    /// Selects the rows of the queries of a matrix with a row for each token.
    pub(super) fn select_queries(&self, matrix: Vec<f32>) -> Vec<f32> {
        let width = matrix.len() / self.tokens() as usize;
        let positions: Vec<usize> = self.positions().runs().flatten().collect();
        let sequences = matrix.chunks(width * self.op.length as usize);
        let rows = sequences.flat_map(|sequence| {
            positions.iter().flat_map(move |position| &sequence[position * width..][..width])
        });
        rows.copied().collect()
    }

    pub(super) fn shape(&self) -> AttentionShape {
        let Attention { sequences, length, heads, kv_heads, head_dim, .. } = self.op;
        let [sequences, length, heads, kv_heads, head_dim] =
            [sequences, length, heads, kv_heads, head_dim].map(|size| size as usize);
        let window = self.op.window.map_or(length, |window| window as usize);
        let queries = self.positions();
        AttentionShape { sequences, length, queries, heads, kv_heads, head_dim, window }
    }

    /// Columns of all queries, and of all keys.
    pub(super) fn widths(&self) -> [u64; 2] {
        [self.op.heads, self.local_kv_heads].map(|heads| heads * self.op.head_dim)
    }

    /// Columns of q, and of the k and v that are attended to.
    pub(super) fn columns(&self) -> [Range<usize>; 3] {
        let [queries, keys] = self.widths();
        let (devices, at) = self.devices;
        let first = self.op.heads * at * self.local_kv_heads / (self.op.heads * devices);
        let first =
            if self.local_kv_heads > self.op.kv_heads { first * self.op.head_dim } else { 0 };
        let width = self.op.kv_heads * self.op.head_dim;
        [(0, queries), (queries + first, width), (queries + keys + first, width)]
            .map(|(first, count)| first as usize..(first + count) as usize)
    }

    /// Width of each operand.
    pub(super) fn parts(&self) -> Vec<u64> {
        let [queries, keys] = self.widths();
        match self.operands {
            OperandSharing::All => vec![queries + 2 * keys],
            OperandSharing::KeysAndValues => vec![queries, 2 * keys],
            OperandSharing::None => vec![queries, keys, keys],
            OperandSharing::QueriesAndKeys => vec![queries + keys, keys],
        }
    }

    pub(super) fn width(&self) -> u64 {
        self.parts().iter().sum()
    }

    pub(super) fn values(&self) -> Values {
        let mut all = random_values(self.op.length, self.tokens() * self.width());
        let [.., values] = self.columns();
        let keys_end = (self.width() - self.widths()[1]) as usize;
        assert!(values.start >= keys_end);
        for row in all.chunks_mut(self.width() as usize) {
            row[..keys_end].iter_mut().for_each(|x| *x *= self.scale);
        }
        let dout = random_values(self.op.length + 1, self.query_rows() * self.widths()[0]);
        let [all, dout] = [all, dout].map(|values| rounded(self.op.input, values));
        Values { all, dout }
    }

    pub(super) fn case(&self, direction: Direction) -> KernelCase {
        let op = Attention { direction, ..self.op.clone() };
        let tokens = (self.op.sequences, self.op.length);
        let mut case = KernelCase::of(Action::Attention(op), self.devices.0, tokens);
        case.tensor = self.devices.1;
        if self.op.query_parts > 1 {
            case.context.mesh.context = self.op.query_parts;
            case.context.context_attention = ContextAttention::Gather;
            case.replica = self.place;
        }
        case
    }

    /// Selects columns of a matrix of q, k and v.
    pub(super) fn select(&self, all: &[f32], columns: Range<usize>) -> Vec<f32> {
        let rows = all.chunks(self.width() as usize);
        rows.flat_map(|row| row[columns.clone()].to_vec()).collect()
    }

    /// Splits a matrix of q, k and v into operands.
    pub(super) fn split(&self, all: &[f32]) -> Vec<Vec<f32>> {
        let mut first = 0;
        let part = |width: u64| {
            let columns = first..first + width as usize;
            first = columns.end;
            self.select(all, columns)
        };
        let mut parts: Vec<_> = self.parts().into_iter().map(part).collect();
        parts[0] = self.select_queries(std::mem::take(&mut parts[0]));
        parts
    }

    /// Rows and columns of each operand.
    pub(super) fn operand_shapes(&self) -> Vec<(u64, u64)> {
        let mut shapes: Vec<_> =
            self.parts().into_iter().map(|width| (self.tokens(), width)).collect();
        shapes[0].0 = self.query_rows();
        shapes
    }
}
