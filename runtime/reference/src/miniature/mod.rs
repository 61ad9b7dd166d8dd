//! Whether a plan computes its model, found out on the processors at hand.
//!
//! A plan for a cluster is too large to be tried before the cluster is booked, but what can be wrong
//! with it does not depend on widths: which layout meets which, what is reduced where, what is kept
//! and redone, which stage holds what. So [`Miniature`] makes a small plan of the same structure for a
//! small model, and [`Miniature::compare`] holds one step of it on the processor backend against the
//! reference interpreter in f64: the loss, and every gradient.
//!
//! ```
//! use narrows_plan::Plan;
//! use narrows_plan::model::presets;
//! use narrows_reference::Miniature;
//!
//! let plan = Plan::read(narrows_test_support::saved::BTP).unwrap();
//! let model = presets::find(&plan.model.name).unwrap();
//! let small = Miniature::of(&plan, &model).unwrap();
//! assert_eq!(small.plan.mesh, plan.mesh);
//! assert!(small.model.hidden < 64);
//! let open = |model: &_, program| narrows_cpu::session(model, program, 1);
//! assert!(small.compare(&open, 1).unwrap().is_equal());
//! ```

mod blocks;
mod compare;
mod widths;
mod workload;

use narrows_plan::PlanSource;
use narrows_plan::model::Model;
use narrows_plan::{Defects, Plan, Precision};

pub use compare::{
    Comparison, GRADIENT_TOLERANCE, GRADIENT_TOLERANCE_MAX, LOSS_TOLERANCE, NumericError,
    OpenSession,
};

/// A small plan of a small model, with the structure of a large plan of a large one.
///
/// Kept are the mesh, the stages, every decision, ZeRO, and whether tokens are split by sequences
/// or by positions. Numbers are f32. What is smaller:
///
/// - *widths*: each is mapped to a small one. Widths that were equal stay equal, those that
///   differed differ, and what the tensor axis divided it still divides, and nothing else;
/// - *blocks*: of consecutive blocks that are alike and decided alike two stay;
/// - *the batch*: few sequences, few tokens, and no more microbatches than it takes to fill the
///   pipeline twice;
/// - *replicas*: two, where there were more and the devices would be too many to be threads.
#[derive(Clone, Debug, PartialEq)]
pub struct Miniature {
    /// The small model.
    pub model: Model,
    /// The small plan.
    pub plan: Plan,
}

impl Miniature {
    /// The twin of a plan for its model.
    ///
    /// # Errors
    /// Every defect of the plan, when it does not fit its model.
    pub fn new(plan: &Plan, model: &Model) -> Result<Miniature, Defects> {
        plan.resolve(model)?;
        let (stages, kept) = blocks::kept(plan, model);
        let mut small = widths::shrunk(model, plan.mesh.tensor);
        small.blocks = kept.into_iter().map(|layer| small.blocks[layer].clone()).collect();
        small.name = format!("{} (twin)", model.name);
        let (mesh, workload) = workload::shrunk(plan.mesh, plan.workload);
        let origin = PlanSource { name: small.name.clone(), fingerprint: small.fingerprint() };
        let plan = Plan {
            model: origin,
            precision: Precision::Full32,
            mesh,
            workload,
            stages,
            ..plan.clone()
        };
        plan.resolve(&small)?;
        Ok(Miniature { model: small, plan })
    }
}
