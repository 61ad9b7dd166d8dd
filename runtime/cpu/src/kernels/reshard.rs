//! The copies around a reshard: `Pack`, `Unpack`, `Slice`.
//!
//! A value is `[sequences, positions, Σ sections]`, and a dim of it is cut into equal parts: whole
//! sequences, the positions of every sequence, or the features of every section. Part i is itself
//! such a value, `parts` times smaller in that dim.
//!
//! A collective moves contiguous memory. `Pack` lays the parts one after the other: before a
//! reduce-scatter onto the dim, and before an all-to-all with the dim cut *after* it. `Unpack` is
//! the inverse: after an all-gather from the dim, and after an all-to-all with the dim that was cut
//! *before* it. `Slice` copies one part. The form is always that of the whole local value: of what
//! is packed or sliced, of what is unpacked to.

use narrows_plan::Dim;

use super::Parallel;
use super::parallel::{FirstRow, GroupedRows, SharedOperand};
use super::simd::{Simd, SimdBody};

/// A value and the cut through it.
#[derive(Clone, Copy, Debug)]
pub struct PartitionShape<'a> {
    /// Sequences in it.
    pub sequences: usize,
    /// Positions of each sequence in it.
    pub positions: usize,
    /// Widths of the tensors side by side in it.
    pub sections: &'a [usize],
    /// The dim that is cut.
    pub dim: Dim,
    /// Into how many parts.
    pub parts: usize,
}

impl PartitionShape<'_> {
    /// Features of one token.
    pub fn width(&self) -> usize {
        self.sections.iter().sum()
    }

    /// Numbers in the whole value.
    pub fn elements(&self) -> usize {
        self.sequences * self.positions * self.width()
    }

    fn check(&self) {
        let parts = self.parts;
        let divides = match self.dim {
            Dim::Feature => self.sections.iter().all(|width| width.is_multiple_of(parts)),
            Dim::Sequence => self.sequences.is_multiple_of(parts),
            Dim::Position => self.positions.is_multiple_of(parts),
        };
        assert!(divides, "{parts} equal parts of {self:?}");
    }

    /// How many pieces of a part are each contiguous in the value, but for sections.
    fn rows(&self) -> usize {
        match self.dim {
            Dim::Sequence => 1,
            Dim::Position => self.sequences,
            Dim::Feature => self.sequences * self.positions,
        }
    }

    /// Calls `copy(at, of)` with ranges `at` of a row of one part and `of` of the whole value's row.
    #[inline(always)]
    fn runs(&self, part: usize, mut copy: impl FnMut(usize, usize, usize)) {
        if self.dim != Dim::Feature {
            let count = self.elements() / self.rows() / self.parts;
            return copy(0, part * count, count);
        }
        let (mut at, mut of) = (0, 0);
        for section in self.sections {
            let count = section / self.parts;
            copy(at, of + part * count, count);
            at += count;
            of += section;
        }
    }
}

/// `Pack`: the parts of `whole`, one after the other.
pub fn pack_shards(
    form: PartitionShape<'_>,
    whole: &[f32],
    packed: &mut [f32],
    parallel: Parallel,
) {
    form.check();
    assert!(whole.len() == form.elements() && packed.len() == whole.len());
    for (part, packed) in packed.chunks_exact_mut(whole.len() / form.parts).enumerate() {
        copy_out(form, part, whole, packed, parallel);
    }
}

/// `Slice`: part `part` of `whole`.
pub fn slice_shard(
    form: PartitionShape<'_>,
    part: usize,
    whole: &[f32],
    out: &mut [f32],
    parallel: Parallel,
) {
    form.check();
    assert!(part < form.parts && whole.len() == form.elements());
    assert_eq!(out.len(), whole.len() / form.parts);
    copy_out(form, part, whole, out, parallel);
}

fn copy_out(
    form: PartitionShape<'_>,
    part: usize,
    whole: &[f32],
    out: &mut [f32],
    parallel: Parallel,
) {
    let rows = form.rows();
    let out = GroupedRows { group_size: out.len() / rows, operand: out };
    let whole = GroupedRows { group_size: whole.len() / rows, operand: whole };
    parallel
        .for_rows::<CopyOutRows, _>(rows, (out, whole, SharedOperand(form), SharedOperand(part)));
}

type CopyOut<'a> = (
    GroupedRows<&'a mut [f32]>,
    GroupedRows<&'a [f32]>,
    SharedOperand<PartitionShape<'a>>,
    SharedOperand<usize>,
);

struct CopyOutRows;

impl SimdBody<CopyOut<'_>> for CopyOutRows {
    #[inline(always)]
    fn run<S: Simd>((out, whole, SharedOperand(form), SharedOperand(part)): CopyOut<'_>) {
        let rows = out
            .operand
            .chunks_exact_mut(out.group_size.max(1))
            .zip(whole.operand.chunks_exact(whole.group_size.max(1)));
        for (out, whole) in rows {
            form.runs(part, |at, of, count| {
                out[at..at + count].copy_from_slice(&whole[of..of + count]);
            });
        }
    }
}

