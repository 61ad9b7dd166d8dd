//! Collective payloads and memory of a step, compared with the predictions for its plan.
//!
//! With n equal blocks and m microbatches, the payload of a kind of collective over the tensor axis is
//!
//! ```text
//! payload(n, m) = n·m·block + n·step + m·ends + rest
//! ```
//! where `block` is predicted for one block and one microbatch, `step` is the payload of a block once
//! per step, and `ends` that of embedding and head per microbatch. The mixed difference contains `block` alone:
//! `payload(2n, 2m) − payload(n, 2m) − payload(2n, m) + payload(n, m) = n·m·block`.

use std::collections::BTreeMap;

use narrows_cost_model::Executor;
use narrows_plan::kernel::CollectiveKind;
use narrows_plan::model::Model;
use narrows_plan::strategy::{Baseline, Recompute, Rules, WeightRule};
use narrows_plan::{Axis, BlockRun, Plan, PlanSource, StagePlan, Workload};
use narrows_planner::{BlockCollectives, Prediction, predict};
use narrows_runtime::session::StepInput;
use narrows_runtime::{Optimizer, StepReport, count_step};

use super::small_models::{self, mesh, processors, request};

const MICRO_BATCH: u64 = 2;
const LENGTH: u64 = 8;
const BLOCKS: u64 = 2;
const MICROBATCHES: u64 = 1;

/// Payload by kind.
type Payloads = BTreeMap<CollectiveKind, i64>;

const KINDS: [CollectiveKind; 4] = [
    CollectiveKind::AllReduce,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllGather,
    CollectiveKind::AllToAll,
];

