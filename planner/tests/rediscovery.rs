//! From prices alone, the search finds the published placements.

use narrows_cost_model::profile;
use narrows_plan::graph::Op;
use narrows_plan::kernel::CollectiveKind;
use narrows_plan::model::{WeightId, presets};
use narrows_plan::strategy::{Baseline, Recompute, Rules, Save, Strategy, WeightRule};
use narrows_plan::{Bytes, Layout};
use narrows_planner::{
    CollectivePayloads, FeasiblePlan, MemoryLimit, Prediction, Request, SearchResult, predict,
    search,
};

/// A model on 4 A100s, tensor axis 4, 4 sequences of 4096 at once: the published setting.
fn published(model: &str, baseline: Baseline, weights: WeightRule) -> Request {
    Request {
        micro_batch: Some(4),
        tensor: Some(4),
        rules: Rules { baseline, weights, ..Rules::ALL },
        ..Request::new(
            presets::find(model).unwrap(),
            profile::preset("a100-80gb").unwrap(),
            4,
            4,
            4096,
        )
    }
}

fn best(result: &SearchResult) -> &FeasiblePlan {
    result.best.as_ref().expect("a plan exists")
}

fn prediction(request: &Request, plan: &FeasiblePlan) -> Prediction {
    predict(&request.model, &request.profile, request.executor, &plan.plan).unwrap().0
}

/// Strategies of the linears of the first block.
fn linears(plan: &FeasiblePlan) -> Vec<(String, Strategy)> {
    let block = &plan.decisions.stages[0][0];
    block
        .segment
        .ops
        .iter()
        .zip(&block.choice.ops)
        .filter(|(node, _)| matches!(node.op, Op::Linear(_)))
        .map(|(node, option)| (node.name.clone(), option.choice.strategy))
        .collect()
}

#[test]
fn a_dense_llama_gets_megatron_column_row_pairs() {
    let request = published("llama-7b", Baseline::Auto, WeightRule::Sharded);
    let result = search(&request);
    assert!(result.report.is_proven_best());
    for (name, strategy) in linears(best(&result)) {
        let expected =
            if matches!(name.as_str(), "o" | "down") { Strategy::Row } else { Strategy::Column };
        assert_eq!(strategy, expected, "{name}");
    }
    // The residual stream is replicated, or sharded on tokens (sequence parallelism).
    let hidden_layout = best(&result).decisions.boundary.hidden.forward;
    assert_ne!(hidden_layout, Layout::Sharded(narrows_plan::Dim::Feature));
}

#[test]
fn cola_with_sharded_weights_gets_btp() {
    let request = published("cola-7b", Baseline::Auto, WeightRule::Sharded);
    let result = search(&request);
    assert!(result.report.is_proven_best());
    let plan = best(&result);
    assert!(is_btp_placement(plan), "{:?}", linears(plan));
    assert_eq!(plan.decisions.boundary.hidden.forward, Layout::Sharded(narrows_plan::Dim::Feature));
}

#[test]
fn replicated_weights_allow_a_faster_plan_than_btp() {
    let any = search(&published("cola-7b", Baseline::Auto, WeightRule::Any));
    let btp = search(&published("cola-7b", Baseline::Btp, WeightRule::Any));
    assert!(best(&any).time.0 < best(&btp).time.0);
    assert!(!is_btp_placement(best(&any)));
}

#[test]
fn baselines_rank_as_published() {
    let time = |model, baseline| {
        let result = search(&published(model, baseline, WeightRule::Any));
        best(&result).time.0
    };
    let btp = time("cola-7b", Baseline::Btp);
    let dense = time("llama-7b", Baseline::FullrankTp);
    let vanilla = time("cola-7b", Baseline::VanillaTpPublished);
    assert!(btp < dense && dense < vanilla, "{btp} {dense} {vanilla}");
}

