//! Plans of a sweep: 1,008 points of cola-7b on 1 to 64 devices, by global batch, memory and bandwidth between nodes.
//! Each point is searched to the end and predicted. Prints points per second with one cache for all points, and the
//! ratio to the rate without a shared cache.
//!
//! `cargo bench -p narrows-planner --bench sweep`, or with numbers of devices: `… --bench sweep -- 16 64`

use std::time::Instant;

use narrows_cost_model::profile;
use narrows_plan::Bytes;
use narrows_plan::model::presets;
use narrows_planner::{
    MemoryLimit, Request, SearchCache, equal_searches, predict_program, search_with_cache,
};
use rayon::prelude::*;

/// The allocator of the command line.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const DEVICES: [u64; 7] = [1, 2, 4, 8, 16, 32, 64];
const BANDWIDTHS_GB_PER_S: [f64; 12] =
    [6.25, 12.5, 18.75, 25.0, 31.25, 37.5, 50.0, 75.0, 100.0, 150.0, 200.0, 400.0];
const GLOBAL_BATCHES: [u64; 4] = [128, 256, 512, 1024];
const LIMITS_GIB: [u64; 3] = [32, 48, 72];

/// One in this many points is also searched with a cache of its own.
const SAMPLE: usize = 13;

fn main() {
    let shared = SearchCache::default();
    let (mut points, mut total) = (0, 0.0);
    println!("devices  points  one cache  points/s  speedup over separate caches");
    let chosen: Vec<u64> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let is_chosen = |devices: &u64| chosen.is_empty() || chosen.contains(devices);
    for devices in DEVICES.into_iter().filter(is_chosen) {
        let requests = requests(devices);
        let sample: Vec<Request> = requests.iter().step_by(SAMPLE).cloned().collect();
        let with_shared = seconds(&requests, |request| plan(request, &shared));
        let separate = seconds(&sample, |request| plan(request, &SearchCache::default()));
        let rate = requests.len() as f64 / with_shared;
        let speedup = rate / (sample.len() as f64 / separate);
        let count = requests.len();
        println!("{devices:>7} {count:>7} {with_shared:>8.1} s {rate:>9.1} {speedup:>8.2}");
        points += count;
        total += with_shared;
    }
    println!("    all {points:>7} {total:>8.1} s {:>9.1}", points as f64 / total);
}

/// All combinations; the last axis varies fastest.
fn requests(devices: u64) -> Vec<Request> {
    let model = presets::find("cola-7b").expect("a preset");
    let file = profile::preset("a100-80gb-8").expect("a preset").file().clone();
    let mut requests = vec![];
    for bandwidth in BANDWIDTHS_GB_PER_S {
        let mut file = file.clone();
        file.links.inter_node.bandwidth_bytes_per_s = bandwidth * 1e9;
        let hardware = file.resolve().expect("a positive bandwidth");
        for global_batch in GLOBAL_BATCHES {
            for limit in LIMITS_GIB {
                let (model, hardware) = (model.clone(), hardware.clone());
                let mut request = Request::new(model, hardware, devices, global_batch, 4096);
                request.memory_limit = MemoryLimit::Bytes(Bytes(limit << 30));
                requests.push(request);
            }
        }
    }
    requests
}

fn plan(request: &Request, cache: &SearchCache) {
    let Some(best) = search_with_cache(request, cache).best else { return };
    let Request { model, profile, executor, .. } = request;
    let resolved = best.plan.resolve(model).expect("the planner writes valid plans");
    divan::black_box(predict_program(model, profile, *executor, &resolved, &best.program));
}

fn seconds(points: &[Request], plan: impl Fn(&Request) + Send + Sync) -> f64 {
    let begin = Instant::now();
    let requests: Vec<&Request> = points.iter().collect();
    let groups = equal_searches(&requests);
    groups.par_iter().for_each(|group| group.iter().for_each(|index| plan(&points[*index])));
    begin.elapsed().as_secs_f64()
}
