//! Copies before and after the collective of a reshard: `Pack`, `Unpack`, `Slice`.
//!
//! A tensor `[sequences, positions, Σ sections]` is partitioned along a dim into shards of equal
//! size: whole sequences, positions of every sequence, or features of every section. A shard is such
//! a tensor itself, `shards` times smaller in that dim.
//!
//! Collectives move contiguous memory. `Pack` makes the shards contiguous, one after the other:
//! before a reduce-scatter onto the dim, and before an all-to-all *to* a partition of the dim.
//! `Unpack` is the inverse: after an all-gather from the dim, and after an all-to-all *from* a
//! partition of the dim. `Slice` copies one shard. [`PartitionShape`] always describes the whole
//! local tensor: the input of `Pack` and `Slice`, the output of `Unpack`.

use narrows_plan::Dim;

use super::parallel::{FirstRow, GroupedRows, Parallel, SharedOperand};
use super::simd::{Simd, SimdBody};

/// Shape of a tensor, and how it is partitioned into shards.
#[derive(Clone, Copy, Debug)]
pub struct PartitionShape<'a> {
    /// Number of sequences.
    pub sequences: usize,
    /// Positions of each sequence.
    pub positions: usize,
    /// Feature widths of the tensors side by side in this one.
    pub sections: &'a [usize],
    /// Dim that is partitioned.
    pub dim: Dim,
    /// Number of shards.
    pub shards: usize,
    /// Whether shard i of the positions has the chunks i and 2·shards − 1 − i of 2·shards chunks.
    pub is_zigzag: bool,
}

impl PartitionShape<'_> {
    /// Features of one token.
    fn width(&self) -> usize {
        self.sections.iter().sum()
    }

    /// Elements of the whole tensor.
    fn elements(&self) -> usize {
        self.sequences * self.positions * self.width()
    }

    fn check(&self) {
        let shards = self.shards;
        let divides = match self.dim {
            Dim::Feature => self.sections.iter().all(|width| width.is_multiple_of(shards)),
            Dim::Sequence => self.sequences.is_multiple_of(shards),
            Dim::Position => {
                self.positions.is_multiple_of(if self.is_zigzag { 2 * shards } else { shards })
            }
        };
        assert!(divides, "{shards} shards of equal size of {self:?}");
    }

    /// Number of rows into which the whole tensor and each shard are divided alike: within a section, the
    /// part of a row that is in a shard is contiguous.
    fn rows(&self) -> usize {
        match self.dim {
            Dim::Sequence => 1,
            Dim::Position => self.sequences,
            Dim::Feature => self.sequences * self.positions,
        }
    }

    /// Calls `copy(shard_offset, whole_offset, count)` for each contiguous run of a row: offsets within
    /// the row of the shard and within the row of the whole tensor.
    #[inline(always)]
    fn for_each_run(&self, shard: usize, mut copy: impl FnMut(usize, usize, usize)) {
        if self.dim == Dim::Position && self.is_zigzag {
            let chunk = self.elements() / self.rows() / (2 * self.shards);
            copy(0, shard * chunk, chunk);
            return copy(chunk, (2 * self.shards - 1 - shard) * chunk, chunk);
        }
        if self.dim != Dim::Feature {
            let count = self.elements() / self.rows() / self.shards;
            return copy(0, shard * count, count);
        }
        let (mut shard_offset, mut section_offset) = (0, 0);
        for section in self.sections {
            let count = section / self.shards;
            copy(shard_offset, section_offset + shard * count, count);
            shard_offset += count;
            section_offset += section;
        }
    }
}

/// `Pack`: copies the shards of `whole` to `packed`, one after the other.
pub fn pack_shards(
    shape: PartitionShape<'_>,
    whole: &[f32],
    packed: &mut [f32],
    parallel: Parallel,
) {
    shape.check();
    assert!(whole.len() == shape.elements() && packed.len() == whole.len());
    for (shard, packed) in packed.chunks_exact_mut(whole.len() / shape.shards).enumerate() {
        copy_shard(shape, shard, whole, packed, parallel);
    }
}

