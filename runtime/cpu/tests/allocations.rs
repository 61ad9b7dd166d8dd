//! What a step allocates. Every allocation of every thread is counted while a session makes steps.
//!
//! Devices allocate nothing: what is counted is as much whatever a program has to do, with two
//! microbatches or six. It is what a session needs to call its devices together, and to say what came
//! of them: lists of devices and stages, and the counts of the report.
//!
//! Apart from this, products allocate. The library that computes them (gemm 0.19) asks in each of
//! them for a list of flags, and where it packs operands for the memory to pack in, and frees both
//! before the product ends; and once in each thread for memory of the size of the second cache. It
//! asks for zeroed bytes and for whole cache lines, which nothing else in a step does, so it can be
//! told apart.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::SeqCst};

use narrows_plan::graph::Grouping;
use narrows_plan::lower;
use narrows_plan::{CheckedProgram, Plan, Precision};
use narrows_plan::{Context, Zero};
use narrows_plan::{Mesh, Workload};
use narrows_runtime::data::{Sampler, SamplerConfig, TokenFile};
use narrows_runtime::session::StepInput;
use narrows_runtime::{Optimizer, Trainer};
use narrows_test_support::plans::{TestRng, draw_plan, drawable_models, to_json};

/// The system's allocator, with a count.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of whole cache lines or zeroed bytes, and others.
static OF_PRODUCTS: AtomicU64 = AtomicU64::new(0);
static OTHERS: AtomicU64 = AtomicU64::new(0);
/// Bytes that are allocated, and not freed.
static LIVE: AtomicI64 = AtomicI64::new(0);
static LIVE_MAX: AtomicI64 = AtomicI64::new(0);

const CACHE_LINE: usize = 64;

fn count(layout: Layout, zeroed: bool) {
    let of_products = layout.align() >= CACHE_LINE || (zeroed && layout.align() == 1);
    let counter = if of_products { &OF_PRODUCTS } else { &OTHERS };
    counter.fetch_add(1, SeqCst);
    let size = layout.size() as i64;
    LIVE_MAX.fetch_max(LIVE.fetch_add(size, SeqCst) + size, SeqCst);
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout, false);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout, true);
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, SeqCst);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// What was counted from one point to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counted {
    of_products: u64,
    others: u64,
    /// Bytes that are still there at the end.
    kept: i64,
    /// Bytes that were there at once.
    peak: i64,
}

fn counted(work: impl FnOnce()) -> Counted {
    let (of_products, others) = (OF_PRODUCTS.load(SeqCst), OTHERS.load(SeqCst));
    let live = LIVE.load(SeqCst);
    LIVE_MAX.store(live, SeqCst);
    work();
    Counted {
        of_products: OF_PRODUCTS.load(SeqCst) - of_products,
        others: OTHERS.load(SeqCst) - others,
        kept: LIVE.load(SeqCst) - live,
        peak: LIVE_MAX.load(SeqCst) - live,
    }
}

/// What a step may allocate besides its products: what calls the devices together and
/// takes what came of them, what they hold besides their arenas, and for each stage the maps of its
/// report. A device that divides its
/// kernels among threads is called through a queue, which takes a block of memory every 63 steps.
fn allowed(mesh: Mesh, threads: usize) -> u64 {
    let queues = if threads > 1 { mesh.devices() } else { 0 };
    7 + 6 * mesh.pipeline + queues
}

fn context(mesh: [u64; 3], microbatches: u64, zero: Zero) -> Context {
    let [tensor, pipeline, data] = mesh;
    let mesh = Mesh { tensor, pipeline, data };
    let global_batch = 2 * data * microbatches;
    let workload = Workload { global_batch, sequence_length: 8, micro_batch: 2 };
    Context { mesh, workload, precision: Precision::Full32, zero }
}

fn tokens(plan: &Plan) -> Vec<u32> {
    let work = plan.workload;
    (0..work.global_batch * work.sequence_length).map(|at| (at * 7 % 256) as u32).collect()
}

/// Gradients are clipped in every step.
fn optimizer() -> Optimizer {
    Optimizer { clip_norm: 1e-3, ..Optimizer::new(1e-3, 1, 100) }
}

/// What is special about the plans that were run.
#[derive(Debug, Default)]
struct Seen {
    crossing: usize,
    grouped: usize,
    redone: usize,
}

