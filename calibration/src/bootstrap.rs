//! The bootstrap: a fit repeated on resampled measurements.
//!
//! Each draw b resamples the n measurements with replacement and repeats the fit, which gives parameters θ_b. The
//! residual of measurement i is
//!
//! ```text
//! rᵢ = (0.632 · unseenᵢ + 0.368 · ownᵢ) / scaleᵢ
//! unseenᵢ = mean of ln(measuredᵢ / predictedᵢ(θ_b)) over the draws b without i      ownᵢ: by the fit to all
//! ```
//! About 37 % of the measurements are missing in a draw. Their residuals are unbiased by overfitting, but too large: they
//! include the error of a fit to fewer measurements, which the spread of the draws contains already. The residuals of
//! the fit to all measurements are too small. Efron's .632 estimator weights the two (JASA 1983; for intervals Kumar and
//! Srivastava, 2012). [`interval`](narrows_cost_model::interval) computes intervals from draws and residuals.

use narrows_plan::random::SplitMix64;

/// Fits to draws, and residuals of the measurements.
#[derive(Clone, Debug)]
pub struct Bootstrap<P> {
    /// The fit to each draw.
    pub draws: Vec<P>,
    /// Index and residual of each measurement that some draw left out, in the order of the measurements.
    pub residuals: Vec<(usize, f64)>,
}

/// Efron's weight of the residuals by fits without the measurement.
const UNSEEN_WEIGHT: f64 = 0.632;

/// Largest number of draws, as a multiple of the requested ones. A unit alone in its stratum is never left out.
const DRAWS_FACTOR_MAX: usize = 4;

/// Indexes of measurements with correlated errors, which are drawn together.
pub(crate) type ResamplingUnit = Vec<usize>;

/// One stratum in which each measurement is a unit of its own.
pub fn independent_units(measurements: usize) -> Vec<Vec<ResamplingUnit>> {
    vec![(0..measurements).map(|index| vec![index]).collect()]
}

/// Repeats a fit on at least `draws` draws.
///
/// Each stratum is resampled in whole units ("cluster bootstrap": Field and Welsh, 2007): where the next measurement
/// belongs to an unseen unit, as a step of another model does, a draw must leave out whole units. `fit` gets how often
/// each measurement was drawn; `fitted` is the fit to all of them; `residual` is ln(measured / predicted) of one
/// measurement over its scale.
///
/// A unit that is in every draw has no residual, and with few units it may be the one with the largest error. Drawing
/// therefore continues until each unit was left out once, for at most four times the requested draws.
pub fn bootstrap<P>(
    strata: &[Vec<ResamplingUnit>],
    draws: usize,
    seed: u64,
    fitted: &P,
    mut fit: impl FnMut(&[f64]) -> P,
    residual: impl Fn(&P, usize) -> f64,
) -> Bootstrap<P> {
    let mut random = SplitMix64::new(seed);
    let indexes = strata.iter().flatten().flatten();
    let measurements = indexes.max().map_or(0, |last| last + 1);
    let mut unseen = vec![(0.0, 0_usize); measurements];
    let mut refits = vec![];
    let all_unseen = |unseen: &[(f64, usize)]| unseen.iter().all(|(_, count)| *count > 0);
    while refits.len() < draws || (refits.len() < DRAWS_FACTOR_MAX * draws && !all_unseen(&unseen))
    {
        let mut counts = vec![0.0; measurements];
        for units in strata {
            for _ in 0..units.len() {
                units[random.below(units.len())].iter().for_each(|index| counts[*index] += 1.0);
            }
        }
        let refit = fit(&counts);
        for (index, (sum, count)) in unseen.iter_mut().enumerate() {
            if counts[index] == 0.0 {
                *sum += residual(&refit, index);
                *count += 1;
            }
        }
        refits.push(refit);
    }
    let combined = |(index, (sum, count)): (usize, (f64, usize))| {
        let unseen = (count > 0).then(|| sum / count as f64)?;
        let own = residual(fitted, index);
        Some((index, UNSEEN_WEIGHT * unseen + (1.0 - UNSEEN_WEIGHT) * own))
    };
    let residuals = unseen.into_iter().enumerate().filter_map(combined).collect();
    Bootstrap { draws: refits, residuals }
}
