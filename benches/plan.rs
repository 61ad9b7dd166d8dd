//! How long a plan takes, from nothing: CoLA-7B on 4 devices and CoLA-30B on 512.
//!
//! ```sh
//! cargo bench --bench plan
//! ```

use std::fmt;

use narrows_cost_model::profile;
use narrows_plan::model::presets;
use narrows_planner::{Request, search};

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
    Request::new(
        presets::find(scene.model).expect("a preset"),
        profile::preset("a100-80gb").expect("a profile"),
        scene.devices,
        scene.devices,
        4096,
    )
}