impl Seen {
    fn add(&mut self, plan: &Plan) {
        let blocks = || plan.blocks.values();
        self.crossing += usize::from(plan.crossing_layout.is_some());
        self.grouped += usize::from(blocks().any(|block| block.grouping != Grouping::default()));
        self.redone += usize::from(blocks().any(|block| !block.recompute.is_empty()));
    }
}

fn devices_allocate_nothing(seen: &mut Seen) {
    let models: Vec<_> =
        drawable_models().into_iter().filter(|model| model.hidden == 256).collect();
    let mut dice = TestRng(41);
    for (mesh, microbatches, threads, zero) in [
        ([1, 1, 1], 1, 1, Zero::Off),
        ([1, 1, 1], 2, 1, Zero::Off),
        ([1, 1, 1], 1, 2, Zero::Off),
        ([2, 1, 1], 1, 1, Zero::Off),
        ([2, 1, 1], 3, 2, Zero::Off),
        ([1, 2, 1], 2, 1, Zero::Off),
        ([1, 2, 1], 6, 1, Zero::Off),
        ([1, 1, 2], 2, 1, Zero::One),
        ([1, 3, 1], 4, 1, Zero::Off),
        ([2, 2, 2], 2, 1, Zero::One),
    ] {
        for _ in 0..4 {
            let (model, plan) = loop {
                let model = dice.pick(&models).unwrap();
                let context = context(mesh, microbatches, zero);
                if let Some(plan) = draw_plan(&mut dice, model, context) {
                    break (model, plan);
                }
            };
            seen.add(&plan);
            let program = CheckedProgram::check(lower(&plan.resolve(model).unwrap())).unwrap();
            let mut session = narrows_cpu::session(model, program, threads).unwrap();
            session.initialise(model, 1).unwrap();
            session.record_instruction_spans();
            let (tokens, optimizer) = (tokens(&plan), optimizer());
            let input = StepInput { tokens: &tokens, targets: &tokens };
            // The first step makes scratch memory as large as it takes.
            for _ in 0..2 {
                session.step(&optimizer, input).unwrap();
            }
            for step in 3..6 {
                let mut norm = 0.0;
                let found = counted(|| {
                    norm = session.step(&optimizer, input).unwrap().gradient_norm;
                });
                println!("{mesh:?} {microbatches} {threads}: {found:?}");
                let what = || format!("step {step}: {found:?} of\n{}", to_json(&plan));
                assert!(norm > optimizer.clip_norm, "nothing is clipped");
                assert!(found.others <= allowed(plan.mesh, threads), "{}", what());
                // A thread of a pool may meet its first product late, and one of an earlier session
                // may give back what it held.
                assert!(found.kept <= 0 || threads > 1, "{}", what());
            }
        }
    }
}

/// Reading tokens allocates nothing.
fn a_trainer_adds_nothing() {
    let model = narrows_plan::model::presets::find("cola-tiny").unwrap();
    let context = context([2, 1, 1], 2, Zero::Off);
    let mut dice = TestRng(7);
    let plan = (0..100).find_map(|_| draw_plan(&mut dice, &model, context)).unwrap();
    let program = CheckedProgram::check(lower(&plan.resolve(&model).unwrap())).unwrap();
    let mut session = narrows_cpu::session(&model, program, 1).unwrap();
    session.initialise(&model, 1).unwrap();
    let text = "all that is read is read from here ".repeat(40);
    let file = Arc::new(TokenFile::from_text(Path::new("text"), text.as_bytes()).unwrap());
    let sampling = SamplerConfig { sequence_length: 8, vocabulary: model.vocab as u32, seed: 1 };
    let sampler = Sampler::new(file, sampling).unwrap();
    let mut trainer = Trainer::new(session, sampler, optimizer()).unwrap();
    for step in 1..80 {
        let found = counted(|| drop(trainer.step().unwrap()));
        if step > 2 {
            assert!(found.others <= allowed(plan.mesh, 1), "step {step}: {found:?}");
            assert!(found.kept <= 0, "step {step}: {found:?}");
        }
    }
}

/// One test, because another's allocations would be counted too.
#[test]
fn a_step_allocates_a_few_lists_and_nothing_for_its_instructions() {
    let mut seen = Seen::default();
    devices_allocate_nothing(&mut seen);
    println!("{seen:?}");
    assert!(seen.crossing > 2 && seen.grouped > 2 && seen.redone > 2, "{seen:?}");
    a_trainer_adds_nothing();
}
