//! Time to price candidates after every block is solved, and its growth with the model and the number of
//! devices.
//!
//! ```sh
//! cargo bench --bench candidates            # and a table of ratios at the end
//! cargo bench --bench candidates -- blocks  # one axis
//! ```
//!
//! A candidate is a partition of the first blocks into the first stages for one mesh, microbatch, ZeRO stage and layout
//! of the hidden state, priced by its lower bound on the step time. Without an incumbent plan nothing is pruned: all
//! candidates are priced, in one thread.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use divan::Bencher;
use divan::counter::ItemsCount;
use narrows_cost_model::{Executor, InFlight, PassTimesMin, Prices, profile};
use narrows_plan::graph::SegmentKind;
use narrows_plan::kernel::{Gemm, Kernel};
use narrows_plan::model::{Model, Weight, presets};
use narrows_plan::program::StageSchedule;
use narrows_plan::strategy::{BoundaryLayout, TiedWeightLayout};
use narrows_plan::{Context, DType, Mesh};
use narrows_planner::{
    Deadline, DivisionSearch, MemoryLimit, PruningCutoff, Request, SegmentSolver, SegmentSpec,
    StageAssignment, StageBlocks, StageOverhead, StepSchedule, contexts,
};

/// Variations of CoLA-7B and of the number of devices.
#[derive(Clone, Copy)]
struct Shape {
    blocks: usize,
    devices: u64,
    rank: u64,
}

const COLA_7B: Shape = Shape { blocks: 32, devices: 64, rank: 1024 };
const BLOCKS: [usize; 4] = [8, 16, 32, 64];
const DEVICES: [u64; 4] = [4, 16, 64, 512];
/// From a sixteenth of the hidden features to half of them.
const RANKS: [u64; 4] = [256, 512, 1024, 2048];

fn main() {
    divan::main();
    // Not with a filter, or when benchmarks are listed or tested.
    if std::env::args().skip(1).all(|argument| argument == "--bench") {
        print_ratios();
    }
}

#[divan::bench(args = ["cola-1b", "cola-7b", "cola-30b"], sample_count = 20)]
fn presets_on_64(bencher: Bencher, name: &str) {
    let model = presets::find(name).expect("a preset");
    bench(bencher, &request(model, COLA_7B.devices));
}

#[divan::bench(args = BLOCKS, sample_count = 20)]
fn blocks(bencher: Bencher, blocks: usize) {
    bench(bencher, &Shape { blocks, ..COLA_7B }.request());
}

#[divan::bench(args = DEVICES, sample_count = 20)]
fn devices(bencher: Bencher, devices: u64) {
    bench(bencher, &Shape { devices, ..COLA_7B }.request());
}

#[divan::bench(args = RANKS, sample_count = 20)]
fn rank(bencher: Bencher, rank: u64) {
    bench(bencher, &Shape { rank, ..COLA_7B }.request());
}

fn bench(bencher: Bencher, request: &Request) {
    let solved = SolvedRequest::new(request);
    bencher.counter(ItemsCount::new(solved.price())).bench_local(|| solved.price());
}

impl Shape {
    fn request(self) -> Request {
        let mut model = presets::find("cola-7b").expect("a preset");
        let mut block = model.blocks[0].clone();
        let [q, k, v, o] = [&mut block.q, &mut block.k, &mut block.v, &mut block.o];
        for linear in [q, k, v, o, &mut block.gate, &mut block.up, &mut block.down] {
            if let Weight::Pair(pair) = &mut linear.weight {
                pair.rank = self.rank;
            }
        }
        model.blocks = vec![block; self.blocks];
        request(model, self.devices)
    }
}

/// One sequence of 4,096 tokens for each device, with a microbatch of one sequence, without a memory limit.
fn request(model: Model, devices: u64) -> Request {
    Request {
        micro_batch: Some(1),
        memory_limit: MemoryLimit::None,
        ..Request::new(
            model,
            profile::preset("a100-80gb").expect("a profile"),
            devices,
            devices,
            4096,
        )
    }
}

/// The solved blocks of every context and boundary layout of a request.
struct SolvedRequest(Vec<SolvedContext>);

/// A context and a boundary layout, with solved blocks.
struct SolvedContext {
    step: StepSchedule,
    overheads: Vec<StageOverhead>,
    cutoff: PruningCutoff,
    /// Bounds by stage, and by number of blocks minus one.
    assignments: Vec<Vec<Arc<StageAssignment>>>,
}

impl SolvedRequest {
    fn new(request: &Request) -> SolvedRequest {
        let segments = SegmentSolver::new(request, Deadline::none());
        let mut solved_contexts = vec![];
        for context in contexts(request) {
            for boundary in segments.boundary_layouts(&context) {
                solved_contexts.extend(SolvedContext::new(request, &segments, &context, boundary));
            }
        }
        SolvedRequest(solved_contexts)
    }

    /// Prices all candidates and counts them.
    fn price(&self) -> u64 {
        self.0.iter().map(SolvedContext::price).sum()
    }
}