/// `Slice`: copies one shard of `whole` to `output`.
pub fn slice_shard(
    shape: PartitionShape<'_>,
    shard: usize,
    whole: &[f32],
    output: &mut [f32],
    parallel: Parallel,
) {
    shape.check();
    assert!(shard < shape.shards && whole.len() == shape.elements());
    assert_eq!(output.len(), whole.len() / shape.shards);
    copy_shard(shape, shard, whole, output, parallel);
}

fn copy_shard(
    shape: PartitionShape<'_>,
    shard: usize,
    whole: &[f32],
    output: &mut [f32],
    parallel: Parallel,
) {
    let rows = shape.rows();
    let output = GroupedRows { group_size: output.len() / rows, operand: output };
    let whole = GroupedRows { group_size: whole.len() / rows, operand: whole };
    let operands = (output, whole, SharedOperand(shape), SharedOperand(shard));
    parallel.for_rows::<CopyShardRows, _>(rows, operands);
}

type CopyShardOperands<'a> = (
    GroupedRows<&'a mut [f32]>,
    GroupedRows<&'a [f32]>,
    SharedOperand<PartitionShape<'a>>,
    SharedOperand<usize>,
);

struct CopyShardRows;

impl SimdBody<CopyShardOperands<'_>> for CopyShardRows {
    #[inline(always)]
    fn run<S: Simd>(
        (output, whole, SharedOperand(shape), SharedOperand(shard)): CopyShardOperands<'_>,
    ) {
        let output_rows = output.operand.chunks_exact_mut(output.group_size.max(1));
        let whole_rows = whole.operand.chunks_exact(whole.group_size.max(1));
        for (output, whole) in output_rows.zip(whole_rows) {
            shape.for_each_run(shard, |shard_offset, whole_offset, count| {
                output[shard_offset..shard_offset + count]
                    .copy_from_slice(&whole[whole_offset..whole_offset + count]);
            });
        }
    }
}

/// `Unpack`: copies the shards, one after the other in `packed`, to their places in `whole`.
pub fn unpack_shards(
    shape: PartitionShape<'_>,
    packed: &[f32],
    whole: &mut [f32],
    parallel: Parallel,
) {
    shape.check();
    assert!(whole.len() == shape.elements() && packed.len() == whole.len());
    let rows = shape.rows();
    let operands = (
        FirstRow(0),
        GroupedRows { group_size: whole.len() / rows.max(1), operand: whole },
        SharedOperand(packed),
        SharedOperand(shape),
    );
    parallel.for_rows::<UnpackRows, _>(rows, operands);
}

type UnpackOperands<'a> = (
    FirstRow,
    GroupedRows<&'a mut [f32]>,
    SharedOperand<&'a [f32]>,
    SharedOperand<PartitionShape<'a>>,
);

struct UnpackRows;

