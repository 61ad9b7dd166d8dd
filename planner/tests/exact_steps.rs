//! Searches with exact steps of LORO: the average step is bounded, and minimised over all meshes.

use std::num::NonZeroU64;

use narrows_cost_model::profile::{self, HostSpec, Provenance, ProvenanceKind};
use narrows_cost_model::{ExactStepTime, ExactStepWork, Profile};
use narrows_plan::model::presets;
use narrows_planner::{Request, search};

/// GPUs whose hosts have slow links.
fn profile() -> Profile {
    let mut file = profile::preset("a100-80gb-8").unwrap().file().clone();
    file.host = Some(HostSpec {
        threads_per_device: 2,
        flops_per_s: 1e10,
        copy_bytes_per_s: 1e10,
        network_bytes_per_s: 2e8,
        provenance: Provenance {
            kind: ProvenanceKind::Assumed,
            source: "test".into(),
            date: "2026-11-27".into(),
            assumed: vec![],
        },
    });
    file.resolve().unwrap()
}

fn request(loro_every: Option<u64>) -> Request {
    let model = presets::find("svd-130m").unwrap();
    let loro_every = loro_every.and_then(NonZeroU64::new);
    Request { loro_every, ..Request::new(model, profile(), 8, 32, 512) }
}

#[test]
fn the_average_step_is_minimised_over_all_meshes() {
    let without = search(&request(None)).best.unwrap();
    assert_eq!((without.beyond_kernels.0, without.plan.loro_every), (0.0, None));
    let free = request(Some(10));
    let result = search(&free);
    let best = result.best.unwrap();
    assert_eq!(best.plan.loro_every, free.loro_every);
    // Stages sum the factors of their own blocks at the same time.
    let stages = [&without, &best].map(|plan| plan.plan.mesh.pipeline);
    assert!(stages[0] < stages[1], "{stages:?}");
    let factor = free.profile.launch_costs(free.executor).step_factor;
    let bound = result.report.bound.0 / factor;
    assert!(bound <= best.average_time().0 * (1.0 + 1e-9), "{bound}");
    let (mut others, mut slower) = (0, 0);
    for pipeline in [1, 2, 4, 8] {
        for tensor in [1, 2, 4, 8] {
            let sizes = (Some(tensor), Some(pipeline));
            let fixed = Request { tensor: sizes.0, pipeline: sizes.1, ..free.clone() };
            if 8 % (tensor * pipeline) != 0 {
                continue;
            }
            let Some(other) = search(&fixed).best else { continue };
            let share = ExactStepTime::of(other.program.program(), &fixed.profile).unwrap();
            assert!((other.beyond_kernels.0 * factor / share.per_step().0 - 1.0).abs() < 1e-9);
            let least = ExactStepWork::of(&fixed.model, &fixed.profile)
                .least_per_step(&other.program.program().context);
            assert!(least.0 > 0.0 && least.0 <= share.per_step().0 * (1.0 + 1e-9), "{fixed:?}");
            assert!(bound <= other.average_time().0 * (1.0 + 1e-9), "{tensor} × {pipeline}");
            others += 1;
            slower += usize::from(best.average_time() < other.average_time());
        }
    }
    assert!(others >= 9 && slower + 1 >= others, "{slower} of {others}");
}
