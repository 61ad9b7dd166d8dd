//! The error of whole steps, from plans that were measured but not fitted to.
//!
//! Plans of one model, batch and length form a group with correlated errors. With rᵢⱼ = ln(measured / predicted) of plan
//! j of group i, the error of a step of the next group is drawn from
//!
//! ```text
//! ± |rᵢⱼ| · √((G + 1)/(G − 1))       each of the G groups with the same weight, then one of its plans
//! ```
//! Groups have the same weight whatever their numbers of plans, because the next step belongs to another group ("double
//! conformal" prediction of Dunn, Wasserman and Ramdas, 2022, without its guarantee, for lack of groups). Residuals are
//! taken with both signs, because the errors of a group mostly have one sign, which may differ in the next group. The
//! square root is [`small_sample_factor`].

use narrows_cost_model::interval::{COVERAGE, equal_quantiles, quantile, small_sample_factor};
use narrows_cost_model::profile::{Profile, Provenance, RELATIVE_ERROR_MAX, RelativeError};
use narrows_plan::Defects;

use super::class::{HALF_WIDTH_MIN, RESIDUALS_MAX};

/// Least number of groups in a closed loop: leaving out one of three leaves two, which [`step_error`] needs.
pub(crate) const STEP_GROUPS_MIN: usize = 3;

/// The error of a step, from ln(measured / predicted) of plans by group. `None` for fewer than two groups with a plan.
pub fn step_error(groups: &[&[f64]], provenance: Provenance) -> Option<RelativeError> {
    let groups: Vec<&[f64]> = groups.iter().copied().filter(|group| !group.is_empty()).collect();
    if groups.len() < 2 {
        return None;
    }
    let per_group = (RESIDUALS_MAX / 2 / groups.len()).max(1);
    let mut sizes: Vec<f64> =
        groups.iter().flat_map(|group| equal_quantiles(&sorted_sizes(group), per_group)).collect();
    let widening = small_sample_factor(groups.len());
    sizes.iter_mut().for_each(|size| *size *= widening);
    sizes.sort_by(f64::total_cmp);
    let half_width = quantile(&sizes, COVERAGE).exp_m1();
    if half_width < HALF_WIDTH_MIN {
        let widening = HALF_WIDTH_MIN.ln_1p() / quantile(&sizes, COVERAGE).max(1e-9);
        sizes.iter_mut().for_each(|size| *size = (*size * widening).max(1e-6));
    }
    let residuals = sizes.iter().rev().map(|size| -size).chain(sizes.iter().copied()).collect();
    let half_width_90 = half_width.clamp(HALF_WIDTH_MIN, RELATIVE_ERROR_MAX);
    Some(RelativeError { half_width_90, residuals, provenance })
}

fn sorted_sizes(residuals: &[f64]) -> Vec<f64> {
    let mut sizes: Vec<f64> = residuals.iter().map(|residual| residual.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    sizes
}

/// The profile with a measured step error in place of the assumed one.
///
/// # Errors
/// An error outside the range that profiles allow.
pub fn with_step_error(profile: &Profile, error: RelativeError) -> Result<Profile, Defects> {
    let mut file = profile.file().clone();
    if let Some(measured) = &mut file.measured {
        measured.steps = Some(error);
        file.executors.captured.step_error = None;
    }
    file.resolve()
}
