//! Searches of passes of two microbatches, whose cost tables are bounds.

use narrows_cost_model::profile;
use narrows_plan::Zero;
use narrows_plan::kernel::{CollectiveKind, Kernel};
use narrows_plan::model::presets;
use narrows_plan::program::Phase;
use narrows_plan::strategy::{Baseline, NormRule, WeightRule};
use narrows_planner::{Request, search};

/// Plans of baselines, and with weights that are all sharded, are plans of the whole space. Collectives are long here.
#[test]
fn no_restriction_to_a_baseline_or_to_sharded_weights_beats_the_whole_space() {
    let cases = [
        ("cola-1b", "a100-80gb", 4, 8, 32, Baseline::Btp),
        ("llama-1b", "a100-80gb-8", 8, 16, 64, Baseline::FullrankTp),
    ];
    for (model, hardware, tensor, devices, batch, baseline) in cases {
        let model = presets::find(model).unwrap();
        let profile = profile::preset(hardware).unwrap();
        let mut request = Request::new(model, profile, devices, batch, 4096);
        (request.tensor, request.data) = (Some(tensor), Some(2));
        (request.micro_batch, request.zero) = (Some(8), Some(Zero::Off));
        let fastest = |request: &Request| search(request).best.expect("a plan");
        let whole = fastest(&request);
        assert!(whole.plan.overlap_microbatch_pairs, "{}", request.model.name);
        let mut sharded = request.clone();
        sharded.rules.weights = WeightRule::Sharded;
        for rules in [&request, &sharded] {
            let of_all = fastest(rules);
            let mut restricted = (*rules).clone();
            restricted.rules.baseline = baseline;
            let restricted = fastest(&restricted);
            let case = format!("{} of {}", baseline.name(), request.model.name);
            assert!(whole.time <= of_all.time, "{case}: {} and {}", of_all.time, whole.time);
            assert!(
                of_all.time <= restricted.time,
                "{case}: {} and {}",
                restricted.time,
                of_all.time
            );
        }
    }
}

/// Plans with online norms are plans of the whole space. The other norms have collectives of their own, which seem to be hidden.
#[test]
fn no_restriction_to_online_norms_beats_the_whole_space() {
    for (model, micro_batch) in [("svd-30b", None), ("lax-30b", Some(4))] {
        let model = presets::find(model).unwrap();
        let profile = profile::preset("a100-80gb").unwrap();
        let mut request = Request::new(model, profile, 8, 8, 1024);
        (request.tensor, request.micro_batch) = (Some(8), micro_batch);
        let whole = search(&request).best.expect("a plan");
        request.rules.norm = NormRule::Online;
        let online = search(&request).best.expect("a plan");
        assert!(online.plan.overlap_microbatch_pairs, "{}", request.model.name);
        assert!(
            whole.time.0 <= online.time.0 * (1.0 + 1e-9),
            "{}: {}",
            request.model.name,
            whole.time
        );
    }
}

/// With sequence parallelism, a norm between a reduce-scatter and an all-gather is too short to hide either: both overlap with
/// GEMMs of the other microbatch.
#[test]
fn collectives_around_short_computation_overlap_with_gemms() {
    let model = presets::find("llama-350m").unwrap();
    let profile = profile::preset("a100-80gb").unwrap();
    let mut request = Request::new(model, profile, 4, 8, 4096);
    (request.tensor, request.micro_batch) = (Some(4), Some(4));
    request.rules.baseline = Baseline::MegatronSp;
    let best = search(&request).best.expect("a plan");
    assert!(best.plan.overlap_microbatch_pairs);
    let chunk = &best.program.program().stages[0].chunks[0];
    for phase in [Phase::Forward, Phase::Backward] {
        let instructions = chunk.instructions(phase);
        let (mut hidden, mut exposed) = (0, 0);
        for (at, instr) in instructions.iter().enumerate() {
            let Kernel::Collective(collective) = instr.kernel() else { continue };
            if collective.kind == CollectiveKind::AllReduce {
                continue;
            }
            let beside = &instructions[at + 1..][..instr.overlapped_instrs];
            let is_gemm =
                |kernel: &Kernel| matches!(kernel, Kernel::Gemm(_) | Kernel::Attention(_));
            match beside.iter().any(|instr| is_gemm(&instr.kernel())) {
                true => hidden += 1,
                false => exposed += 1,
            }
        }
        // Four of each block and microbatch; those at the ends of the pass have less beside them.
        assert!(hidden > 20 * exposed && hidden > 150, "{phase:?}: {hidden} and {exposed}");
    }
}
