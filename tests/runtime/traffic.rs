//! What a step moves and holds is what its plan predicts.
//!
//! With n blocks that are alike and m microbatches, a kind of collective moves over the tensor axis
//!
//! ```text
//! moved(n, m) = n·m·block + n·once + m·ends + rest
//! ```
//! where `block` is what a plan predicts of one block and one microbatch, `once` what a block does
//! once a step, `ends` what embedding and head do with a microbatch. The difference over n and over
//! m is `block` alone, so no other figure is taken on trust:
//! `moved(2n, 2m) − moved(n, 2m) − moved(2n, m) + moved(n, m) = n·m·block`.

use std::collections::BTreeMap;

use narrows_cost_model::Executor;
use narrows_plan::Plan;
use narrows_plan::kernel::CollectiveKind;
use narrows_plan::model::Model;
use narrows_plan::strategy::{Baseline, Recompute, Rules, WeightRule};
use narrows_plan::{Axis, Workload};
use narrows_plan::{BlockRun, PlanSource, StagePlan};
use narrows_planner::{BlockCollectives, Prediction, predict};
use narrows_runtime::count_step;
use narrows_runtime::session::StepInput;
use narrows_runtime::{Optimizer, StepReport};

use super::subject::{self, mesh, processors, request};

const MICRO_BATCH: u64 = 2;
const LENGTH: u64 = 8;
const BLOCKS: u64 = 2;
const MICROBATCHES: u64 = 1;

/// Payload by kind.
type Moved = BTreeMap<CollectiveKind, i64>;

const KINDS: [CollectiveKind; 4] = [
    CollectiveKind::AllReduce,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllGather,
    CollectiveKind::AllToAll,
];

/// The same decisions for so many blocks and microbatches.
fn resized(plan: &Plan, model: &Model, blocks: u64, microbatches: u64) -> (Plan, Model) {
    let mut model = model.clone();
    model.blocks = vec![model.blocks[0].clone(); blocks as usize];
    let decisions = plan.stages[0].runs[0].decisions.clone();
    let alike = plan.stages.iter().flat_map(|stage| &stage.runs);
    assert!(alike.into_iter().all(|run| run.decisions == decisions), "one decision for all");
    let stages = plan.mesh.pipeline;
    let count = blocks / stages;
    let runs = |stage| BlockRun { first: stage * count, count, decisions: decisions.clone() };
    let global_batch = MICRO_BATCH * plan.mesh.data * microbatches;
    let plan = Plan {
        model: PlanSource { name: model.name.clone(), fingerprint: model.fingerprint() },
        workload: Workload { global_batch, ..plan.workload },
        stages: (0..stages).map(|stage| StagePlan { runs: vec![runs(stage)] }).collect(),
        ..plan.clone()
    };
    (plan, model)
}

/// Runs a step, on processors and on the null backend, and holds what each device did against the
/// prediction's memory.
fn step(plan: &Plan, model: &Model, what: &str) -> (StepReport, Prediction) {
    let (prediction, program) =
        predict(model, &processors(), Executor::Captured, plan).expect("a prediction");
    let counted = count_step(&program).expect("it runs");
    let mut session = subject::session(plan, model, 1);
    let tokens = vec![1; (plan.workload.global_batch * plan.workload.sequence_length) as usize];
    let input = StepInput { tokens: &tokens, targets: &tokens };
    let report = session.step(&Optimizer::new(1e-3, 1, 10), input).expect("a step").report;
    assert_eq!(report, counted, "{what}");
    for device in report.devices() {
        let predicted = prediction.peak_memory_bytes[device.stage(&report.mesh)];
        assert_eq!(session.allocated_bytes()[device.0 as usize], predicted, "{what}");
        assert_eq!(report.device(device).allocated.0, predicted, "{what}");
    }
    (report, prediction)
}

/// What one device of each stage moved over the tensor axis, together.
fn moved(report: &StepReport) -> Moved {
    let of = |kind: CollectiveKind| {
        let counts = report.stages.iter().filter_map(|s| s.collectives.get(&(kind, Axis::Tensor)));
        counts.map(|count| count.payload.0 as i64).sum()
    };
    KINDS.into_iter().map(|kind| (kind, of(kind))).collect()
}

/// What is predicted of a block and a microbatch, by kind; statistics are all-reduced.
fn predicted(block: &BlockCollectives) -> Moved {
    let of = |kind: CollectiveKind| {
        let names = match kind {
            CollectiveKind::AllReduce => vec![kind.name(), "statistics"],
            _ => vec![kind.name()],
        };
        let passes = [&block.forward, &block.backward, &block.recompute];
        let found = passes.iter().flat_map(|pass| names.iter().filter_map(|name| pass.get(name)));
        found.map(|bytes| *bytes as i64).sum()
    };
    KINDS.into_iter().map(|kind| (kind, of(kind))).collect()
}