impl SolvedContext {
    /// `None` when the context has no legal decisions with this layout.
    fn new(
        request: &Request,
        segments: &SegmentSolver,
        context: &Context,
        boundary: BoundaryLayout,
    ) -> Option<SolvedContext> {
        let tied = request.model.tied.then_some(TiedWeightLayout::ALL[0]);
        let solve = |kind, tied_weight| {
            let segment = match kind {
                SegmentKind::Block => SegmentSpec::block(0, boundary),
                _ => SegmentSpec::embedding_or_head(kind, boundary, tied_weight),
            };
            segments.fastest(segment, context)
        };
        let block = solve(SegmentKind::Block, None)?;
        let ends = [solve(SegmentKind::Embedding, tied)?, solve(SegmentKind::Head, tied)?];

        let (blocks, stages) = (request.model.blocks.len(), context.mesh.pipeline);
        let step = StepSchedule::of(context);
        let mut overheads = vec![StageOverhead::default(); stages as usize];
        for (stage, end) in [0, stages as usize - 1].into_iter().zip(&ends) {
            overheads[stage].forward += end.time.forward;
            overheads[stage].backward += end.time.backward;
            overheads[stage].step_phase += end.time.step_phase;
        }
        let assignments = (0..stages)
            .map(|stage| {
                let schedule = StageSchedule::of(context, stage);
                let kept = schedule.microbatches_in_flight(0) * context.pass_microbatches();
                let in_flight = InFlight { kept, ..InFlight::default() };
                let assignment = |count| {
                    Arc::new(StageAssignment::new(
                        vec![block.clone(); count],
                        std::iter::repeat(in_flight),
                    ))
                };
                (1..=blocks).map(assignment).collect()
            })
            .collect();
        let microbatch_time = (block.time.forward + block.time.backward).0;
        let steps = vec![0.0; blocks];
        let cutoff = PruningCutoff {
            microbatch_times_min: vec![microbatch_time; blocks],
            passes_min: vec![PassTimesMin::default(); blocks],
            uncounted_reductions_min: vec![0.0; blocks],
            step_phase_times_min: steps.clone(),
            single_microbatch_steps_min: steps,
            first_stage_weights: [0; 2],
            weighted_steps_min: vec![[0.0; 2]; blocks],
            joint: None,
            step_time: f64::INFINITY,
        };
        Some(SolvedContext { step, overheads, cutoff, assignments })
    }

    fn price(&self) -> u64 {
        let choice =
            |blocks: StageBlocks| Some(self.assignments[blocks.stage][blocks.count - 1].clone());
        let search = DivisionSearch {
            overheads: &self.overheads,
            step: self.step,
            cutoff: &self.cutoff,
            is_interrupted: &|| false,
        };
        divan::black_box(search.undominated_partitions(&choice, None)).1
    }
}

/// Prints the costs along each axis, with the ratios to the row above.
fn print_ratios() {
    println!("\n{:>8} {:>8} {:>20} {:>20} {:>20}", "", "", "solve once", "candidates", "price all");
    let axis = |name: &str, rows: &[(String, Shape)]| {
        let mut previous: Option<Cost> = None;
        for (label, shape) in rows {
            let cost = Cost::of(&shape.request());
            println!("{name:>8} {label:>8} {}", cost.row(previous.as_ref()));
            previous = Some(cost);
        }
    };
    axis("blocks", &BLOCKS.map(|blocks| (blocks.to_string(), Shape { blocks, ..COLA_7B })));
    axis("devices", &DEVICES.map(|devices| (devices.to_string(), Shape { devices, ..COLA_7B })));
    axis("rank", &RANKS.map(|rank| (rank.to_string(), Shape { rank, ..COLA_7B })));
}

/// Prices GEMMs of different shapes.
#[divan::bench]
fn price_of_a_gemm(bencher: Bencher) {
    let profile = profile::preset("a100-80gb").expect("a profile");
    let prices = Prices::new(
        &profile,
        Executor::Captured,
        &Mesh { tensor: 4, pipeline: 1, data: 1, context: 1 },
    );
    let (input, output) = (DType::Bf16, DType::F32);
    let gemm = |n| Gemm {
        m: 4096,
        n,
        k: 1024,
        batch: 1,
        accumulate: true,
        residual: false,
        input,
        output,
    };
    let kernels: Vec<Kernel> = (256..1280).map(|n| Kernel::Gemm(gemm(n))).collect();
    bencher
        .counter(ItemsCount::new(kernels.len()))
        .bench_local(|| kernels.iter().map(|kernel| prices.kernel_time(kernel).0).sum::<f64>());
}

/// Times of a request.
struct Cost {
    solve: Duration,
    candidates: u64,
    price: Duration,
}

impl Cost {
    fn of(request: &Request) -> Cost {
        let start = Instant::now();
        let solved = SolvedRequest::new(request);
        let solve = start.elapsed();
        let price = || {
            let start = Instant::now();
            let candidates = solved.price();
            (start.elapsed(), candidates)
        };
        let (price, candidates) = (0..10).map(|_| price()).min().expect("ten measurements");
        Cost { solve, candidates, price }
    }

    fn row<'a>(&'a self, previous: Option<&'a Cost>) -> impl fmt::Display + 'a {
        let ratio = |value: fn(&Cost) -> f64| {
            previous.map_or(String::new(), |previous| {
                format!("(×{:.2})", value(self) / value(previous))
            })
        };
        format!(
            "{:>11.3?} {:>8} {:>11} {:>8} {:>11.3?} {:>8}",
            self.solve,
            ratio(|cost| cost.solve.as_secs_f64()),
            self.candidates,
            ratio(|cost| cost.candidates as f64),
            self.price,
            ratio(|cost| cost.price.as_secs_f64()),
        )
    }
}
