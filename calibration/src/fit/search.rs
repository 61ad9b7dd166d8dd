//! A search along one number after the other: each is multiplied and divided by a step while that
//! helps, then the step is halved in its logarithm. Errors of fits are not smooth, and have few numbers.

use narrows_cost_model::profile::ProfileFile;

/// A number that is fitted, and where it may lie.
pub struct FitParameter {
    pub at: fn(&mut ProfileFile) -> &mut f64,
    pub range: (f64, f64),
}

/// Steps in the logarithm, from a factor of 4 to one of 1.01.
const STEPS: [f64; 9] = [1.4, 0.7, 0.35, 0.18, 0.09, 0.045, 0.022, 0.011, 0.01];
/// Moves of one number at one step.
const MOVES_MAX: usize = 12;

/// Makes the error as small as moves of single numbers can.
pub fn improve(
    file: &mut ProfileFile,
    parameters: &[FitParameter],
    error: impl Fn(&ProfileFile) -> f64,
) {
    for parameter in parameters {
        let value = (parameter.at)(file);
        *value = value.clamp(parameter.range.0, parameter.range.1);
    }
    let mut least = error(file);
    for step in STEPS {
        for parameter in parameters {
            for direction in [step.exp(), (-step).exp()] {
                for _ in 0..MOVES_MAX {
                    let before = *(parameter.at)(file);
                    let moved = (before * direction).clamp(parameter.range.0, parameter.range.1);
                    *(parameter.at)(file) = moved;
                    let now = error(file);
                    if now >= least {
                        *(parameter.at)(file) = before;
                        break;
                    }
                    least = now;
                }
            }
        }
    }
}
