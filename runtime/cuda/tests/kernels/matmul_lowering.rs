//! Lowering of GEMMs: the documented semantics of cublasLtMatmul give the results of the CPU backend, on all GEMMs of
//! random programs and on ragged sizes.

use std::collections::HashSet;

use narrows_cpu::kernels::{
    MatrixView, MatrixViewMut, Parallel, StridedMatrix, WriteMode, gemm_forward,
    gemm_input_gradient, gemm_weight_gradient,
};
use narrows_cuda::{
    LaunchContext, Matmul, MatmulContext, MatmulKey, Transpose, lower_gemm, recommended_workspace,
};
use narrows_plan::model::{WeightId, WeightShape, presets};
use narrows_plan::program::{
    Access, Action, BufferId, BufferRole, GemmOp, GemmRole, Instr, MicrobatchPass, ParameterShard,
    Phase, Program, StageProgram,
};
use narrows_plan::{Bytes, Context, DType, Mesh, Precision, WeightSplit, Workload, Zero, lower};
use narrows_runtime::session::MeshCoordinates;
use narrows_runtime::{ScheduledInstruction, operand_range};

use super::bounds_check::check_matmul;
use super::case::{KernelCase, MULTIPROCESSORS, for_each_instruction};
use super::formats::{assert_near, decode, encode, random_values};
use super::reference_matmul::execute;
use narrows_test_support::plans::{TestRng, draw_plan};
use narrows_test_support::small_models::{small_context, small_models};

/// Result of the CPU backend in f32. `arena` begins at the offset `base`.
fn expected(
    (arena, base): (&[u8], u64),
    stage: &StageProgram,
    scheduled: &ScheduledInstruction,
    tied: bool,
) -> Vec<f32> {
    let Instr { action, reads, writes, .. } = scheduled.instr;
    let Action::Gemm(of) = action else { panic!("not a GEMM") };
    let weight = if of.role == GemmRole::WeightGradient { &writes[0] } else { &reads[1] };
    let shard = &stage.buffer(weight.buffer).shard;
    let head = shard.as_ref().is_some_and(ParameterShard::holds_head);
    let transposed = tied && head;
    let operand = |access: &Access| {
        let range = operand_range(stage, access, scheduled.slot);
        decode(
            &arena[(range.start - base) as usize..(range.end - base) as usize],
            access.extent.dtype,
        )
    };
    let shape = |access: &Access| (access.extent.rows as usize, access.extent.columns as usize);
    let [left, right] = [&reads[0], &reads[1]].map(operand);
    // Where the GEMM adds to an operand, this is it.
    let mut result = operand(reads.get(2).unwrap_or(&writes[0]));
    let view = |elements, access| MatrixView::new(elements, shape(access).0, shape(access).1);
    let w: StridedMatrix = if transposed && of.role != GemmRole::WeightGradient {
        let (rows, columns) = shape(&reads[1]);
        MatrixView::new(&right, columns, rows).transposed()
    } else {
        view(&right, &reads[1]).into()
    };
    let write = if of.accumulate { WriteMode::Add } else { WriteMode::Replace };
    let (rows, columns) = shape(&writes[0]);
    let (x, batch, serial) = (view(&left, &reads[0]), of.batch as usize, Parallel::SERIAL);
    match of.role {
        GemmRole::WeightGradient if transposed => {
            let y = MatrixViewMut::new(&mut result, columns, rows);
            gemm_weight_gradient(view(&right, &reads[1]), x, y, batch, write, serial);
        }
        role => {
            let y = MatrixViewMut::new(&mut result, rows, columns);
            match role {
                GemmRole::Forward => gemm_forward(x, w, y, batch, write, serial),
                GemmRole::InputGradient => {
                    gemm_input_gradient(x, w, y, batch, write, serial);
                }
                GemmRole::WeightGradient => {
                    gemm_weight_gradient(x, view(&right, &reads[1]), y, batch, write, serial);
                }
            }
        }
    }
    result
}

