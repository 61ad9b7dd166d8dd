//! Memory allocations of all threads during the steps of a session.
//!
//! Instructions do not allocate, so the number of allocations is independent of the number of
//! microbatches. A session allocates to start its devices and to collect their results: lists of devices
//! and stages, and the counts of the report.
//!
//! GEMMs are an exception. The gemm crate (0.19) allocates a list of flags and packing memory in each GEMM
//! and frees both at its end, and allocates memory of the size of the L2 cache once per thread. It requests
//! zeroed bytes or whole cache lines, as nothing else in a step does, so its allocations are counted
//! separately.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicI64, AtomicU64};

use narrows_plan::graph::Grouping;
use narrows_plan::program::{Program, StageProgram};
use narrows_plan::{
    CheckedProgram, Context, ContextAttention, Mesh, Plan, Precision, Workload, Zero, lower,
};
use narrows_runtime::data::{Sampler, SamplerConfig, TargetRule, TokenFile};
use narrows_runtime::session::StepInput;
use narrows_runtime::{Optimizer, Trainer};
use narrows_test_support::plans::{TestRng, draw_plan, to_json};
use narrows_test_support::small_models::small_models;

/// The system allocator, with counts.
struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Allocations of GEMMs: whole cache lines, or zeroed bytes.
static GEMM_ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// Allocations outside of GEMMs.
static STEP_ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// Bytes allocated and not yet freed.
static LIVE: AtomicI64 = AtomicI64::new(0);
static LIVE_MAX: AtomicI64 = AtomicI64::new(0);

const CACHE_LINE: usize = 64;

fn count(layout: Layout, zeroed: bool) {
    let is_gemm = layout.align() >= CACHE_LINE || (zeroed && layout.align() == 1);
    let counter = if is_gemm { &GEMM_ALLOCATIONS } else { &STEP_ALLOCATIONS };
    counter.fetch_add(1, SeqCst);
    let size = layout.size() as i64;
    LIVE_MAX.fetch_max(LIVE.fetch_add(size, SeqCst) + size, SeqCst);
}

// SAFETY: all calls are forwarded to the system allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout, false);
        // SAFETY: the caller upholds the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout, true);
        // SAFETY: the caller upholds the contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, SeqCst);
        // SAFETY: the caller upholds the contract.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Allocations during a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AllocationCounts {
    in_gemms: u64,
    outside_gemms: u64,
    /// Bytes allocated in the call and not freed at its end.
    leaked: i64,
    /// Largest number of bytes allocated at once.
    peak: i64,
}

fn count_allocations(run: impl FnOnce()) -> AllocationCounts {
    let (in_gemms, outside_gemms) = (GEMM_ALLOCATIONS.load(SeqCst), STEP_ALLOCATIONS.load(SeqCst));
    let live = LIVE.load(SeqCst);
    LIVE_MAX.store(live, SeqCst);
    run();
    AllocationCounts {
        in_gemms: GEMM_ALLOCATIONS.load(SeqCst) - in_gemms,
        outside_gemms: STEP_ALLOCATIONS.load(SeqCst) - outside_gemms,
        leaked: LIVE.load(SeqCst) - live,
        peak: LIVE_MAX.load(SeqCst) - live,
    }
}

/// Limit of the allocations of a step outside of GEMMs: to start the devices and collect their
/// results, and for each stage the maps of its report, with a node for every 6 to 11 kinds of
/// instructions. A device with several kernel threads is called through a queue, which allocates a
/// block every 63 steps.
fn allocations_max(mesh: Mesh, threads: usize) -> u64 {
    let queues = if threads > 1 { mesh.devices() } else { 0 };
    7 + 8 * mesh.pipeline + queues
}

/// A context with ring attention on its context axis.
fn context(mesh: [u64; 4], microbatches: u64, zero: Zero) -> Context {
    let [tensor, pipeline, data, context] = mesh;
    let mesh = Mesh { tensor, pipeline, data, context };
    let global_batch = 2 * data * microbatches;
    let workload = Workload { global_batch, sequence_length: 8, micro_batch: 2 };
    Context {
        context_attention: ContextAttention::Ring,
        overlap_grad_reduce: true,
        overlap_param_gather: true,
        overlap_tensor_collectives: true,
        ..Context::new(mesh, workload, Precision::Fp32, zero)
    }
}

fn tokens(plan: &Plan) -> Vec<u32> {
    let workload = plan.workload;
    let count = workload.global_batch * workload.sequence_length;
    (0..count).map(|n| (n * 7 % 256) as u32).collect()
}

/// Clips the gradients in every step.
fn optimizer() -> Optimizer {
    Optimizer { clip_norm: 1e-3, ..Optimizer::new(1e-3, 1, 100) }
}

/// Number of plans with a property.
#[derive(Debug, Default)]
struct PlanCoverage {
    crossing: usize,
    grouped: usize,
    recomputed: usize,
    overlapped: usize,
}

