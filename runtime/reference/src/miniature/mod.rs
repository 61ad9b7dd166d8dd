//! Numeric check of a plan: whether it computes the function of its model.
//!
//! A plan for a cluster cannot run on a workstation, but most numeric errors of plans do not depend on
//! widths: layouts, reductions, what is kept and recomputed, the division into stages. [`Miniature`]
//! therefore scales the model and the plan down, keeping their structure, and [`Miniature::compare`]
//! compares the loss and every gradient of one step on a backend with those of the reference
//! interpreter in f64.
//!
//! ```
//! use narrows_plan::Plan;
//! use narrows_plan::model::presets;
//! use narrows_reference::Miniature;
//!
//! let plan = Plan::read(narrows_test_support::plan_files::BTP).unwrap();
//! let model = presets::find(&plan.model.name).unwrap();
//! let miniature = Miniature::new(&plan, &model).unwrap();
//! assert_eq!(miniature.plan.mesh, plan.mesh);
//! assert!(miniature.model.hidden < 64);
//! let open = |model: &_, program| narrows_cpu::session(model, program, 1);
//! assert!(miniature.compare(&open, 1).unwrap().agrees());
//! ```

mod blocks;
mod compare;
mod widths;
mod workload;

use narrows_plan::model::Model;
use narrows_plan::{Defects, GradReduceDtype, Plan, PlanSource, Precision};

pub use compare::{
    GRADIENT_TOLERANCE, LOSS_TOLERANCE, NumericComparison, NumericError, OpenSession,
};

/// A model and a plan of the same structure as larger ones.
///
/// The mesh, the stages, all decisions, ZeRO, and whether tokens are sharded by sequences or by
/// positions stay the same. The precision is f32. Scaled down are:
///
/// - *widths*: each is mapped to a small one. Equal widths stay equal, different ones stay different,
///   and a width is divisible by the size of the tensor axis if it was before;
/// - *blocks*: two of each sequence of consecutive blocks of equal shape and equal decisions remain;
/// - *the batch*: few sequences, few tokens, and at most the microbatches that fill the pipeline twice;
/// - *replicas*: at most two parts of the batch, or two shard groups of two, and as many parts of a sequence as the least
///   factor of the context axis, if the mesh has more devices than can be threads.
#[derive(Clone, Debug, PartialEq)]
pub struct Miniature {
    /// The scaled-down model.
    pub model: Model,
    /// The scaled-down plan.
    pub plan: Plan,
}

impl Miniature {
    /// Scales down a plan and its model.
    ///
    /// # Errors
    /// All defects of a plan that does not fit its model.
    pub fn new(plan: &Plan, model: &Model) -> Result<Miniature, Defects> {
        plan.resolve(model)?;
        let (stages, layers) = blocks::shrink_stages(plan, model);
        let mut small_model = widths::shrink_model(model, plan);
        small_model.blocks =
            layers.into_iter().map(|layer| small_model.blocks[layer].clone()).collect();
        small_model.name = format!("{} (miniature)", model.name);
        let replicas_max = if plan.shard_size.is_some() { 4 } else { 2 };
        let (mesh, workload) = workload::shrink_workload(
            plan.mesh,
            plan.workload,
            plan.context_attention,
            replicas_max,
        );
        for block in &mut small_model.blocks {
            let lengths = [plan.workload, workload].map(|workload| workload.sequence_length);
            block.attention = workload::shrink_window(block.attention, lengths);
        }
        let shard_size = match mesh.replicas() < plan.mesh.replicas() {
            true => plan.shard_size.map(|size| size.min(2)),
            false => plan.shard_size,
        };
        let origin =
            PlanSource { name: small_model.name.clone(), fingerprint: small_model.fingerprint() };
        let plan = Plan {
            model: origin,
            precision: Precision::Fp32,
            grad_reduce_dtype: GradReduceDtype::Fp32,
            mesh,
            workload,
            shard_size,
            stages,
            loro_every: None,
            ..plan.clone()
        };
        plan.resolve(&small_model)?;
        Ok(Miniature { model: small_model, plan })
    }
}