/// The matmul of an instruction, which must access exactly its operands.
#[track_caller]
fn checked(context: &MatmulContext, scheduled: &ScheduledInstruction) -> Matmul {
    let matmul = lower_gemm(context, scheduled).unwrap_or_else(|error| panic!("{error}"));
    let accessed =
        check_matmul(context.device, scheduled, &matmul).unwrap_or_else(|error| panic!("{error}"));
    let size = |access: &Access| access.extent.bytes().0;
    let Instr { reads, writes, .. } = scheduled.instr;
    assert_eq!(accessed.read, reads.iter().map(size).sum::<u64>());
    assert_eq!(accessed.written, size(&writes[0]));
    matmul
}

/// Executes a GEMM on random operands in an arena of NaNs, and compares the result with that of the CPU backend.
#[track_caller]
fn compare(context: &MatmulContext, scheduled: &ScheduledInstruction, seed: u64) {
    let stage = context.device.stage;
    let mut matmul = checked(context, scheduled);
    let Instr { reads, writes, .. } = scheduled.instr;
    // Only the part of the arena that contains the operands, with a margin.
    let range = |access: &Access| operand_range(stage, access, scheduled.slot);
    let ranges = reads.iter().chain(writes).map(range);
    let (base, end) = ranges.fold((u64::MAX, 0), |(base, end), range| {
        (base.min(range.start / 256 * 256), end.max(range.end))
    });
    let base = base.saturating_sub(256);
    for address in [&mut matmul.a, &mut matmul.b, &mut matmul.c, &mut matmul.d] {
        address.offset -= base;
    }
    let mut arena = vec![0xff; (end - base) as usize + 256];
    for (index, access) in reads.iter().enumerate() {
        let extent = access.extent;
        let elements = random_values(seed + index as u64, extent.rows * extent.columns);
        let bytes = encode(&elements, extent.dtype);
        let begin = (range(access).start - base) as usize;
        arena[begin..][..bytes.len()].copy_from_slice(&bytes);
    }
    let expected = expected((&arena, base), stage, scheduled, context.tied);
    let mut after = arena.clone();
    execute(&mut after, &matmul);
    let written = range(&writes[0]);
    let written = (written.start - base) as usize..(written.end - base) as usize;
    assert!(after[..written.start] == arena[..written.start], "bytes before C have changed");
    assert!(after[written.end..] == arena[written.end..], "bytes after C have changed");
    let dtype = writes[0].extent.dtype;
    let result = decode(&after[written], dtype);
    assert!(result.iter().all(|x| x.is_finite()), "{matmul:?}");
    assert_near(dtype, &result, &expected, 2e-6);
}

/// Calls `visit` with every GEMM of a program on every device.
fn for_each_gemm(program: &Program, mut visit: impl FnMut(&MatmulContext, &ScheduledInstruction)) {
    for_each_instruction(program, |device, scheduled| {
        if matches!(scheduled.instr.action, Action::Gemm(_)) {
            let workspace = recommended_workspace((9, 0));
            visit(&MatmulContext { device, tied: program.tied, workspace }, scheduled);
        }
    });
}

fn check_random_programs(precision: Precision, seeds: std::ops::Range<u64>) {
    let models = small_models();
    let (mut programs, mut kinds) = (0, HashSet::new());
    for seed in seeds {
        let mut rng = TestRng::new(seed);
        let model = &models[seed as usize % models.len()];
        let context = small_context(&mut rng, precision);
        let Some(plan) = draw_plan(&mut rng, model, context) else { continue };
        programs += 1;
        for_each_gemm(&lower(&plan.resolve(model).unwrap()), |context, scheduled| {
            let Action::Gemm(gemm) = &scheduled.instr.action else { return };
            let key = checked(context, scheduled).key;
            // A repeated key at another address adds no coverage.
            if kinds.insert((gemm.role, key)) {
                compare(context, scheduled, seed);
            }
        });
    }
    println!("{programs} programs, {} different matmuls", kinds.len());
    assert!(programs > 20, "{programs} programs");
    let has = |matches: &dyn Fn(GemmRole, &MatmulKey) -> bool| {
        kinds.iter().any(|(role, key)| matches(*role, key))
    };
    for role in [GemmRole::Forward, GemmRole::InputGradient, GemmRole::WeightGradient] {
        assert!(has(&|of, key| of == role && key.batch > 1), "no batched {role:?}");
        // A tied head transposes the weight.
        let usual = match role {
            GemmRole::Forward => (Transpose::N, Transpose::N),
            GemmRole::InputGradient => (Transpose::T, Transpose::N),
            GemmRole::WeightGradient => (Transpose::N, Transpose::T),
        };
        let operations = |key: &MatmulKey| (key.operation_a, key.operation_b);
        assert!(has(&|of, key| of == role && operations(key) == usual), "no {role:?}");
        if role != GemmRole::WeightGradient {
            assert!(has(&|of, key| of == role && operations(key) != usual), "no tied {role:?}");
        }
    }
    assert!(has(&|role, key| role == GemmRole::InputGradient && key.accumulate));
    assert!(has(&|role, key| role == GemmRole::Forward && key.accumulate), "no residual sum");
}

