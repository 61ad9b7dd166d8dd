//! How far whole steps lie from what a measured profile predicts of them.
//!
//! Plans are run that nothing was fitted to, in groups: those of one model, batch and length err alike.
//! With rᵢⱼ = ln(measured / predicted) of plan j of group i, the error of a step of the next group is drawn from
//!
//! ```text
//! ± |rᵢⱼ| · √((G + 1)/(G − 1))       a group i of G, each as often, then one of its plans
//! ```
//! Groups count the same, however many plans they have, because the next step is of another group ("double
//! conformal" prediction of Dunn, Wasserman and Ramdas, 2022, without its guarantee: the groups are few).
//! Both signs, because a group's errors mostly have the same, and the next group's may be the other. The root is
//! what a normal sample of G falls short of the next one.

use narrows_plan::Defects;

use narrows_cost_model::interval::{COVERED, few, quantile};
use narrows_cost_model::profile::{HALF_WIDTH_MAX, Profile, Provenance, RelativeError};

use super::{HALF_WIDTH_MIN, RESIDUALS_MAX};

/// Fewer groups do not show how far the next one lies: of these, leaving one out leaves two.
pub const GROUPS_MIN: usize = 3;

/// The error of a step, from ln(measured / predicted) of plans in groups. `None` of fewer than two groups that
/// have a plan.
pub fn steps(groups: &[&[f64]], provenance: Provenance) -> Option<RelativeError> {
    let groups: Vec<&[f64]> = groups.iter().copied().filter(|group| !group.is_empty()).collect();
    if groups.len() < 2 {
        return None;
    }
    let each = (RESIDUALS_MAX / 2 / groups.len()).max(1);
    let mut sizes: Vec<f64> = groups.iter().flat_map(|group| thinned(group, each)).collect();
    let wider = few(groups.len());
    sizes.iter_mut().for_each(|size| *size *= wider);
    sizes.sort_by(f64::total_cmp);
    let half_width = quantile(&sizes, COVERED).exp_m1();
    if half_width < HALF_WIDTH_MIN {
        let wider = HALF_WIDTH_MIN.ln_1p() / quantile(&sizes, COVERED).max(1e-9);
        sizes.iter_mut().for_each(|size| *size = (*size * wider).max(1e-6));
    }
    let residuals = sizes.iter().rev().map(|size| -size).chain(sizes.iter().copied()).collect();
    let half_width_90 = half_width.clamp(HALF_WIDTH_MIN, HALF_WIDTH_MAX);
    Some(RelativeError { half_width_90, residuals, provenance })
}

/// So many sizes, distributed as those of the group are.
fn thinned(group: &[f64], count: usize) -> Vec<f64> {
    let mut sizes: Vec<f64> = group.iter().map(|residual| residual.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    let share = |index: usize| (index as f64 + 0.5) / count as f64;
    (0..count).map(|index| quantile(&sizes, share(index))).collect()
}

/// The profile with this error of its steps, in place of the one that is assumed.
///
/// # Errors
/// When the profile measured nothing of its own, or the error is none that a profile may have.
pub fn with_steps(profile: &Profile, error: RelativeError) -> Result<Profile, Defects> {
    let mut file = profile.file().clone();
    if let Some(measured) = &mut file.measured {
        measured.steps = Some(error);
        file.executors.captured.step_error = None;
    }
    file.resolve()
}
