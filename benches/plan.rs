//! How long a plan takes, from nothing: CoLA-7B on 4 devices and CoLA-30B on 512.
//!
//! ```sh
//! cargo bench --bench plan
//! ```

use std::fmt;

use narrows_cost_model::{Executor, profile};
use narrows_plan::model::presets;
use narrows_plan::strategy::Rules;
use narrows_planner::{GroupingRule, MemoryLimit, Request, search};

/// One sequence of 4,096 tokens a device.
#[derive(Clone, Copy)]
struct Scene {
    model: &'static str,
    devices: u64,
}

impl fmt::Display for Scene {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.model, self.devices)
    }
}

const SMALL: Scene = Scene { model: "cola-7b", devices: 4 };
const LARGE: Scene = Scene { model: "cola-30b", devices: 512 };

fn main() {
    divan::main();
}

/// With two cores or more, solves of different groupings and bounds of different meshes overlap.
#[divan::bench(args = [SMALL, LARGE], sample_count = 3, sample_size = 1)]
fn plan(bencher: divan::Bencher, scene: Scene) {
    let request = request(scene);
    request.validate().expect("a request that makes sense");
    bencher.bench_local(|| {
        let searched = search(&request);
        assert!(searched.best.is_some(), "{scene} has a plan");
        searched
    });
}

fn request(scene: Scene) -> Request {
    Request {
        model: presets::find(scene.model).expect("a preset"),
        profile: profile::preset("a100-80gb").expect("a profile"),
        devices: scene.devices,
        global_batch: scene.devices,
        sequence_length: 4096,
        micro_batch: None,
        tensor: None,
        pipeline: None,
        data: None,
        zero: None,
        rules: Rules::ALL,
        grouping: GroupingRule::Auto,
        memory_limit: MemoryLimit::Auto,
        executor: Executor::Captured,
        time_limit: None,
    }
}