impl SimdBody<UnpackOperands<'_>> for UnpackRows {
    #[inline(always)]
    fn run<S: Simd>(
        (FirstRow(first), whole, SharedOperand(packed), SharedOperand(shape)): UnpackOperands<'_>,
    ) {
        let shard_row = whole.group_size / shape.shards;
        let whole_rows = whole.operand.chunks_exact_mut(whole.group_size.max(1));
        for (row, whole) in whole_rows.enumerate() {
            for shard in 0..shape.shards {
                let begin = packed.len() / shape.shards * shard + (first + row) * shard_row;
                let packed = &packed[begin..begin + shard_row];
                shape.for_each_run(shard, |shard_offset, whole_offset, count| {
                    whole[whole_offset..whole_offset + count]
                        .copy_from_slice(&packed[shard_offset..shard_offset + count]);
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: [Dim; 3] = [Dim::Feature, Dim::Sequence, Dim::Position];
    const SECTIONS: [usize; 3] = [8, 4, 12];
    const SHARDS: usize = 2;
    const SERIAL: Parallel = Parallel::SERIAL;

    /// An element that encodes its sequence, position and feature.
    fn element(sequence: usize, position: usize, feature: usize) -> f32 {
        (sequence * 10_000 + position * 100 + feature) as f32
    }

    fn whole() -> Vec<f32> {
        let token = |i: usize| (0..24).map(move |feature| element(i / 6, i % 6, feature));
        (0..4 * 6).flat_map(token).collect()
    }

    fn shape(dim: Dim) -> PartitionShape<'static> {
        PartitionShape {
            sequences: 4,
            positions: 6,
            sections: &SECTIONS,
            dim,
            shards: SHARDS,
            is_zigzag: false,
        }
    }

    /// A shard of [`whole`], by definition.
    fn expected_shard(dim: Dim, shard: usize) -> Vec<f32> {
        let mut elements = vec![];
        for sequence in 0..4 {
            for position in 0..6 {
                let mut section_offset = 0;
                for section in SECTIONS {
                    for feature in 0..section {
                        let (index, size) = match dim {
                            Dim::Feature => (feature, section),
                            Dim::Sequence => (sequence, 4),
                            Dim::Position => (position, 6),
                        };
                        if index / (size / SHARDS) == shard {
                            elements.push(element(sequence, position, section_offset + feature));
                        }
                    }
                    section_offset += section;
                }
            }
        }
        elements
    }

    #[test]
    fn slices_and_packs_are_shards_and_unpack_is_the_inverse() {
        for dim in DIMS {
            for threads in [1, 2] {
                let parallel = Parallel::new(threads);
                let mut packed = vec![0.0; whole().len()];
                pack_shards(shape(dim), &whole(), &mut packed, parallel);
                assert_eq!(packed, [expected_shard(dim, 0), expected_shard(dim, 1)].concat());
                let mut unpacked = vec![0.0; packed.len()];
                unpack_shards(shape(dim), &packed, &mut unpacked, parallel);
                assert_eq!(unpacked, whole());
                for shard in 0..SHARDS {
                    let mut output = vec![0.0; packed.len() / SHARDS];
                    slice_shard(shape(dim), shard, &whole(), &mut output, parallel);
                    assert_eq!(output, expected_shard(dim, shard));
                }
            }
        }
    }

    #[test]
    fn zigzag_shards_have_a_chunk_from_each_end() {
        let shape = PartitionShape {
            sequences: 2,
            positions: 8,
            sections: &[1],
            dim: Dim::Position,
            shards: 2,
            is_zigzag: true,
        };
        let whole: Vec<f32> = (0..16).map(|token| token as f32).collect();
        let mut packed = vec![0.0; 16];
        pack_shards(shape, &whole, &mut packed, SERIAL);
        let tokens = [0, 1, 6, 7, 8, 9, 14, 15, 2, 3, 4, 5, 10, 11, 12, 13];
        assert_eq!(packed, tokens.map(|token| token as f32));
        let mut unpacked = vec![0.0; 16];
        unpack_shards(shape, &packed, &mut unpacked, SERIAL);
        assert_eq!(unpacked, whole);
    }

    #[test]
    fn pack_all_to_all_and_unpack_turn_every_partition_into_every_other() {
        for from in DIMS {
            for to in DIMS.into_iter().filter(|to| *to != from) {
                let local_size = |dim: Dim, partitioned: Dim, size: usize| {
                    if dim == partitioned { size / SHARDS } else { size }
                };
                let local_shape = |partitioned: Dim, dim: Dim| PartitionShape {
                    sequences: local_size(Dim::Sequence, partitioned, 4),
                    positions: local_size(Dim::Position, partitioned, 6),
                    sections: if partitioned == Dim::Feature { &[4, 2, 6] } else { &SECTIONS },
                    dim,
                    shards: SHARDS,
                    is_zigzag: false,
                };
                let sent: Vec<Vec<f32>> = (0..SHARDS)
                    .map(|device| {
                        let mut packed = vec![0.0; whole().len() / SHARDS];
                        let shard = expected_shard(from, device);
                        pack_shards(local_shape(from, to), &shard, &mut packed, SERIAL);
                        packed
                    })
                    .collect();
                for device in 0..SHARDS {
                    let count = sent[0].len() / SHARDS;
                    let received: Vec<f32> = sent
                        .iter()
                        .flat_map(|sent| sent[device * count..][..count].to_vec())
                        .collect();
                    let mut unpacked = vec![0.0; received.len()];
                    unpack_shards(local_shape(to, from), &received, &mut unpacked, SERIAL);
                    assert_eq!(unpacked, expected_shard(to, device), "{from:?} to {to:?}");
                }
            }
        }
    }
}