/// The decisions of a plan for other numbers of blocks and microbatches.
fn resized(plan: &Plan, model: &Model, blocks: u64, microbatches: u64) -> (Plan, Model) {
    let mut model = model.clone();
    model.blocks = vec![model.blocks[0].clone(); blocks as usize];
    let decisions = plan.stages[0].runs[0].decisions.clone();
    let mut runs = plan.stages.iter().flat_map(|stage| &stage.runs);
    assert!(runs.all(|run| run.decisions == decisions), "blocks have different decisions");
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

/// Runs a step on the CPU and on the null backend, and compares the memory of each device with the prediction.
fn step(plan: &Plan, model: &Model, case: &str) -> (StepReport, Prediction) {
    let (prediction, program) =
        predict(model, &processors(), Executor::Captured, plan).expect("a prediction");
    let counted = count_step(&program).expect("it runs");
    let mut session = small_models::session(plan, model, 1);
    let tokens = vec![1; (plan.workload.global_batch * plan.workload.sequence_length) as usize];
    let input = StepInput { tokens: &tokens, targets: &tokens };
    let report = session.step(&Optimizer::new(1e-3, 1, 10), input).expect("a step").report;
    assert_eq!(report, counted, "{case}");
    for device in report.devices() {
        let predicted = prediction.peak_memory_bytes[device.stage(&report.mesh)];
        assert_eq!(session.allocated_bytes()[device.0 as usize], predicted, "{case}");
        assert_eq!(report.device(device).allocated.0, predicted, "{case}");
    }
    (report, prediction)
}

/// Payloads over the tensor axis, summed over one device of each stage.
fn tensor_payloads(report: &StepReport) -> Payloads {
    let of = |kind: CollectiveKind| {
        let counts = report.stages.iter().filter_map(|s| s.collectives.get(&(kind, Axis::Tensor)));
        counts.map(|count| count.payload.0 as i64).sum()
    };
    KINDS.into_iter().map(|kind| (kind, of(kind))).collect()
}

/// Predicted payloads of one block and one microbatch; statistics are all-reduced.
fn predicted_payloads(block: &BlockCollectives) -> Payloads {
    let of = |kind: CollectiveKind| {
        let passes = [&block.forward, &block.backward, &block.recompute];
        let bytes = passes.iter().map(|pass| match kind {
            CollectiveKind::AllReduce => pass.of(kind) + pass.statistics,
            _ => pass.of(kind),
        });
        bytes.map(|bytes| bytes.0 as i64).sum()
    };
    KINDS.into_iter().map(|kind| (kind, of(kind))).collect()
}

/// Plans for a mesh and compares measured payloads with those predicted for a block. Returns the prediction of the
/// largest size.
fn check_payloads(model: &Model, rules: Rules, [tensor, pipeline, data]: [u64; 3]) -> Prediction {
    let mesh = mesh(tensor, pipeline, data);
    let case = format!("{} {rules:?}, {mesh}", model.name);
    let mut request = request(model, mesh);
    request.rules = rules;
    (request.micro_batch, request.global_batch) = (Some(MICRO_BATCH), MICRO_BATCH * data);
    request.sequence_length = LENGTH;
    let plan = small_models::plan(&request).unwrap_or_else(|| panic!("no plan for {case}"));
    let blocks = BLOCKS * pipeline;
    let run = |blocks, microbatches| {
        let (plan, model) = resized(&plan, model, blocks, microbatches);
        let (report, prediction) = step(&plan, &model, &case);
        (tensor_payloads(&report), prediction)
    };
    let (large, prediction) = run(2 * blocks, 2 * MICROBATCHES);
    let [few, short, small] =
        [(blocks, 2), (2 * blocks, 1), (blocks, 1)].map(|(n, m)| run(n, m * MICROBATCHES).0);
    let block = predicted_payloads(&prediction.block_collective_bytes);
    for kind in KINDS {
        let difference = large[&kind] - few[&kind] - short[&kind] + small[&kind];
        let blocks = (blocks * MICROBATCHES) as i64;
        assert_eq!(difference, blocks * block[&kind], "{case}: {}", kind.name());
    }
    assert_eq!(large.values().sum::<i64>() > 0, tensor > 1, "{case}");
    prediction
}

/// The rows of DESIGN §3.2, in elements per token: forward and backward.
fn published_elements(baseline: Baseline, model: &Model) -> Option<[u64; 2]> {
    let (d, block) = (model.hidden, &model.blocks[0]);
    let (d_ff, r) = (block.up.d_out, block.q.rank().unwrap_or(0));
    match baseline {
        Baseline::FullrankTp => Some([2 * d, 2 * d]),
        Baseline::VanillaTpPublished => Some([5 * d + 2 * d_ff, 3 * d + d_ff]),
        Baseline::Btp => Some([7 * r, 7 * r]),
        // Sequence parallelism gathers and reduce-scatters instead.
        Baseline::MegatronSp => Some([0, 0]),
        Baseline::VanillaTp | Baseline::Auto => None,
    }
}

fn sharded(baseline: Baseline) -> Rules {
    Rules { baseline, weights: WeightRule::Sharded, ..Rules::ALL }
}

fn every_tensor_axis(model: &Model, baseline: Baseline) {
    let mut previous = u64::MAX;
    for tensor in [1, 2, 4, 8] {
        let prediction = check_payloads(model, sharded(baseline), [tensor, 1, 1]);
        let block = &prediction.block_collective_bytes;
        if let Some(elements) = published_elements(baseline, model).filter(|_| tensor > 1) {
            let bytes = elements.map(|elements| 4 * MICRO_BATCH * LENGTH * elements);
            let reduced =
                [&block.forward, &block.backward].map(|pass| pass.of(CollectiveKind::AllReduce).0);
            assert_eq!(reduced, bytes, "{} on {tensor}", baseline.name());
        }
        let arena = prediction.peak_memory_bytes[0];
        assert!(
            arena < previous,
            "{} on {tensor}: {arena} bytes, {previous} on half",
            baseline.name()
        );
        previous = arena;
    }
}

#[test]
fn payloads_and_memory_of_low_rank_plans_are_as_predicted() {
    let model = small_models::cola();
    for baseline in
        [Baseline::VanillaTp, Baseline::VanillaTpPublished, Baseline::Btp, Baseline::Auto]
    {
        every_tensor_axis(&model, baseline);
    }
}

#[test]
fn payloads_and_memory_of_dense_plans_are_as_predicted() {
    for baseline in [Baseline::FullrankTp, Baseline::MegatronSp, Baseline::Auto] {
        every_tensor_axis(&small_models::dense(), baseline);
    }
}

#[test]
fn payloads_and_memory_of_stages_and_replicas_are_as_predicted() {
    for baseline in [Baseline::VanillaTp, Baseline::Btp, Baseline::Auto] {
        check_payloads(&small_models::cola(), sharded(baseline), [2, 2, 2]);
    }
    check_payloads(&small_models::dense(), sharded(Baseline::FullrankTp), [4, 2, 1]);
}

#[test]
fn recomputed_collectives_are_predicted_and_executed() {
    for baseline in [Baseline::VanillaTp, Baseline::VanillaTpPublished, Baseline::Btp] {
        let rules = Rules { recompute: Recompute::Block, ..sharded(baseline) };
        let prediction = check_payloads(&small_models::cola(), rules, [4, 1, 1]);
        let recomputed = prediction.block_collective_bytes.recompute.total().0;
        assert!(recomputed > 0, "{}", baseline.name());
    }
}