#[test]
fn f32_gemms_of_random_programs_match_the_cpu() {
    check_random_programs(Precision::Fp32, 0..50);
}

#[test]
fn bf16_gemms_of_random_programs_match_the_cpu() {
    check_random_programs(Precision::MixedBf16, 50..100);
}

/// One GEMM on separate operands.
struct SingleGemm {
    case: KernelCase,
    instr: Instr,
    tied: bool,
}

impl SingleGemm {
    fn new(gemm: GemmOp, dtype: DType, tied: bool) -> SingleGemm {
        let GemmOp { role, m, n, k, batch, accumulate } = gemm;
        let mut case = KernelCase::of(Action::Gemm(gemm.clone()), 1, (1, 1));
        let [left, right] = match role {
            GemmRole::Forward => [(m, k), (k, n)],
            GemmRole::InputGradient => [(m, k), (n, k)],
            GemmRole::WeightGradient => [(k, m), (k, n)],
        };
        let gradient = role == GemmRole::WeightGradient;
        let result = if gradient { DType::F32 } else { dtype };
        let shapes = [(left, dtype), (right, dtype), ((m, n), result)];
        let [left, right, result] = shapes
            .map(|((rows, columns), dtype)| case.buffer((rows, columns * batch), dtype, None));
        let weight: BufferId = if gradient { result } else { right };
        let weight = &mut case.stage.buffers[weight.0 as usize];
        weight.role = if gradient { BufferRole::WeightGradient } else { BufferRole::Weight };
        weight.shard = Some(ParameterShard {
            block: None,
            split: WeightSplit::Whole,
            members: vec![WeightShape::new(
                WeightId::Head,
                weight.extent.rows,
                weight.extent.columns,
            )],
            offset_stride: vec![0],
        });
        let mut reads = vec![case.whole_buffer(left), case.whole_buffer(right)];
        let writes = vec![case.whole_buffer(result)];
        let is_residual_sum = gemm.is_residual_sum();
        reads.extend((accumulate && !is_residual_sum).then_some(writes[0]));
        if is_residual_sum {
            let residual = case.buffer((m, n * batch), dtype, None);
            reads.push(case.whole_buffer(residual));
        }
        let (action, origin) = (Action::Gemm(gemm), "a test".into());
        let instr = Instr { action, reads, writes, origin, overlapped_instrs: 0 };
        SingleGemm { case, instr, tied }
    }

    fn on_device<R>(&self, work: impl FnOnce(&MatmulContext, &ScheduledInstruction) -> R) -> R {
        let KernelCase { context, constants, stage, update_groups, phase, .. } = &self.case;
        let device = LaunchContext {
            context,
            constants,
            stage,
            coordinates: MeshCoordinates { tensor: 0, replica: 0, stage: 0 },
            update_groups,
            multiprocessors: MULTIPROCESSORS,
        };
        let context = MatmulContext { device: &device, tied: self.tied, workspace: Bytes(1 << 20) };
        let pass = MicrobatchPass { phase: *phase, chunk: 0, microbatch: 0 };
        work(&context, &ScheduledInstruction { instr: &self.instr, pass, slot: 0 })
    }

