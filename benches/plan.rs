//! Planning time for CoLA-7B on 4 devices, CoLA-30B on 512 and CoLA-40B on 4,096.
//!
//! ```sh
//! cargo bench --bench plan
//! ```

use std::fmt;

use narrows_cost_model::profile;
use narrows_plan::model::presets;
use narrows_planner::{Request, search};

/// A request with one sequence of 4,096 tokens for each device.
#[derive(Clone, Copy)]
struct PlanSize {
    model: &'static str,
    devices: u64,
}

impl fmt::Display for PlanSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.model, self.devices)
    }
}

const SMALL: PlanSize = PlanSize { model: "cola-7b", devices: 4 };
const LARGE: PlanSize = PlanSize { model: "cola-30b", devices: 512 };
const LARGEST: PlanSize = PlanSize { model: "cola-40b", devices: 4096 };

fn main() {
    divan::main();
}

/// On two or more cores, solves of different groupings and bounds of different meshes run in parallel.
#[divan::bench(args = [SMALL, LARGE, LARGEST], sample_count = 5, sample_size = 1)]
fn plan(bencher: divan::Bencher, case: PlanSize) {
    let request = request(case);
    request.validate().expect("a valid request");
    bencher.bench_local(|| {
        let outcome = search(&request);
        assert!(outcome.best.is_some(), "{case} has a plan");
        outcome
    });
}

fn request(case: PlanSize) -> Request {
    Request::new(
        presets::find(case.model).expect("a preset"),
        profile::preset("a100-80gb").expect("a profile"),
        case.devices,
        case.devices,
        4096,
    )
}
