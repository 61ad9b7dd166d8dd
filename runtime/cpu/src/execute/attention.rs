//! Attention. The columns of q, k and v follow each other in one, two or three operands. With fewer KV
//! heads than tensor-parallel devices, every device has all KV heads and uses the one of its queries.

use narrows_plan::kernel::{Attention, Direction};
use narrows_plan::program::Access;
use narrows_runtime::ScheduledInstruction;

use super::operands::{view, view_mut, with_scratch};
use crate::abort::StopReason;
use crate::device::CpuDevice;
use crate::kernels::{
    AttentionGradients, AttentionSaved, AttentionShape, MatrixView, MatrixViewMut,
    attention_backward, attention_forward, fill_zero_view,
};

/// The columns of queries, keys and values, counted over all operands.
pub(super) struct HeadColumns {
    pub shape: AttentionShape,
    /// Columns of all queries.
    query_width: usize,
    /// Columns of all keys, including those that this device does not use.
    key_width: usize,
    /// First of the key columns that are used.
    first_key: usize,
}

pub(crate) fn run(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    attention: &Attention,
) -> Result<(), StopReason> {
    let parallel = device.parallel;
    let backward = attention.direction == Direction::Backward;
    let inputs = if backward { scheduled.instr.writes.len() } else { scheduled.instr.reads.len() };
    let accesses = &scheduled.instr.reads[..inputs];
    let heads = head_columns(device, accesses, attention);
    let shape = heads.shape;
    with_scratch(device, shape.scratch_elements(parallel), |device, scratch| {
        let mut operands = device.operands(scheduled)?;
        let (reads, writes) = (&scheduled.instr.reads, &scheduled.instr.writes);
        let qkv = [0, 1, 2].map(|index| operands.read(index));
        let [q, k, v] = heads.split(accesses, &qkv);
        if !backward {
            let out = view_mut(operands.write(0), writes[0].extent);
            let lse = view_mut(operands.write(1), writes[1].extent);
            attention_forward(shape, (q, k, v), (out, lse), scratch, parallel);
            return Ok(());
        }
        let after_qkv =
            |index: usize| view(operands.read(inputs + index), reads[inputs + index].extent);
        let (out, lse, dout) = (after_qkv(0), after_qkv(1), after_qkv(2));
        let saved = AttentionSaved { q, k, v, out, lse, dout };
        let gradients: [Option<&mut [f32]>; 3] =
            std::array::from_fn(|index| (index < inputs).then(|| operands.write(index)));
        let [dq, dk, dv] = heads.split_mut(writes, gradients);
        attention_backward(shape, saved, AttentionGradients { dq, dk, dv }, scratch, parallel);
        Ok(())
    })
}

pub(super) fn head_columns(
    device: &CpuDevice,
    accesses: &[Access],
    attention: &Attention,
) -> HeadColumns {
    let head_dim = attention.head_dim as usize;
    let shape = AttentionShape {
        sequences: attention.sequences as usize,
        length: attention.length as usize,
        queries: device.token_rows(accesses[0].extent.rows).positions,
        heads: attention.heads as usize,
        kv_heads: attention.kv_heads as usize,
        head_dim,
        window: attention.window.unwrap_or(attention.length) as usize,
    };
    let all: usize = accesses.iter().map(|access| access.extent.columns as usize).sum();
    let query_width = shape.heads * head_dim;
    let key_width = (all - query_width) / 2;
    let stored_kv_heads = key_width / head_dim;
    let mut first_key = 0;
    if stored_kv_heads > shape.kv_heads {
        let query_heads = shape.heads * device.program.context.tensor_size() as usize;
        let first_query_head = shape.heads * device.coordinates.tensor as usize;
        first_key = first_query_head / (query_heads / stored_kv_heads) * head_dim;
    }
    HeadColumns { shape, query_width, key_width, first_key }
}

impl HeadColumns {
    /// First column and number of columns of q, k and v.
    fn columns(&self) -> [(usize, usize); 3] {
        let used = self.shape.kv_heads * self.shape.head_dim;
        let first_key = self.query_width + self.first_key;
        [(0, self.query_width), (first_key, used), (first_key + self.key_width, used)]
    }

    /// q, k and v.
    pub fn split<'a>(&self, accesses: &[Access], operands: &[&'a [f32]; 3]) -> [MatrixView<'a>; 3] {
        self.columns().map(|(first, count)| {
            let (operand, first) = locate(accesses, first);
            view(operands[operand], accesses[operand].extent).column_range(first, count)
        })
    }

    /// The gradients of q, k and v. Zeroes those of the keys and values that are not used.
    pub fn split_mut<'a>(
        &self,
        accesses: &[Access],
        operands: [Option<&'a mut [f32]>; 3],
    ) -> [MatrixViewMut<'a>; 3] {
        let mut rest: [Option<MatrixViewMut<'a>>; 3] = Default::default();
        for ((rest, elements), access) in rest.iter_mut().zip(operands).zip(accesses) {
            *rest = elements.map(|elements| view_mut(elements, access.extent));
        }
        let mut columns_taken = [0; 3];
        self.columns().map(|(first, count)| {
            let (operand, first) = locate(accesses, first);
            let width = accesses[operand].extent.columns as usize;
            let is_last = first + count + self.unused_after() >= width;
            let remaining = rest[operand].take().expect("the last columns are taken last");
            let (mut before, after) = remaining.split_columns(first - columns_taken[operand]);
            fill_zero_view(&mut before);
            let (gradient, mut after) = after.split_columns(count);
            columns_taken[operand] = first + count;
            if is_last {
                fill_zero_view(&mut after);
            } else {
                rest[operand] = Some(after);
            }
            gradient
        })
    }

    /// Unused key columns after those that are used.
    fn unused_after(&self) -> usize {
        self.key_width - self.first_key - self.shape.kv_heads * self.shape.head_dim
    }
}

/// The operand that a column is in, and the index of the column there.
fn locate(accesses: &[Access], mut column: usize) -> (usize, usize) {
    for (operand, access) in accesses.iter().enumerate() {
        let width = access.extent.columns as usize;
        if column < width {
            return (operand, column);
        }
        column -= width;
    }
    unreachable!("checked programs have all columns of q, k and v")
}
