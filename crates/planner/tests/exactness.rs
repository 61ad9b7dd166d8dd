//! The objective the solver minimised is the simulated time of the lowered program, to 1e-9.

use std::sync::Arc;

use narrows_cost_model::simulate::simulate;
use narrows_cost_model::{Prices, profile};
use narrows_plan::Kernel;
use narrows_plan::check::CheckedProgram;
use narrows_plan::graph::SegmentKind;
use narrows_plan::lower::lower;
use narrows_plan::model::presets;
use narrows_plan::strategy::{Baseline, Border, Rules, TiedWeight};
use narrows_planner::assemble::{Decided, assemble};
use narrows_planner::candidates::contexts;
use narrows_planner::divide::block_part;
use narrows_planner::segments::{Part, Segments, Solved};
use narrows_planner::{MemoryLimit, Request, search};

fn request(model: &str, baseline: Baseline, devices: u64, tensor: Option<u64>) -> Request {
    Request {
        tensor,
        pipeline: Some(1),
        rules: Rules { baseline, ..Rules::ALL },
        memory_limit: MemoryLimit::None,
        ..Request::new(
            presets::find(model).unwrap(),
            profile::preset("a100-80gb").unwrap(),
            devices,
            4,
            1024,
        )
    }
}

fn assert_same(a: f64, b: f64, what: &str) {
    assert!(((a - b) / a).abs() < 1e-9, "{what}: {a} is not {b}");
}

#[test]
fn every_strategy_and_preset() {
    let low_rank =
        [Baseline::Auto, Baseline::VanillaTp, Baseline::VanillaTpPublished, Baseline::Btp];
    let mut checked = 0;
    for size in ["60m", "130m", "350m", "1b", "3b", "7b", "13b", "30b", "40b"] {
        for family in ["cola", "svd", "lax", "llama"] {
            let dense = [Baseline::Auto, Baseline::FullrankTp];
            let baselines = if family == "llama" { &dense[..] } else { &low_rank[..] };
            for &baseline in baselines {
                let name = format!("{family}-{size}");
                let request = request(&name, baseline, 4, Some(4));
                let searched = search(&request);
                let fitted = searched.best.unwrap_or_else(|| panic!("{name} {baseline:?}"));
                assert_same(fitted.objective.0, fitted.time.0, &name);
                checked += 1;
            }
        }
    }
    assert_eq!(checked, 9 * 14);
}

/// Every hundredth candidate that a search prices, not only its winner: each context with each
/// layout of the hidden state and each tied weight is a candidate.
#[test]
fn one_candidate_in_a_hundred() {
    let mut seen = 0;
    let mut agreed = 0;
    for (model, devices) in
        [("cola-60m", 8), ("lax-60m", 4), ("svd-130m", 4), ("llama-350m", 8), ("cola-1b", 8)]
    {
        let mut request = request(model, Baseline::Auto, devices, None);
        request.global_batch = 64;
        let segments = Segments::new(&request, None);
        for context in contexts(&request) {
            for border in segments.borders(&context) {
                for tied in TiedWeight::ALL {
                    seen += 1;
                    if seen % 100 != 0 {
                        continue;
                    }
                    let tied_weight = request.model.tied.then_some(tied);
                    let solve = |kind, shape| {
                        let part = match kind {
                            SegmentKind::Block => block_part(shape, border),
                            _ => Part::end(kind, border, tied_weight),
                        };
                        segments.fastest(part, &context)
                    };
                    let Some(decided) = decide(&request, &segments, context, border, &solve) else {
                        continue;
                    };
                    let microbatches = context.workload.microbatches(&context.mesh);
                    let expected: f64 =
                        solved(&decided).map(|solved| solved.time.total(microbatches).0).sum();
                    let plan = assemble(&request, &decided);
                    let program = lower(&plan.resolve(&request.model).unwrap());
                    let program = CheckedProgram::check(program).unwrap();
                    let prices = Prices::new(&request.profile, request.executor, &context.mesh);
                    let price = |kernel: &Kernel| prices.kernel(kernel);
                    // What belongs to no segment: the gradient norm of the whole stage.
                    let once: f64 = narrows_plan::emit::step_norm(&context)
                        .iter()
                        .chain([&narrows_plan::emit::step_begin()])
                        .map(|template| price(&template.kernel()).0)
                        .sum();
                    let simulated = simulate(&program, &price).step_time.0;
                    assert_same(expected + once, simulated, &format!("{model} {context:?}"));
                    agreed += 1;
                }
            }
        }
    }
    assert!(agreed >= 8, "{agreed} of {seen}");
}

fn decide(
    request: &Request,
    segments: &Segments,
    context: narrows_plan::strategy::Context,
    border: Border,
    solve: &dyn Fn(SegmentKind, usize) -> Option<Arc<Solved>>,
) -> Option<Decided> {
    let blocks: Option<Vec<Arc<Solved>>> =
        segments.layer_shapes().iter().map(|shape| solve(SegmentKind::Block, *shape)).collect();
    assert_eq!(request.pipeline, Some(1));
    Some(Decided {
        context,
        border,
        embedding: solve(SegmentKind::Embedding, 0)?,
        stages: vec![blocks?],
        head: solve(SegmentKind::Head, 0)?,
    })
}

fn solved(decided: &Decided) -> impl Iterator<Item = &Arc<Solved>> {
    [&decided.embedding, &decided.head].into_iter().chain(decided.stages.iter().flatten())
}
