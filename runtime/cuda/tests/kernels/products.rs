//! Products as what cublasLtMatmul takes: its documented semantics, one number at a time, compute what the
//! processor's products do, on every product of drawn programs and on ragged sizes.

use std::collections::HashSet;

use narrows_cpu::kernels::{
    MatrixView, MatrixViewMut, Parallel, StridedMatrix, WriteMode, gemm_forward,
    gemm_input_gradient, gemm_weight_gradient,
};
use narrows_cuda::products::{self, Matmul, MatmulKey, MatmulSetting, Transpose};
use narrows_cuda::{LaunchContext, bounds};
use narrows_plan::lower::lower;
use narrows_plan::mesh::{Mesh, Workload};
use narrows_plan::model::presets;
use narrows_plan::program::{
    Access, Action, BufferId, GemmOp, GemmRole, Instr, Phase, Program, Region, Shard, StageProgram,
};
use narrows_plan::strategy::{Context, Zero};
use narrows_plan::{Bytes, DType, Precision};
use narrows_runtime::ScheduledInstruction;
use narrows_runtime::operand_range;

use super::case::{Case, each_moment};
use super::matmul::{bytes_of, execute, numbers};
use super::numbers::{assert_near, random};
use narrows_test_support::plans::{TestRng, draw_plan};
use narrows_test_support::small::{small_context, small_models};