#[test]
fn collective_bytes_equal_the_published_bytes() {
    let mib = |model, baseline| {
        let request = published(model, baseline, WeightRule::Any);
        let result = search(&request);
        let volumes = prediction(&request, best(&result)).block_collective_bytes;
        let all_reduced = |pass: &CollectivePayloads| {
            let kinds: Vec<_> = pass.by_kind.keys().collect();
            assert_eq!(kinds, [&CollectiveKind::AllReduce], "{pass:?}");
            pass.of(CollectiveKind::AllReduce).0 as f64 / Bytes::MIB as f64
        };
        (all_reduced(&volumes.forward), all_reduced(&volumes.backward))
    };
    let tokens = 4.0 * 4096.0 * 2.0 / Bytes::MIB as f64;
    let (d, d_ff, r) = (4096.0, 11008.0, 1024.0);
    assert_eq!(mib("llama-7b", Baseline::FullrankTp), (256.0, 2.0 * d * tokens));
    assert_eq!(mib("cola-7b", Baseline::Btp), (224.0, 7.0 * r * tokens));
    let published = mib("cola-7b", Baseline::VanillaTpPublished);
    assert_eq!(published, (1328.0, (3.0 * d + d_ff) * tokens));
}

/// Sequence parallelism gathers two inputs of a block and reduce-scatters two outputs, each of the width of the hidden
/// state, instead of reducing them (Korthikanti et al., arXiv 2205.05198, §4.2.2). What it shards it need not keep.
#[test]
fn sequence_parallelism_has_the_published_collectives_and_less_memory() {
    let of = |baseline| {
        let request = published("llama-7b", baseline, WeightRule::Any);
        let request =
            Request { rules: Rules { recompute: Recompute::None, ..request.rules }, ..request };
        let result = search(&request);
        prediction(&request, best(&result))
    };
    let (tensor, sequence) = (of(Baseline::FullrankTp), of(Baseline::MegatronSp));
    let published = Bytes(2 * 4096 * 4 * 4096 * 2);
    let volumes = &sequence.block_collective_bytes;
    for pass in [&volumes.forward, &volumes.backward] {
        assert_eq!(pass.of(CollectiveKind::AllGather), published, "{pass:?}");
        assert_eq!(pass.of(CollectiveKind::ReduceScatter), published, "{pass:?}");
        assert_eq!(pass.of(CollectiveKind::AllReduce), Bytes(0), "{pass:?}");
    }
    assert!(sequence.peak_memory_bytes[0] < tensor.peak_memory_bytes[0]);
}

#[test]
fn tight_memory_keeps_latents_and_recomputes_without_collectives() {
    let mut request = published("cola-7b", Baseline::Btp, WeightRule::Sharded);
    request.memory_limit = MemoryLimit::Bytes(Bytes(27 << 30));
    let result = search(&request);
    let plan = best(&result);
    let volumes = prediction(&request, plan).block_collective_bytes;
    assert!(volumes.recompute.is_empty(), "{:?}", volumes.recompute);
    let mut recomputed = vec![];
    for block in plan.decisions.stages.iter().flatten() {
        for (id, flow) in block.segment.value_ids().zip(&block.choice.flows) {
            let value = block.segment.value(id);
            if block.segment.is_factor_output(id) {
                assert_eq!(flow.saves.last(), Some(&Save::Kept), "{}", value.name);
            }
            if flow.saves.contains(&Save::Recomputed) {
                recomputed.push(value.name.clone());
            }
        }
    }
    assert!(recomputed.iter().any(|name| name == "gate_up"), "{recomputed:?}");
    assert!(plan.program.program().stages[0].arena <= Bytes(27 << 30));
}

#[test]
fn the_published_checkpoints_can_be_requested() {
    let mut request = published("cola-7b", Baseline::Btp, WeightRule::Sharded);
    request.rules.recompute = Recompute::Latents;
    let result = search(&request);
    let volumes = prediction(&request, best(&result)).block_collective_bytes;
    assert!(volumes.recompute.is_empty(), "{:?}", volumes.recompute);
}

/// Whether the linears of a plan follow BTP's placement: first factors split on their input, second
/// factors on their output.
fn is_btp_placement(plan: &FeasiblePlan) -> bool {
    plan.decisions.stages.iter().flatten().all(|block| {
        block.segment.ops.iter().zip(&block.choice.ops).all(|(node, option)| {
            let strategy = option.choice.strategy;
            let Op::Linear(linear) = &node.op else { return true };
            match linear.members[0].parameter {
                WeightId::FactorA(_) => {
                    matches!(strategy, Strategy::Row | Strategy::PendingNormRow)
                }
                WeightId::FactorB(_) => strategy == Strategy::Column,
                _ => true,
            }
        })
    })
}
