//! Names, sizes and arguments of the launches of attention, without values.

use narrows_cuda::{Argument, Launches};
use narrows_plan::DType;
use narrows_plan::kernel::Direction;

use super::super::case::KernelCase;
use super::problem::{AttentionProblem, FORMATS, gathered, problem};

fn launches(problem: &AttentionProblem, direction: Direction) -> Result<Launches, String> {
    let mut case = problem.case(direction);
    let (query_rows, dtype) = (problem.query_rows(), problem.op.input);
    let [queries, _] = problem.widths();
    let shapes = problem.operand_shapes();
    let buffers = |case: &mut KernelCase| -> Vec<_> {
        shapes.iter().map(|shape| case.buffer(*shape, dtype, None)).collect()
    };
    let (mut reads, gradients) = (buffers(&mut case), buffers(&mut case));
    let [out, dout] = [(); 2].map(|()| case.buffer((query_rows, queries), dtype, None));
    let lse = case.buffer((query_rows, problem.op.heads), DType::F32, None);
    match direction {
        Direction::Forward => case.reads(&reads).writes(&[out, lse]),
        Direction::Backward => {
            reads.extend([out, lse, dout]);
            case.reads(&reads).writes(&gradients)
        }
    };
    case.launches()
}

/// Shared memory per block fits GPUs with 99 KiB, except for heads above 128 features. Scratch memory is two f32 per
/// query of whole tiles.
#[test]
fn shared_and_scratch_memory_have_the_documented_sizes() {
    let sizes = [6, 32, 64, 128, 256];
    for (dtype, head_dim) in FORMATS.into_iter().flat_map(|f| sizes.map(|w| (f, w))) {
        let limit = if head_dim > 128 { 163 * 1024 } else { 99 * 1024 };
        let problem = problem((2, 100), (4, 2, head_dim), dtype);
        let forward = launches(&problem, Direction::Forward).unwrap();
        let backward = launches(&problem, Direction::Backward).unwrap();
        assert_eq!((forward.scratch_bytes, backward.scratch_bytes), (0, 2 * 4 * 128 * 8));
        assert_eq!((forward.launches.len(), backward.launches.len()), (1, 3));
        for launch in forward.launches.iter().chain(&backward.launches) {
            assert!(launch.shared_bytes <= limit, "{launch:?}");
            println!("{}: {} bytes of shared memory", launch.kernel, launch.shared_bytes);
        }
    }
}

#[test]
fn unsupported_heads_are_reported() {
    let unsupported = |change: fn(&mut AttentionProblem), expected: &str| {
        let mut problem = problem((1, 8), (4, 2, 64), DType::Bf16);
        change(&mut problem);
        for direction in [Direction::Forward, Direction::Backward] {
            let error = launches(&problem, direction).expect_err(expected);
            assert!(error.contains(expected) && error.contains("a test"), "{error}");
        }
    };
    unsupported(|p| p.op.head_dim = 258, "heads of 258 features exceed the widest tile, 256");
    unsupported(|p| p.op.kv_heads = 3, "4 query heads do not share 3 KV heads evenly");
    unsupported(|p| p.local_kv_heads = 1, "do not fit 4 query and 2 KV heads");
}

/// Which heads use vectors and tensor cores, and which do not.
#[test]
fn heads_use_the_narrowest_tiles_that_hold_them() {
    let cases = [
        (2, "bf16_w32_v1", "f32_w32_v1"),
        (4, "bf16_w32_v1", "f32_w32_v1"),
        (16, "bf16_w64", "f32_w32_v1"),
        (32, "bf16_w64", "f32_w32_v1"),
        (36, "bf16_w256_v1", "f32_w128"),
        (48, "bf16_w64", "f32_w128"),
        (80, "bf16_w128", "f32_w128"),
        (128, "bf16_w128", "f32_w128"),
        (136, "bf16_w256_v1", "f32_w256_v1"),
    ];
    for (head_dim, bf16, f32) in cases {
        for (dtype, name) in [(DType::Bf16, bf16), (DType::F32, f32)] {
            let problem = problem((1, 8), (2, 1, head_dim), dtype);
            let names = |direction| -> Vec<String> {
                let gradients = launches(&problem, direction).unwrap().launches;
                gradients.into_iter().map(|launch| launch.kernel).collect()
            };
            assert_eq!(names(Direction::Forward), [format!("attention_{name}")]);
            let backward = ["sums", "dq", "dkv"].map(|of| format!("attention_{of}_{name}"));
            assert_eq!(names(Direction::Backward), backward);
        }
    }
}

/// Each run of queries has a launch that ends at its own keys, so that no tile of later keys is computed. Tensor cores
/// compute runs of whole tiles.
#[test]
fn each_run_of_queries_has_its_own_launch() {
    for (chunk, head_dim, kernel, dkv) in [
        (64, 64, "bf16_w64", "general_dkv"),
        (128, 128, "bf16_w128", "general_dkv"),
        (48, 64, "bf16_w256_v1", "dkv"),
    ] {
        let problem = gathered((2, 1, chunk), (2, 1, head_dim), DType::Bf16);
        let forward = launches(&problem, Direction::Forward).unwrap().launches;
        let backward = launches(&problem, Direction::Backward).unwrap().launches;
        let names: Vec<&str> = forward.iter().chain(&backward).map(|l| &*l.kernel).collect();
        let kernels = ["", "", "sums_", "dq_", "dq_", &format!("{dkv}_")];
        assert_eq!(names, kernels.map(|name| format!("attention_{name}{kernel}")));
        // Rows of keys and of queries of a sequence, its keys, first position and end of the run, and positions
        // without a row before it.
        let runs = [[chunk, 2 * chunk, chunk], [2 * chunk, 3 * chunk, chunk]];
        for (launches, pointers) in [(&forward[..], 5), (&backward[1..3], 6)] {
            for (launch, run) in launches.iter().zip(runs) {
                let sizes: Vec<u64> = launch.arguments[pointers..pointers + 6]
                    .iter()
                    .map(|argument| match argument {
                        Argument::U32(size) => u64::from(*size),
                        other => panic!("{other:?}"),
                    })
                    .collect();
                assert_eq!(sizes[..3], [4, 2, 4].map(|chunks| chunks * chunk));
                assert_eq!(sizes[3..], run, "{}", launch.kernel);
            }
        }
    }
}