/// What the processor's products make of the operands in an arena, in f32.
fn wanted(
    arena: &[u8],
    stage: &StageProgram,
    moment: &ScheduledInstruction,
    tied: bool,
) -> Vec<f32> {
    let Instr { action, reads, writes, .. } = moment.instr;
    let Action::Gemm(of) = action else { panic!("a product") };
    let weight = if of.role == GemmRole::WeightGradient { &writes[0] } else { &reads[1] };
    let shard = &stage.buffer(weight.buffer).shard;
    let head = shard.as_ref().is_some_and(|s| s.members.iter().any(|(name, ..)| name == "head"));
    let transposed = tied && head;
    let operand = |access: &Access| {
        let range = operand_range(stage, access, moment.slot);
        numbers(&arena[range.start as usize..range.end as usize], access.extent.dtype)
    };
    let sides = |access: &Access| (access.extent.rows as usize, access.extent.columns as usize);
    let [left, right] = [&reads[0], &reads[1]].map(operand);
    let mut made = operand(&writes[0]);
    let view = |numbers, access| MatrixView::new(numbers, sides(access).0, sides(access).1);
    let w: StridedMatrix = if transposed && of.role != GemmRole::WeightGradient {
        let (rows, columns) = sides(&reads[1]);
        MatrixView::new(&right, columns, rows).transposed()
    } else {
        view(&right, &reads[1]).into()
    };
    let write = if of.accumulate { WriteMode::Add } else { WriteMode::Replace };
    let (rows, columns) = sides(&writes[0]);
    let (x, batch, serial) = (view(&left, &reads[0]), of.batch as usize, Parallel::SERIAL);
    match of.role {
        GemmRole::WeightGradient if transposed => {
            let y = MatrixViewMut::new(&mut made, columns, rows);
            gemm_weight_gradient(view(&right, &reads[1]), x, y, batch, write, serial);
        }
        form => {
            let y = MatrixViewMut::new(&mut made, rows, columns);
            match form {
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
    made
}

/// The product of an instruction, which touches all of its operands and nothing else.
#[track_caller]
fn checked(setting: &MatmulSetting, moment: &ScheduledInstruction) -> Matmul {
    let matmul = products::matmul(setting, moment).unwrap_or_else(|error| panic!("{error}"));
    let touched = bounds::check_product(setting.device, moment, &matmul)
        .unwrap_or_else(|error| panic!("{error}"));
    let size = |access: &Access| access.extent.bytes().0;
    let Instr { reads, writes, .. } = moment.instr;
    assert_eq!(touched.read, reads.iter().map(size).sum::<u64>());
    assert_eq!(touched.written, size(&writes[0]));
    matmul
}

/// In an arena of numbers that are none, the operands' are made and the product is executed.
#[track_caller]
fn compare(setting: &MatmulSetting, moment: &ScheduledInstruction, seed: u64) {
    let stage = setting.device.stage;
    let matmul = checked(setting, moment);
    let Instr { reads, writes, .. } = moment.instr;
    // What lies before the operands and after them is not needed.
    let ranges = reads.iter().chain(writes).map(|access| operand_range(stage, access, moment.slot));
    let end = ranges.map(|range| range.end).max().expect("operands") as usize;
    let mut arena = vec![0xff; end + 256];
    for (at, access) in reads.iter().enumerate() {
        let extent = access.extent;
        let numbers = random(seed + at as u64, extent.rows * extent.columns);
        let bytes = bytes_of(&numbers, extent.dtype);
        let begin = operand_range(stage, access, moment.slot).start as usize;
        arena[begin..][..bytes.len()].copy_from_slice(&bytes);
    }
    let expected = wanted(&arena, stage, moment, setting.tied);
    let mut after = arena.clone();
    execute(&mut after, &matmul);
    let written = operand_range(stage, &writes[0], moment.slot);
    let written = written.start as usize..written.end as usize;
    assert!(after[..written.start] == arena[..written.start], "bytes before C have changed");
    assert!(after[written.end..] == arena[written.end..], "bytes after C have changed");
    let dtype = writes[0].extent.dtype;
    let made = numbers(&after[written], dtype);
    assert!(made.iter().all(|x| x.is_finite()), "{matmul:?}");
    assert_near(dtype, &made, &expected, 2e-6);
}

/// Calls `visit` with every product of a program on every device.
fn each(program: &Program, mut visit: impl FnMut(&MatmulSetting, &ScheduledInstruction)) {
    each_moment(program, |device, moment| {
        if matches!(moment.instr.action, Action::Gemm(_)) {
            let workspace = products::workspace((9, 0));
            visit(&MatmulSetting { device, tied: program.tied, workspace }, moment);
        }
    });
}

fn drawn(precision: Precision, seeds: std::ops::Range<u64>) {
    let models = small_models();
    let (mut programs, mut seen) = (0, HashSet::new());
    for seed in seeds {
        let mut dice = TestRng(seed);
        let model = &models[seed as usize % models.len()];
        let context = small_context(&mut dice, precision);
        let Some(plan) = draw_plan(&mut dice, model, context) else { continue };
        programs += 1;
        each(&lower(&plan.resolve(model).unwrap()), |setting, moment| {
            let Action::Gemm(product) = &moment.instr.action else { return };
            let key = checked(setting, moment).key;
            // Another place in the arena changes nothing that has not been compared.
            if seen.insert((product.role, key)) {
                compare(setting, moment, seed);
            }
        });
    }
    println!("{programs} programs, {} different products", seen.len());
    assert!(programs > 20, "{programs} programs");
    let has = |wanted: &dyn Fn(GemmRole, &MatmulKey) -> bool| {
        seen.iter().any(|(form, key)| wanted(*form, key))
    };
    for form in [GemmRole::Forward, GemmRole::InputGradient, GemmRole::WeightGradient] {
        assert!(has(&|of, key| of == form && key.batch > 1), "no batched {form:?}");
        // The tied head's: the other forms of the weight.
        let usual = match form {
            GemmRole::Forward => (Transpose::N, Transpose::N),
            GemmRole::InputGradient => (Transpose::T, Transpose::N),
            GemmRole::WeightGradient => (Transpose::N, Transpose::T),
        };
        let operations = |key: &MatmulKey| (key.operation_a, key.operation_b);
        assert!(has(&|of, key| of == form && operations(key) == usual), "no {form:?}");
        if form != GemmRole::WeightGradient {
            assert!(has(&|of, key| of == form && operations(key) != usual), "no tied {form:?}");
        }
    }
    assert!(has(&|form, key| form == GemmRole::InputGradient && key.accumulate));
}

#[test]
fn products_of_drawn_programs_in_f32() {
    drawn(Precision::Full32, 0..50);
}

#[test]
fn products_of_drawn_programs_in_bf16() {
    drawn(Precision::MixedBf16, 50..100);
}

/// One product on operands of its own.
struct Alone {
    case: Case,
    instr: Instr,
    tied: bool,
}

impl Alone {
    fn new(product: GemmOp, dtype: DType, tied: bool) -> Alone {
        let GemmOp { role: form, m, n, k, batch, accumulate } = product;
        let mut case = Case::of(Action::Gemm(product.clone()), 1, (1, 1));
        let [left, right] = match form {
            GemmRole::Forward => [(m, k), (k, n)],
            GemmRole::InputGradient => [(m, k), (n, k)],
            GemmRole::WeightGradient => [(k, m), (k, n)],
        };
        let gradient = form == GemmRole::WeightGradient;
        let result = if gradient { DType::F32 } else { dtype };
        let shapes = [(left, dtype), (right, dtype), ((m, n), result)];
        let [left, right, result] = shapes
            .map(|((rows, columns), dtype)| case.buffer((rows, columns * batch), dtype, None));
        let weight: BufferId = if gradient { result } else { right };
        let weight = &mut case.stage.buffers[weight.0 as usize];
        weight.region = if gradient { Region::Gradient } else { Region::Weight };
        weight.shard = Some(Shard {
            split: narrows_plan::emit::WeightSplit::Whole,
            members: vec![("head".into(), weight.extent.rows, weight.extent.columns)],
            offset_stride: vec![0],
        });
        let mut reads = vec![case.whole(left), case.whole(right)];
        let writes = vec![case.whole(result)];
        reads.extend(accumulate.then_some(writes[0]));
        let instr = Instr { action: Action::Gemm(product), reads, writes, origin: "a test".into() };
        Alone { case, instr, tied }
    }

    fn on_device<R>(&self, work: impl FnOnce(&MatmulSetting, &ScheduledInstruction) -> R) -> R {
        let Case { context, constants, stage, decays, phase, .. } = &self.case;
        let device = LaunchContext { context, constants, stage, tensor: 0, data: 0, decays };
        let setting = MatmulSetting { device: &device, tied: self.tied, workspace: Bytes(1 << 20) };
        work(
            &setting,
            &ScheduledInstruction { instr: &self.instr, phase: *phase, microbatch: 0, slot: 0 },
        )
    }

    fn refusal(&self) -> String {
        self.on_device(|setting, moment| products::matmul(setting, moment).unwrap_err().to_string())
    }
}

const FORMS: [GemmRole; 3] = [GemmRole::Forward, GemmRole::InputGradient, GemmRole::WeightGradient];

/// Sizes that divide nothing, and the smallest; alone, side by side, and tied.
#[test]
fn ragged_sizes() {
    let mut dice = TestRng(7);
    for seed in 0..240 {
        let form = FORMS[dice.below(3)];
        let mut size = || [1, 1 + dice.below(9), 1 + dice.below(70)][dice.below(3)] as u64;
        let (m, n, k) = (size(), size(), size());
        let (tied, accumulate) = (dice.below(3) == 0, dice.below(2) == 0);
        let batch = if tied { 1 } else { 1 + dice.below(4) as u64 };
        let product = GemmOp { role: form, m, n, k, batch, accumulate };
        let dtype = [DType::Bf16, DType::F32][dice.below(2)];
        Alone::new(product, dtype, tied).on_device(|at, moment| compare(at, moment, seed));
    }
}

/// An address is said to be aligned as far as every member of a batch is, and no further.
#[test]
fn alignment_is_that_of_every_member() {
    let aligned = |batch, k| {
        let form = GemmRole::Forward;
        let product = GemmOp { role: form, m: 8, n: 64, k, batch, accumulate: false };
        let alone = Alone::new(product, DType::Bf16, false);
        alone.on_device(|setting, moment| {
            let key = checked(setting, moment).key;
            [key.a, key.b, key.c].map(|stored| stored.alignment_bytes)
        })
    };
    assert_eq!(aligned(1, 12), [256, 256, 256]);
    // Members of W and Y are 64 numbers wide, those of X 12.
    assert_eq!(aligned(2, 12), [128, 8, 128]);
}

/// Every damage to a product is found from the program alone.
#[test]
fn every_damage_is_refused() {
    type Damage = (&'static str, fn(&mut Matmul));
    let damages: [Damage; 12] = [
        ("A begins late", |of| of.a.offset += 2),
        ("B is of another buffer", |of| of.b.buffer = of.c.buffer),
        ("C begins early", |of| of.c.offset -= 256),
        ("C is where A is", |of| of.c = of.a),
        ("a wider A", |of| of.key.a.leading += 1),
        ("a narrower B", |of| of.key.b.leading -= 1),
        ("members of C share memory", |of| of.key.c.batch_stride -= 1),
        ("a member more", |of| of.key.batch += 1),
        ("a row more", |of| of.key.m += 1),
        ("a longer sum", |of| of.key.k += 1),
        ("other numbers", |of| of.key.b.dtype = DType::F32),
        ("an address that is not", |of| of.key.b.alignment_bytes = 256),
    ];
    let sizes = (5, 6, 7);
    for form in FORMS {
        let (m, n, k) = sizes;
        let product = GemmOp { role: form, m, n, k, batch: 3, accumulate: true };
        Alone::new(product, DType::Bf16, false).on_device(|setting, moment| {
            let whole = checked(setting, moment);
            for (name, damage) in damages {
                let mut damaged = whole;
                damage(&mut damaged);
                let found = bounds::check_product(setting.device, moment, &damaged);
                assert!(found.is_err(), "{form:?}: {name} is not refused");
            }
            let mut turned = whole;
            turned.key.operation_b = match turned.key.operation_b {
                Transpose::N => Transpose::T,
                Transpose::T => Transpose::N,
            };
            assert!(bounds::check_product(setting.device, moment, &turned).is_err());
        });
    }
}

#[test]
fn what_cublaslt_does_not_do_is_refused_by_name() {
    let form = GemmRole::Forward;
    let product = GemmOp { role: form, m: 4, n: 8, k: 16, batch: 1, accumulate: true };
    let alone = |damage: fn(&mut Alone)| {
        let mut alone = Alone::new(product.clone(), DType::Bf16, false);
        damage(&mut alone);
        alone.refusal()
    };
    type Damage = (fn(&mut Alone), &'static str);
    let cases: [Damage; 8] = [
        (|of| of.instr.reads[1].extent.dtype = DType::U32, "bf16 by u32 into bf16"),
        (|of| of.instr.reads[0].extent.columns = 15, "an operand is"),
        (|of| of.instr.reads.truncate(2), "it reads 2 operands"),
        (|of| of.instr.reads[2] = of.instr.reads[0], "it adds to something else"),
        (|of| of.case.phase = Phase::Step, "after all microbatches"),
        (
            |of| of.instr.action = Action::Fused(narrows_plan::program::FusedOp::Add),
            "`add` is no product",
        ),
        (
            |of| {
                let Action::Gemm(product) = &mut of.instr.action else { return };
                product.m = 1 << 31;
            },
            "beyond 32 bits",
        ),
        (
            |of| {
                let (x, y) = (of.instr.reads[0].buffer.0, of.instr.writes[0].buffer.0);
                let buffers = &mut of.case.stage.buffers;
                buffers[x as usize].offset = buffers[y as usize].offset;
            },
            "it writes over what it reads",
        ),
    ];
    for (damage, wanted) in cases {
        let said = alone(damage);
        assert!(said.contains(wanted) && said.contains("of a test"), "{said}");
    }
    let batched = GemmOp { batch: 2, accumulate: false, ..product };
    let said = Alone::new(batched, DType::Bf16, true).refusal();
    assert!(said.contains("a table of 2 heads side by side"), "{said}");
}

/// The largest presets: nothing is executed, and all is within bounds.
#[test]
fn the_largest_presets_fit() {
    let mut wide = 0;
    for (seed, name) in [(1, "cola-7b"), (2, "llama-40b"), (3, "lax-7b"), (4, "cola-30b")] {
        let model = presets::find(name).unwrap();
        let mesh = Mesh { tensor: 4, pipeline: 1, data: 2 };
        let workload = Workload { global_batch: 8, sequence_length: 4096, micro_batch: 4 };
        for precision in [Precision::MixedBf16, Precision::Full32] {
            let context = Context { mesh, workload, precision, zero: Zero::One };
            let mut dice = TestRng(seed);
            let plan = (0..20).find_map(|_| draw_plan(&mut dice, &model, context));
            let plan = plan.unwrap_or_else(|| panic!("no plan of {name} was drawn"));
            let (mut count, mut keys) = (0, HashSet::new());
            each(&lower(&plan.resolve(&model).unwrap()), |setting, moment| {
                let key = checked(setting, moment).key;
                // 16 bytes are what the fastest algorithms want.
                for stored in [key.a, key.b, key.c] {
                    assert!(stored.alignment_bytes >= 16, "{key:?}");
                }
                count += 1;
                keys.insert(key);
            });
            println!("{name}: {count} products of all devices, {} different ones", keys.len());
            wide = wide.max(keys.iter().map(|key| key.c.leading * key.n).max().unwrap_or(0));
        }
    }
    // Numbers of one result: their bytes do not fit in 31 bits, and are counted right.
    assert!(wide > 1 << 27, "{wide}");
}