impl PlanCoverage {
    fn add(&mut self, plan: &Plan) {
        let blocks = || plan.blocks.values();
        self.crossing += usize::from(plan.crossing_layout.is_some());
        self.grouped += usize::from(blocks().any(|block| block.grouping != Grouping::default()));
        self.recomputed += usize::from(blocks().any(|block| !block.recompute.is_empty()));
    }

    /// Programs with collectives that run on a communication thread.
    fn add_overlap(&mut self, program: &Program) {
        let overlaps = |stage: &StageProgram| {
            !stage.gradient_buckets.is_empty() || !stage.gather_buckets.is_empty()
        };
        self.overlapped += usize::from(program.stages.iter().any(overlaps));
    }
}

fn test_sessions(coverage: &mut PlanCoverage) {
    let models = small_models();
    let mut rng = TestRng::new(41);
    for (mesh, microbatches, threads, zero) in [
        ([1, 1, 1, 1], 1, 1, Zero::Off),
        ([1, 1, 1, 1], 2, 1, Zero::Off),
        ([1, 1, 1, 1], 1, 2, Zero::Off),
        ([2, 1, 1, 1], 1, 1, Zero::Off),
        ([2, 1, 1, 1], 3, 2, Zero::Off),
        ([1, 2, 1, 1], 2, 1, Zero::Off),
        ([1, 2, 1, 1], 6, 1, Zero::Off),
        ([1, 1, 2, 1], 2, 1, Zero::One),
        ([1, 3, 1, 1], 4, 1, Zero::Off),
        ([2, 2, 2, 1], 2, 1, Zero::One),
        ([1, 1, 1, 2], 2, 1, Zero::One),
        ([1, 1, 1, 4], 1, 2, Zero::Off),
    ] {
        for _ in 0..4 {
            let (model, plan) = loop {
                let model = rng.pick(&models).unwrap();
                let context = context(mesh, microbatches, zero);
                if let Some(plan) = draw_plan(&mut rng, model, context) {
                    break (model, plan);
                }
            };
            coverage.add(&plan);
            let program = CheckedProgram::check(lower(&plan.resolve(model).unwrap())).unwrap();
            coverage.add_overlap(program.program());
            let mut session = narrows_cpu::session(model, program, threads).unwrap();
            session.initialise(model, 1).unwrap();
            session.record_instruction_spans();
            let (tokens, optimizer) = (tokens(&plan), optimizer());
            let input = StepInput { tokens: &tokens, targets: &tokens };
            // The first step grows scratch memory to what the kernels need.
            for _ in 0..2 {
                session.step(&optimizer, input).unwrap();
            }
            for step in 3..6 {
                let mut norm = 0.0;
                let counts = count_allocations(|| {
                    norm = session.step(&optimizer, input).unwrap().gradient_norm;
                });
                println!("{mesh:?} {microbatches} {threads}: {counts:?}");
                let case = || format!("step {step}: {counts:?} of\n{}", to_json(&plan));
                assert!(norm > optimizer.clip_norm, "gradients are not clipped");
                assert!(counts.outside_gemms <= allocations_max(plan.mesh, threads), "{}", case());
                // A thread of a pool may run its first GEMM in a later step, and a thread of an earlier
                // session may free its memory.
                assert!(counts.leaked <= 0 || threads > 1, "{}", case());
            }
        }
    }
}

/// A trainer, which reads tokens, allocates no more than its session.
fn test_trainer() {
    let model = narrows_plan::model::presets::find("cola-tiny").unwrap();
    let context = context([2, 1, 1, 1], 2, Zero::Off);
    let mut rng = TestRng::new(7);
    let plan = (0..100).find_map(|_| draw_plan(&mut rng, &model, context)).unwrap();
    let program = CheckedProgram::check(lower(&plan.resolve(&model).unwrap())).unwrap();
    let mut session = narrows_cpu::session(&model, program, 1).unwrap();
    session.initialise(&model, 1).unwrap();
    let text = "all that is read is read from here ".repeat(40);
    let file = Arc::new(TokenFile::from_text(Path::new("text"), text.as_bytes()).unwrap());
    let sampling = SamplerConfig {
        sequence_length: 8,
        vocabulary: model.vocab as u32,
        seed: 1,
        targets: TargetRule::default(),
    };
    let sampler = Sampler::new(file, sampling).unwrap();
    let mut trainer = Trainer::new(session, sampler, optimizer()).unwrap();
    for step in 1..80 {
        let counts = count_allocations(|| drop(trainer.step().unwrap()));
        if step > 2 {
            assert!(
                counts.outside_gemms <= allocations_max(plan.mesh, 1),
                "step {step}: {counts:?}"
            );
            assert!(counts.leaked <= 0, "step {step}: {counts:?}");
        }
    }
}

/// A single test, because allocations of concurrent tests would be counted too.
#[test]
fn instructions_do_not_allocate() {
    let mut coverage = PlanCoverage::default();
    test_sessions(&mut coverage);
    println!("{coverage:?}");
    assert!(
        coverage.crossing > 2
            && coverage.grouped > 2
            && coverage.recomputed > 2
            && coverage.overlapped > 2,
        "{coverage:?}"
    );
    test_trainer();
}
