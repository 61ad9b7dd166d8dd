//! Packing, unpacking and slicing around reshards.

use narrows_cpu::kernels::{Parallel, PartitionShape, pack_shards, slice_shard, unpack_shards};
use narrows_plan::program::FusedOp;
use narrows_plan::{Axis, ContextAttention, DType, Dim};

use super::case::KernelCase;
use super::formats::{random_values, rounded};

const FORMATS: [DType; 2] = [DType::Bf16, DType::F32];
const SERIAL: Parallel = Parallel::SERIAL;

/// Sequences, positions, sections of a token, parts.
const VALUES: [(u64, u64, &[u64], u64); 6] = [
    (2, 2, &[2], 2),
    (4, 6, &[8, 4, 12], 2),
    (4, 8, &[64, 32, 32], 4),
    (2, 4, &[6, 2], 2),
    (4, 1028, &[24], 4),
    (8, 40, &[1032], 2),
];

#[test]
fn copies_match_the_cpu() {
    for (sequences, positions, sections, parts) in VALUES {
        let width: u64 = sections.iter().sum();
        let rows = sequences * positions;
        let section_widths: Vec<usize> = sections.iter().map(|width| *width as usize).collect();
        for (dtype, dim) in FORMATS
            .into_iter()
            .flat_map(|dtype| [Dim::Feature, Dim::Sequence, Dim::Position].map(|dim| (dtype, dim)))
        {
            let whole = rounded(dtype, random_values(1, rows * width));
            let form = PartitionShape {
                sequences: sequences as usize,
                positions: positions as usize,
                sections: &section_widths,
                dim,
                shards: parts as usize,
                is_zigzag: false,
            };
            let [tensor, context] = [Axis::Tensor, Axis::Context];
            for (op, axis) in [
                (FusedOp::Pack { dim, axis: tensor }, tensor),
                (FusedOp::Unpack { dim, axis: tensor }, tensor),
                (FusedOp::Slice { dim }, tensor),
                (FusedOp::Pack { dim, axis: context }, context),
                (FusedOp::Unpack { dim, axis: context }, context),
            ] {
                let tensor_size = if axis == tensor { parts } else { 1 };
                let mut case = KernelCase::new(op, tensor_size, (sequences, positions));
                if axis == context {
                    case.context.mesh.context = parts;
                    case.context.workload.sequence_length *= parts;
                }
                case.tensor = tensor_size - 1;
                let part = match dim {
                    Dim::Feature => (rows, width / parts),
                    _ => (rows / parts, width),
                };
                let slice = matches!(op, FusedOp::Slice { .. });
                let result = if slice { part } else { (rows, width) };
                let from = case.buffer((rows, width), dtype, Some(&whole));
                let to = case.buffer(result, dtype, None);
                for buffer in [from, to] {
                    case.stage.buffers[buffer.0 as usize].sections = sections.to_vec();
                }
                case.reads(&[from]).writes(&[to]);
                let Some(outcome) = case.run() else { return };
                let mut expected = vec![0.0; (result.0 * result.1) as usize];
                match op {
                    FusedOp::Pack { .. } => pack_shards(form, &whole, &mut expected, SERIAL),
                    FusedOp::Unpack { .. } => unpack_shards(form, &whole, &mut expected, SERIAL),
                    _ => slice_shard(form, parts as usize - 1, &whole, &mut expected, SERIAL),
                }
                assert_eq!(outcome.elements(to), expected, "{op:?} of {sections:?} in {parts}");
            }
        }
    }
}

/// Every device of a context axis that gathers keys has a chunk of positions from either end.
#[test]
fn copies_of_zigzag_positions_match_the_cpu() {
    let (dim, axis) = (Dim::Position, Axis::Context);
    for (sequences, positions, width, parts) in [(1, 4, 2, 2), (3, 12, 8, 3), (2, 40, 1032, 2)] {
        let rows = sequences * positions;
        for dtype in FORMATS {
            let whole = rounded(dtype, random_values(1, rows * width));
            let form = PartitionShape {
                sequences: sequences as usize,
                positions: positions as usize,
                sections: &[width as usize],
                dim,
                shards: parts as usize,
                is_zigzag: true,
            };
            for op in [FusedOp::Pack { dim, axis }, FusedOp::Unpack { dim, axis }] {
                let mut case = KernelCase::new(op, 1, (sequences, positions));
                case.context.mesh.context = parts;
                case.context.context_attention = ContextAttention::Gather;
                let from = case.buffer((rows, width), dtype, Some(&whole));
                let to = case.buffer((rows, width), dtype, None);
                case.reads(&[from]).writes(&[to]);
                let Some(outcome) = case.run() else { return };
                let mut expected = vec![0.0; whole.len()];
                match op {
                    FusedOp::Pack { .. } => pack_shards(form, &whole, &mut expected, SERIAL),
                    _ => unpack_shards(form, &whole, &mut expected, SERIAL),
                }
                assert_eq!(outcome.elements(to), expected, "{op:?} in {parts}");
            }
        }
    }
}

#[test]
fn unequal_parts_are_unsupported() {
    let mut case =
        KernelCase::new(FusedOp::Pack { dim: Dim::Feature, axis: Axis::Tensor }, 2, (1, 4));
    let [from, to] = [(); 2].map(|()| case.buffer((4, 8), DType::F32, None));
    case.stage.buffers[from.0 as usize].sections = vec![5, 3];
    case.reads(&[from]).writes(&[to]);
    let error = case.launches().expect_err("parts of 5");
    assert!(error.contains("sections of [5, 3] do not divide into 2 equal parts"), "{error}");
}