/// `Unpack`: puts the parts, one after the other in `packed`, to their places in `whole`.
pub fn unpack_shards(
    form: PartitionShape<'_>,
    packed: &[f32],
    whole: &mut [f32],
    parallel: Parallel,
) {
    form.check();
    assert!(whole.len() == form.elements() && packed.len() == whole.len());
    let rows = form.rows();
    let work = (
        FirstRow(0),
        GroupedRows { group_size: whole.len() / rows.max(1), operand: whole },
        SharedOperand(packed),
        SharedOperand(form),
    );
    parallel.for_rows::<UnpackRows, _>(rows, work);
}

type Unpack<'a> = (
    FirstRow,
    GroupedRows<&'a mut [f32]>,
    SharedOperand<&'a [f32]>,
    SharedOperand<PartitionShape<'a>>,
);

struct UnpackRows;

impl SimdBody<Unpack<'_>> for UnpackRows {
    #[inline(always)]
    fn run<S: Simd>(
        (FirstRow(first), whole, SharedOperand(packed), SharedOperand(form)): Unpack<'_>,
    ) {
        let part_row = whole.group_size / form.parts;
        for (row, whole) in whole.operand.chunks_exact_mut(whole.group_size.max(1)).enumerate() {
            for part in 0..form.parts {
                let from = packed.len() / form.parts * part + (first + row) * part_row;
                let packed = &packed[from..from + part_row];
                form.runs(part, |at, of, count| {
                    whole[of..of + count].copy_from_slice(&packed[at..at + count]);
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
    const PARTS: usize = 2;
    const SERIAL: Parallel = Parallel::SERIAL;

    /// A number that names its sequence, position and feature.
    fn named(sequence: usize, position: usize, feature: usize) -> f32 {
        (sequence * 10_000 + position * 100 + feature) as f32
    }

    fn whole() -> Vec<f32> {
        let token = |i: usize| (0..24).map(move |feature| named(i / 6, i % 6, feature));
        (0..4 * 6).flat_map(token).collect()
    }

    fn form(dim: Dim) -> PartitionShape<'static> {
        PartitionShape { sequences: 4, positions: 6, sections: &SECTIONS, dim, parts: PARTS }
    }

    /// What device `part` holds of the value, by definition.
    fn shard(dim: Dim, part: usize) -> Vec<f32> {
        let mut made = vec![];
        for sequence in 0..4 {
            for position in 0..6 {
                let mut start = 0;
                for section in SECTIONS {
                    for feature in 0..section {
                        let (at, of) = match dim {
                            Dim::Feature => (feature, section),
                            Dim::Sequence => (sequence, 4),
                            Dim::Position => (position, 6),
                        };
                        if at / (of / PARTS) == part {
                            made.push(named(sequence, position, start + feature));
                        }
                    }
                    start += section;
                }
            }
        }
        made
    }

    #[test]
    fn slices_and_packs_are_shards() {
        for dim in DIMS {
            for threads in [1, 2] {
                let parallel = Parallel::new(threads);
                let mut packed = vec![0.0; whole().len()];
                pack_shards(form(dim), &whole(), &mut packed, parallel);
                assert_eq!(packed, [shard(dim, 0), shard(dim, 1)].concat());
                let mut back = vec![0.0; packed.len()];
                unpack_shards(form(dim), &packed, &mut back, parallel);
                assert_eq!(back, whole());
                for part in 0..PARTS {
                    let mut out = vec![0.0; packed.len() / PARTS];
                    slice_shard(form(dim), part, &whole(), &mut out, parallel);
                    assert_eq!(out, shard(dim, part));
                }
            }
        }
    }

    /// Pack, exchange and unpack turn every sharding into every other.
    #[test]
    fn all_to_all() {
        for from in DIMS {
            for to in DIMS.into_iter().filter(|to| *to != from) {
                let cut =
                    |dim: Dim, by: Dim, size: usize| if dim == by { size / PARTS } else { size };
                let local = |held: Dim, dim: Dim, sections: &'static [usize]| PartitionShape {
                    sequences: cut(held, Dim::Sequence, 4),
                    positions: cut(held, Dim::Position, 6),
                    sections,
                    dim,
                    parts: PARTS,
                };
                let widths = |held: Dim| -> &'static [usize] {
                    if held == Dim::Feature { &[4, 2, 6] } else { &SECTIONS }
                };
                let sent: Vec<Vec<f32>> = (0..PARTS)
                    .map(|device| {
                        let mut packed = vec![0.0; whole().len() / PARTS];
                        let form = local(from, to, widths(from));
                        pack_shards(form, &shard(from, device), &mut packed, SERIAL);
                        packed
                    })
                    .collect();
                for device in 0..PARTS {
                    let piece = sent[0].len() / PARTS;
                    let received: Vec<f32> = sent
                        .iter()
                        .flat_map(|sent| sent[device * piece..][..piece].to_vec())
                        .collect();
                    let mut after = vec![0.0; received.len()];
                    unpack_shards(local(to, from, widths(to)), &received, &mut after, SERIAL);
                    assert_eq!(after, shard(to, device), "{from:?} to {to:?}");
                }
            }
        }
    }
}