/// Plans for a mesh and holds what is moved against what is predicted of a block; the arenas and
/// the prediction of the largest size.
fn hold(model: &Model, rules: Rules, [tensor, pipeline, data]: [u64; 3]) -> Prediction {
    let mesh = mesh(tensor, pipeline, data);
    let what = format!("{} {rules:?}, {mesh}", model.name);
    let mut asked = request(model, mesh);
    asked.rules = rules;
    (asked.micro_batch, asked.global_batch) = (Some(MICRO_BATCH), MICRO_BATCH * data);
    asked.sequence_length = LENGTH;
    let plan = subject::plan(&asked).unwrap_or_else(|| panic!("no plan for {what}"));
    let blocks = BLOCKS * pipeline;
    let run = |blocks, microbatches| {
        let (plan, model) = resized(&plan, model, blocks, microbatches);
        let (report, prediction) = step(&plan, &model, &what);
        (moved(&report), prediction)
    };
    let (large, prediction) = run(2 * blocks, 2 * MICROBATCHES);
    let [few, short, small] =
        [(blocks, 2), (2 * blocks, 1), (blocks, 1)].map(|(n, m)| run(n, m * MICROBATCHES).0);
    let block = predicted(&prediction.block_collective_bytes);
    for kind in KINDS {
        let both = large[&kind] - few[&kind] - short[&kind] + small[&kind];
        let blocks = (blocks * MICROBATCHES) as i64;
        assert_eq!(both, blocks * block[&kind], "{what}: {}", kind.name());
    }
    assert_eq!(large.values().sum::<i64>() > 0, tensor > 1, "{what}");
    prediction
}

/// The rows of DESIGN §3.2, in numbers a token: forward and backward.
fn published(baseline: Baseline, model: &Model) -> Option<[u64; 2]> {
    let (d, block) = (model.hidden, &model.blocks[0]);
    let (d_ff, r) = (block.up.d_out, block.q.rank().unwrap_or(0));
    match baseline {
        Baseline::FullrankTp => Some([2 * d, 2 * d]),
        Baseline::VanillaTpPublished => Some([5 * d + 2 * d_ff, 3 * d + d_ff]),
        Baseline::Btp => Some([7 * r, 7 * r]),
        Baseline::VanillaTp | Baseline::Auto => None,
    }
}

fn sharded(baseline: Baseline) -> Rules {
    Rules { baseline, weights: WeightRule::Sharded, ..Rules::ALL }
}

fn every_tensor_axis(model: &Model, baseline: Baseline) {
    let mut before = u64::MAX;
    for tensor in [1, 2, 4, 8] {
        let prediction = hold(model, sharded(baseline), [tensor, 1, 1]);
        let block = &prediction.block_collective_bytes;
        if let Some(numbers) = published(baseline, model).filter(|_| tensor > 1) {
            let bytes = numbers.map(|numbers| 4 * MICRO_BATCH * LENGTH * numbers);
            let reduced = [&block.forward, &block.backward].map(|pass| pass["all_reduce"]);
            assert_eq!(reduced, bytes, "{} on {tensor}", baseline.name());
        }
        let arena = prediction.peak_memory_bytes[0];
        assert!(arena < before, "{} on {tensor}: {arena} bytes, {before} on half", baseline.name());
        before = arena;
    }
}

#[test]
fn low_rank_plans_move_and_hold_what_they_predict() {
    let model = subject::cola();
    for baseline in
        [Baseline::VanillaTp, Baseline::VanillaTpPublished, Baseline::Btp, Baseline::Auto]
    {
        every_tensor_axis(&model, baseline);
    }
}

#[test]
fn dense_plans_move_and_hold_what_they_predict() {
    for baseline in [Baseline::FullrankTp, Baseline::Auto] {
        every_tensor_axis(&subject::dense(), baseline);
    }
}

#[test]
fn stages_and_replicas_move_and_hold_what_they_predict() {
    for baseline in [Baseline::VanillaTp, Baseline::Btp, Baseline::Auto] {
        hold(&subject::cola(), sharded(baseline), [2, 2, 2]);
    }
    hold(&subject::dense(), sharded(Baseline::FullrankTp), [4, 2, 1]);
}

/// What is redone moves its bytes again.
#[test]
fn redone_collectives_are_predicted_and_made() {
    for baseline in [Baseline::VanillaTp, Baseline::VanillaTpPublished, Baseline::Btp] {
        let rules = Rules { recompute: Recompute::Block, ..sharded(baseline) };
        let prediction = hold(&subject::cola(), rules, [4, 1, 1]);
        let recomputed: u64 = prediction.block_collective_bytes.recompute.values().sum();
        assert!(recomputed > 0, "{}", baseline.name());
    }
}