    fn unsupported(&self) -> String {
        self.on_device(|context, scheduled| lower_gemm(context, scheduled).unwrap_err().to_string())
    }
}

const FORMS: [GemmRole; 3] = [GemmRole::Forward, GemmRole::InputGradient, GemmRole::WeightGradient];

/// Ragged and minimal sizes; single, batched and tied.
#[test]
fn gemms_of_ragged_sizes_match_the_cpu() {
    let mut rng = TestRng::new(7);
    for seed in 0..240 {
        let role = FORMS[rng.below(3)];
        let mut size = || [1, 1 + rng.below(9), 1 + rng.below(70)][rng.below(3)] as u64;
        let (m, n, k) = (size(), size(), size());
        let (tied, accumulate) = (rng.below(3) == 0, rng.below(2) == 0);
        let batch = if tied { 1 } else { 1 + rng.below(4) as u64 };
        let gemm = GemmOp { role, m, n, k, batch, accumulate };
        let dtype = [DType::Bf16, DType::F32][rng.below(2)];
        SingleGemm::new(gemm, dtype, tied).on_device(|at, scheduled| compare(at, scheduled, seed));
    }
}

/// The reported alignment is that of every member of a batch.
#[test]
fn alignment_covers_every_batch_member() {
    let aligned = |batch, k| {
        let role = GemmRole::Forward;
        let gemm = GemmOp { role, m: 8, n: 64, k, batch, accumulate: false };
        let single = SingleGemm::new(gemm, DType::Bf16, false);
        single.on_device(|context, scheduled| {
            let key = checked(context, scheduled).key;
            [key.a, key.b, key.c].map(|stored| stored.alignment_bytes)
        })
    };
    assert_eq!(aligned(1, 12), [256, 256, 256]);
    // Members of W and Y are 64 elements wide, those of X 12.
    assert_eq!(aligned(2, 12), [128, 8, 128]);
}

