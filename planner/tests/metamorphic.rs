//! Laws between searches: a request that asks for less, or offers more, never leads to a slower plan.
//!
//! The bound of the easier request is at most the time of any plan of the harder one; a search that breaks this has proven
//! something false. Where the easier search is proven optimal, its plan is no slower either.

use narrows_cost_model::profile;
use narrows_plan::random::SplitMix64;
use narrows_plan::{Bytes, model};
use narrows_planner::{MemoryLimit, Request, SearchResult, search};

/// The sizes of a drawn model.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    hidden: u64,
    rank: u64,
    blocks: u64,
    vocab: u64,
}

impl Sizes {
    fn model(self) -> model::Model {
        let Sizes { hidden, rank, blocks, vocab } = self;
        let d_ff = hidden * 8 / 3 / 64 * 64;
        let text = format!(
            r#"{{"format": "narrows-model/1", "hidden": {hidden}, "vocab": {vocab}, "heads": 8,
                "d_ff": {d_ff}, "blocks": {{"count": {blocks}, "default": {{"product": "plain",
                "all": {{"rank": {rank}, "activation": "silu"}}}}}}}}"#
        );
        model::read("drawn.json", &text).unwrap()
    }
}

/// A drawn request with the sizes of its model.
struct Drawn {
    sizes: Sizes,
    request: Request,
}

/// A change that makes a request easier.
type Law = (&'static str, fn(&Drawn) -> Option<Request>);

const LAWS: [Law; 7] = [
    ("faster links", |drawn| with_profile(drawn, 2.0, 1.0)),
    ("faster GEMMs", |drawn| with_profile(drawn, 1.0, 1.5)),
    ("more memory", |Drawn { request, .. }| {
        let MemoryLimit::Bytes(limit) = request.memory_limit else { return None };
        let memory_limit = MemoryLimit::Bytes(Bytes(limit.0 + limit.0 / 4));
        Some(Request { memory_limit, ..request.clone() })
    }),
    ("half the batch", |Drawn { request, .. }| {
        let divides = request.global_batch.is_multiple_of(2 * request.devices);
        let global_batch = request.global_batch / 2;
        divides.then(|| Request { global_batch, ..request.clone() })
    }),
    ("half the rank", |Drawn { sizes, request }| {
        let model = Sizes { rank: sizes.rank / 2, ..*sizes }.model();
        Some(Request { model, ..request.clone() })
    }),
    ("fewer blocks", |Drawn { sizes, request }| {
        let blocks = sizes.blocks - 1;
        (blocks >= request.devices).then(|| {
            let model = Sizes { blocks, ..*sizes }.model();
            Request { model, ..request.clone() }
        })
    }),
    ("free axes", |Drawn { request, .. }| {
        let is_fixed = request.tensor.or(request.pipeline).is_some();
        is_fixed.then(|| Request { tensor: None, pipeline: None, ..request.clone() })
    }),
];

/// The request with factors on the bandwidth of links and on the peak rates of devices.
fn with_profile(drawn: &Drawn, links: f64, peaks: f64) -> Option<Request> {
    let request = &drawn.request;
    let mut file = request.profile.file().clone();
    file.links.intra_node.bandwidth_bytes_per_s *= links;
    file.links.inter_node.bandwidth_bytes_per_s *= links;
    file.device.peak_flops_per_s.bf16 *= peaks;
    file.device.peak_flops_per_s.f32 *= peaks;
    Some(Request { profile: file.resolve().unwrap(), ..request.clone() })
}

fn draw(random: &mut SplitMix64) -> Drawn {
    let mut below = |end: u64| random.next_u64() % end;
    let sizes = Sizes {
        hidden: 256 << below(3),
        rank: 64 << below(2),
        blocks: 4 + below(8),
        vocab: 4096 << below(4),
    };
    let hardware = ["a100-80gb", "a100-80gb-8", "h100-sxm"][below(3) as usize];
    let profile = profile::preset(hardware).unwrap();
    let devices = 1 << below(4);
    let batch = devices * (1 << below(4));
    let mut request = Request::new(sizes.model(), profile, devices, batch, 512 << below(2));
    let axis = 1 << below(3).min(devices.ilog2().into());
    match below(3) {
        0 => request.tensor = Some(axis),
        1 if axis <= sizes.blocks => request.pipeline = Some(axis),
        _ => {}
    }
    Drawn { sizes, request }
}

fn describe(name: &str, Drawn { sizes, request }: &Drawn) -> String {
    let Request { devices, global_batch, sequence_length, tensor, pipeline, .. } = request;
    let hardware = request.profile.name();
    let limit = request.memory_limit;
    format!(
        "{name}: {sizes:?} on {devices} of {hardware}, {global_batch} × {sequence_length}, tensor {tensor:?}, \
         pipeline {pipeline:?}, {limit:?}"
    )
}

fn time(result: &SearchResult) -> f64 {
    result.best.as_ref().map_or(f64::INFINITY, |best| best.time.0)
}

/// Draws requests, and searches each with and without each change.
fn check_laws(seed: u64, draws: usize) {
    let mut random = SplitMix64::new(seed);
    let (mut compared, mut slower) = (0, vec![]);
    for _ in 0..draws {
        let mut drawn = draw(&mut random);
        let unlimited = search(&drawn.request);
        if random.next_u64().is_multiple_of(2)
            && let Some(best) = &unlimited.best
        {
            let percent = 60 + random.next_u64() % 40;
            let limit = Bytes(best.peak_arena().0 * percent / 100);
            drawn.request.memory_limit = MemoryLimit::Bytes(limit);
        }
        let harder = time(&search(&drawn.request));
        for (name, change) in LAWS {
            let Some(request) = change(&drawn) else { continue };
            let easier = search(&request);
            let case = describe(name, &drawn);
            let bound = easier.report.bound.0;
            assert!(bound <= harder * (1.0 + 1e-9), "{case}: {bound} bounds {harder}");
            compared += 1;
            if time(&easier) > harder * (1.0 + 1e-9) {
                assert!(!easier.report.is_proven_best(), "{case}: {}", time(&easier));
                slower.push(format!("{case}: {} instead of {harder}", time(&easier)));
            }
        }
    }
    println!("{compared} comparisons, {} with a slower plan within the gap", slower.len());
    slower.iter().for_each(|case| println!("{case}"));
    assert!(compared >= 2 * draws, "{compared} comparisons");
    assert!(slower.len() * 100 <= compared, "{} of {compared} are slower", slower.len());
}

#[test]
fn easier_requests_lead_to_no_slower_plans() {
    check_laws(15, 4);
}

#[test]
#[ignore = "second level: takes minutes"]
fn many_easier_requests_lead_to_no_slower_plans() {
    check_laws(16, 20);
}
