//! Attention. q, k and v are columns of one, two or three operands, one after the other. With fewer
//! key heads than devices every device holds all of them and uses the one of its queries.

use narrows_plan::kernel::{Attention, Direction};
use narrows_plan::program::Access;

use super::super::device::{CpuDevice, ResolvedInstr, Stop};
use super::{view, view_mut, with_scratch};
use crate::kernels::{
    AttentionGradients, AttentionSaved, AttentionShape, MatrixView, MatrixViewMut,
    attention_backward, attention_forward, fill_zero_view,
};

/// Where queries, keys and values begin, counted over the columns of the operands together.
struct HeadColumns {
    shape: AttentionShape,
    /// Features of all queries, and of all keys, held.
    widths: (usize, usize),
    /// The first feature of the keys that are used.
    key: usize,
}

pub fn run(
    device: &mut CpuDevice,
    ready: &ResolvedInstr,
    attention: &Attention,
) -> Result<(), Stop> {
    let parallel = device.parallel;
    let backwards = attention.direction == Direction::Backward;
    let inputs = if backwards { ready.instr.writes.len() } else { ready.instr.reads.len() };
    let accesses = &ready.instr.reads[..inputs];
    let heads = heads(device, accesses, attention);
    let shape = heads.shape;
    with_scratch(device, shape.scratch_elements(parallel), |device, scratch| {
        let mut operands = device.operands(ready)?;
        let (reads, writes) = (&ready.instr.reads, &ready.instr.writes);
        let read = [0, 1, 2].map(|port| operands.read(port));
        let [q, k, v] = heads.split(accesses, &read);
        if !backwards {
            let out = view_mut(operands.write(0), writes[0].extent);
            let lse = view_mut(operands.write(1), writes[1].extent);
            attention_forward(shape, (q, k, v), (out, lse), scratch, parallel);
            return Ok(());
        }
        let rest = |at: usize| view(operands.read(inputs + at), reads[inputs + at].extent);
        let saved = AttentionSaved { q, k, v, out: rest(0), lse: rest(1), dout: rest(2) };
        let made: [Option<&mut [f32]>; 3] =
            std::array::from_fn(|at| (at < inputs).then(|| operands.write(at)));
        let [dq, dk, dv] = heads.split_mut(writes, made);
        attention_backward(shape, saved, AttentionGradients { dq, dk, dv }, scratch, parallel);
        Ok(())
    })
}

fn heads(device: &CpuDevice, accesses: &[Access], attention: &Attention) -> HeadColumns {
    let head_dim = attention.head_dim as usize;
    let shape = AttentionShape {
        sequences: attention.sequences as usize,
        length: attention.length as usize,
        heads: attention.heads as usize,
        kv_heads: attention.kv_heads as usize,
        head_dim,
    };
    let all: usize = accesses.iter().map(|access| access.extent.columns as usize).sum();
    let queries = shape.heads * head_dim;
    let keys = (all - queries) / 2;
    let held = keys / head_dim;
    let mut key = 0;
    if held > shape.kv_heads {
        let all_queries = shape.heads * device.context.tensor_size() as usize;
        let first = shape.heads * device.at.tensor as usize;
        key = first / (all_queries / held) * head_dim;
    }
    HeadColumns { shape, widths: (queries, keys), key }
}

impl HeadColumns {
    /// First column and count of q, k and v over all operands.
    fn columns(&self) -> [(usize, usize); 3] {
        let (queries, keys) = self.widths;
        let used = self.shape.kv_heads * self.shape.head_dim;
        [(0, queries), (queries + self.key, used), (queries + keys + self.key, used)]
    }

    fn split<'a>(&self, accesses: &[Access], read: &[&'a [f32]; 3]) -> [MatrixView<'a>; 3] {
        self.columns().map(|(first, count)| {
            let (port, first) = locate(accesses, first);
            view(read[port], accesses[port].extent).column_range(first, count)
        })
    }

    /// The gradients; of keys that are not used they are zero.
    fn split_mut<'a>(
        &self,
        accesses: &[Access],
        made: [Option<&'a mut [f32]>; 3],
    ) -> [MatrixViewMut<'a>; 3] {
        let mut rest: [Option<MatrixViewMut<'a>>; 3] = Default::default();
        for ((rest, made), access) in rest.iter_mut().zip(made).zip(accesses) {
            *rest = made.map(|numbers| view_mut(numbers, access.extent));
        }
        let mut taken = [0; 3];
        self.columns().map(|(first, count)| {
            let (port, first) = locate(accesses, first);
            let width = accesses[port].extent.columns as usize;
            let last_of_port = first + count + self.unused_after() >= width;
            let whole = rest[port].take().expect("each operand is written once");
            let (mut before, after) = whole.split_columns(first - taken[port]);
            fill_zero_view(&mut before);
            let (mine, mut after) = after.split_columns(count);
            taken[port] = first + count;
            if last_of_port {
                fill_zero_view(&mut after);
            } else {
                rest[port] = Some(after);
            }
            mine
        })
    }

    fn unused_after(&self) -> usize {
        self.widths.1 - self.key - self.shape.kv_heads * self.shape.head_dim
    }
}

/// The operand that a column is in, and which of its columns that is.
fn locate(accesses: &[Access], mut column: usize) -> (usize, usize) {
    for (port, access) in accesses.iter().enumerate() {
        let width = access.extent.columns as usize;
        if column < width {
            return (port, column);
        }
        column -= width;
    }
    unreachable!("the check counts the heads of every attention")
}
