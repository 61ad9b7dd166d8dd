//! How fast candidates are priced once every block is solved, and how that grows with the model
//! and the machine.
//!
//! ```sh
//! cargo bench --bench candidates            # and a table of ratios at the end
//! cargo bench --bench candidates -- blocks  # one axis
//! ```
//!
//! A candidate is a division of the first blocks among the first stages of one mesh, microbatch,
//! ZeRO and layout of the hidden state, priced to its bound on the step time. Nothing is cut off by
//! a plan found before, so that all of them are priced, in one thread.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use divan::Bencher;
use divan::counter::ItemsCount;
use narrows_cost_model::{Executor, Prices, profile};
use narrows_plan::graph::SegmentKind;
use narrows_plan::kernel::{Gemm, Kernel};
use narrows_plan::model::{Model, Weight, presets};
use narrows_plan::program::microbatches_in_flight;
use narrows_plan::{
    Context,
    strategy::{BoundaryLayout, TiedWeightLayout},
};
use narrows_plan::{DType, Mesh};
use narrows_planner::{
    Deadline, MemoryLimit, PruningCutoff, Request, SegmentSolver, SegmentSpec, StageAssignment,
    StageOverhead, contexts, undominated_partitions,
};

/// What the axes vary: the shape of CoLA-7B, and how many devices.
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
    // A filter, a list or a test asks for less.
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
    let solved = Solved::new(request);
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

/// One sequence of 4,096 tokens a device and at a time, whatever the memory.
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

/// Every context and layout of a request, with all that pricing its candidates needs.
struct Solved(Vec<Division>);

/// What the blocks are divided among.
struct Division {
    microbatches: u64,
    extras: Vec<StageOverhead>,
    cutoff: PruningCutoff,
    /// By stage, and by number of blocks less one.
    allotments: Vec<Vec<Arc<StageAssignment>>>,
}

impl Solved {
    fn new(request: &Request) -> Solved {
        let segments = SegmentSolver::new(request, Deadline::none());
        let mut divisions = vec![];
        for context in contexts(request) {
            for border in segments.boundary_layouts(&context) {
                divisions.extend(Division::new(request, &segments, &context, border));
            }
        }
        Solved(divisions)
    }

    /// Prices all candidates and counts them.
    fn price(&self) -> u64 {
        self.0.iter().map(Division::price).sum()
    }
}

impl Division {
    /// `None` when the context has no legal decisions in this layout.
    fn new(
        request: &Request,
        segments: &SegmentSolver,
        context: &Context,
        border: BoundaryLayout,
    ) -> Option<Division> {
        let tied = request.model.tied.then_some(TiedWeightLayout::ALL[0]);
        let solve = |kind, tied_weight| {
            let part = match kind {
                SegmentKind::Block => SegmentSpec::block(0, border),
                _ => SegmentSpec::embedding_or_head(kind, border, tied_weight),
            };
            segments.fastest(part, context)
        };
        let block = solve(SegmentKind::Block, None)?;
        let ends = [solve(SegmentKind::Embedding, tied)?, solve(SegmentKind::Head, tied)?];

        let (blocks, stages) = (request.model.blocks.len(), context.mesh.pipeline);
        let microbatches = context.workload.microbatches(&context.mesh);
        let mut extras = vec![StageOverhead::default(); stages as usize];
        for (stage, end) in [0, stages as usize - 1].into_iter().zip(&ends) {
            extras[stage].forward += end.time.forward;
            extras[stage].backward += end.time.backward;
            extras[stage].step += end.time.step;
        }
        let allotments = (0..stages)
            .map(|stage| {
                let in_flight = microbatches_in_flight(stage, stages, microbatches);
                let of =
                    |count| Arc::new(StageAssignment::new(vec![block.clone(); count], in_flight));
                (1..=blocks).map(of).collect()
            })
            .collect();
        let turn = (block.time.forward + block.time.backward).0;
        let steps = vec![0.0; blocks];
        let cutoff = PruningCutoff {
            microbatch_times_min: vec![turn; blocks],
            step_times_min: steps,
            step_time: f64::INFINITY,
        };
        Some(Division { microbatches, extras, cutoff, allotments })
    }

    fn price(&self) -> u64 {
        let choice =
            |stage: usize, _, count: usize| Some(self.allotments[stage][count - 1].clone());
        let found = undominated_partitions(&self.extras, self.microbatches, &self.cutoff, &choice);
        divan::black_box(found).1
    }
}

/// How each axis changes the cost, against the row above.
fn print_ratios() {
    println!("\n{:>8} {:>8} {:>20} {:>20} {:>20}", "", "", "solve once", "candidates", "price all");
    let axis = |name: &str, rows: &[(String, Shape)]| {
        let mut before: Option<Cost> = None;
        for (label, shape) in rows {
            let cost = Cost::of(&shape.request());
            println!("{name:>8} {label:>8} {}", cost.against(before.as_ref()));
            before = Some(cost);
        }
    };
    axis("blocks", &BLOCKS.map(|blocks| (blocks.to_string(), Shape { blocks, ..COLA_7B })));
    axis("devices", &DEVICES.map(|devices| (devices.to_string(), Shape { devices, ..COLA_7B })));
    axis("rank", &RANKS.map(|rank| (rank.to_string(), Shape { rank, ..COLA_7B })));
}

/// One price, of products that all differ.
#[divan::bench]
fn price_of_a_product(bencher: Bencher) {
    let profile = profile::preset("a100-80gb").expect("a profile");
    let prices =
        Prices::new(&profile, Executor::Captured, &Mesh { tensor: 4, pipeline: 1, data: 1 });
    let (input, output) = (DType::Bf16, DType::F32);
    let product = |n| Gemm { m: 4096, n, k: 1024, batch: 1, accumulate: true, input, output };
    let kernels: Vec<Kernel> = (256..1280).map(|n| Kernel::Gemm(product(n))).collect();
    bencher
        .counter(ItemsCount::new(kernels.len()))
        .bench_local(|| kernels.iter().map(|kernel| prices.kernel_time(kernel).0).sum::<f64>());
}

struct Cost {
    solve: Duration,
    candidates: u64,
    price: Duration,
}

impl Cost {
    fn of(request: &Request) -> Cost {
        let begin = Instant::now();
        let solved = Solved::new(request);
        let solve = begin.elapsed();
        let price = || {
            let begin = Instant::now();
            let candidates = solved.price();
            (begin.elapsed(), candidates)
        };
        let (price, candidates) = (0..10).map(|_| price()).min().expect("ten times");
        Cost { solve, candidates, price }
    }

    fn against<'a>(&'a self, before: Option<&'a Cost>) -> impl fmt::Display + 'a {
        let ratio = |of: fn(&Cost) -> f64| {
            before.map_or(String::new(), |before| format!("(×{:.2})", of(self) / of(before)))
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