/// The bounds check detects every mutation of a matmul.
#[test]
fn mutated_matmuls_fail_the_bounds_check() {
    type Mutation = (&'static str, fn(&mut Matmul));
    let mutations: [Mutation; 13] = [
        ("A begins late", |matmul| matmul.a.offset += 2),
        ("B is of another buffer", |matmul| matmul.b.buffer = matmul.c.buffer),
        ("C begins early", |matmul| matmul.c.offset -= 256),
        ("D begins early", |matmul| matmul.d.offset -= 256),
        ("C is where A is", |matmul| matmul.c = matmul.a),
        ("a wider A", |matmul| matmul.key.a.leading_dimension += 1),
        ("a narrower B", |matmul| matmul.key.b.leading_dimension -= 1),
        ("members of C overlap", |matmul| matmul.key.c.batch_stride -= 1),
        ("one member more", |matmul| matmul.key.batch += 1),
        ("one row more", |matmul| matmul.key.m += 1),
        ("a longer sum", |matmul| matmul.key.k += 1),
        ("another format", |matmul| matmul.key.b.dtype = DType::F32),
        ("a misaligned address", |matmul| matmul.key.b.alignment_bytes = 256),
    ];
    let sizes = (5, 6, 7);
    for role in FORMS {
        let (m, n, k) = sizes;
        let gemm = GemmOp { role, m, n, k, batch: 3, accumulate: true };
        SingleGemm::new(gemm, DType::Bf16, false).on_device(|context, scheduled| {
            let original = checked(context, scheduled);
            for (name, mutate) in mutations {
                let mut mutated = original;
                mutate(&mut mutated);
                let result = check_matmul(context.device, scheduled, &mutated);
                assert!(result.is_err(), "{role:?}: {name} is not detected");
            }
            let mut flipped = original;
            flipped.key.operation_b = match flipped.key.operation_b {
                Transpose::N => Transpose::T,
                Transpose::T => Transpose::N,
            };
            assert!(check_matmul(context.device, scheduled, &flipped).is_err());
        });
    }
}

#[test]
fn unsupported_gemms_are_reported() {
    let role = GemmRole::InputGradient;
    let gemm = GemmOp { role, m: 4, n: 8, k: 16, batch: 1, accumulate: true };
    let unsupported = |mutate: fn(&mut SingleGemm)| {
        let mut single = SingleGemm::new(gemm.clone(), DType::Bf16, false);
        mutate(&mut single);
        single.unsupported()
    };
    type UnsupportedCase = (fn(&mut SingleGemm), &'static str);
    let cases: [UnsupportedCase; 8] = [
        (|single| single.instr.reads[1].extent.dtype = DType::U32, "bf16 by u32 into bf16"),
        (|single| single.instr.reads[0].extent.columns = 15, "an operand is"),
        (|single| single.instr.reads.truncate(2), "it reads 2 operands"),
        (
            |single| single.instr.reads[2] = single.instr.reads[0],
            "it accumulates into another operand",
        ),
        (|single| single.case.phase = Phase::Step, "in the step phase"),
        (
            |single| single.instr.action = Action::Fused(narrows_plan::program::FusedOp::Add),
            "`add` is not a GEMM",
        ),
        (
            |single| {
                let Action::Gemm(gemm) = &mut single.instr.action else { return };
                gemm.m = 1 << 31;
            },
            "exceeds 32 bits",
        ),
        (
            |single| {
                let (x, y) = (single.instr.reads[0].buffer.0, single.instr.writes[0].buffer.0);
                let buffers = &mut single.case.stage.buffers;
                buffers[x as usize].offset = buffers[y as usize].offset;
            },
            "its result overlaps an operand",
        ),
    ];
    for (mutate, expected) in cases {
        let message = unsupported(mutate);
        assert!(message.contains(expected) && message.contains("of a test"), "{message}");
    }
    let batched = GemmOp { batch: 2, accumulate: false, ..gemm };
    let message = SingleGemm::new(batched.clone(), DType::Bf16, true).unsupported();
    assert!(message.contains("a tied head cannot be batched"), "{message}");
    let forward = GemmOp { role: GemmRole::Forward, batch: 1, accumulate: true, ..batched };
    let mut residual = SingleGemm::new(forward, DType::Bf16, false);
    residual.instr.reads[2] = residual.instr.reads[0];
    assert!(residual.unsupported().contains("it adds 4×8"), "{}", residual.unsupported());
}

/// All GEMMs of the largest presets are supported and within bounds; none is executed.
#[test]
fn gemms_of_the_largest_presets_are_supported() {
    let mut wide = 0;
    for (seed, name) in [(1, "cola-7b"), (2, "llama-40b"), (3, "lax-7b"), (4, "cola-30b")] {
        let model = presets::find(name).unwrap();
        let mesh = Mesh { tensor: 4, pipeline: 1, data: 2, context: 1 };
        let workload = Workload { global_batch: 8, sequence_length: 4096, micro_batch: 4 };
        for precision in [Precision::MixedBf16, Precision::Fp32] {
            let context = Context::new(mesh, workload, precision, Zero::One);
            let mut rng = TestRng::new(seed);
            let plan = (0..20).find_map(|_| draw_plan(&mut rng, &model, context));
            let plan = plan.unwrap_or_else(|| panic!("no plan of {name} was drawn"));
            let (mut count, mut keys) = (0, HashSet::new());
            for_each_gemm(&lower(&plan.resolve(&model).unwrap()), |context, scheduled| {
                let key = checked(context, scheduled).key;
                // The fastest algorithms require 16 bytes.
                for stored in [key.a, key.b, key.c] {
                    assert!(stored.alignment_bytes >= 16, "{key:?}");
                }
                count += 1;
                keys.insert(key);
            });
            println!("{name}: {count} matmuls on all devices, {} different ones", keys.len());
            wide =
                wide.max(keys.iter().map(|key| key.c.leading_dimension * key.n).max().unwrap_or(0));
        }
    }
    // The bytes of one result exceed 31 bits.
    assert!(wide > 1 << 27, "{wide}");
}
