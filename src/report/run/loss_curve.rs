//! The loss curve of a run, in bounded memory.

/// Width of a printed curve in characters.
const CURVE_WIDTH: usize = 60;

/// Values of a curve: far more than a printed curve has characters. A longer run has means of several steps each.
const VALUES_MAX: usize = 4096;

/// The losses of a run.
#[derive(Clone, Default)]
pub struct LossCurve {
    first: Option<f64>,
    last: Option<f64>,
    steps: u64,
    /// Means of `2^doublings` consecutive steps each.
    means: Vec<f64>,
    doublings: u32,
    /// Sum over the steps after those of the means, and their number.
    rest: (f64, u64),
}

impl LossCurve {
    /// Adds the loss of a step.
    pub fn push(&mut self, loss: f64) {
        self.first.get_or_insert(loss);
        self.last = Some(loss);
        self.steps += 1;
        let steps_per_mean = 1 << self.doublings;
        self.rest = (self.rest.0 + loss, self.rest.1 + 1);
        if self.rest.1 < steps_per_mean {
            return;
        }
        self.means.push(self.rest.0 / steps_per_mean as f64);
        self.rest = (0.0, 0);
        if self.means.len() == VALUES_MAX {
            self.means = self.means.as_chunks().0.iter().map(|[a, b]| (a + b) / 2.0).collect();
            self.doublings += 1;
        }
    }

    /// The loss of the first step.
    pub fn first(&self) -> Option<f64> {
        self.first
    }

    /// The loss of the last step.
    pub fn last(&self) -> Option<f64> {
        self.last
    }

    /// Number of steps.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Whether the loss grew back: the mean of the last tenth of the steps lies above the lowest mean of a tenth by more
    /// than half of what it had fallen from the first tenth, or above the first tenth.
    pub fn is_collapsed(&self) -> bool {
        if self.steps < COLLAPSE_STEPS_MIN {
            return false;
        }
        let means = parts(&self.values(), 10);
        let (first, last) = (means[0], means[means.len() - 1]);
        let lowest = means.iter().copied().fold(f64::INFINITY, f64::min);
        !last.is_finite() || last > first || last - lowest > COLLAPSE_SHARE * (first - lowest)
    }

    /// The axes of the curve if its first value is that of `first_step`: its first and last step, and its lowest and
    /// highest value.
    pub fn axes(&self, first_step: u64) -> String {
        let (low, high) = range(&parts(&self.values(), CURVE_WIDTH));
        let last_step = first_step + self.steps.saturating_sub(1);
        format!("steps {first_step} to {last_step}; ▁ {low:.4}, █ {high:.4}")
    }

    /// The curve as one line of block characters.
    pub fn line(&self) -> String {
        const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let means = parts(&self.values(), CURVE_WIDTH);
        let (low, high) = range(&means);
        let level = |value: &f64| {
            let share = if high > low { (value - low) / (high - low) } else { 0.0 };
            LEVELS[(share * 7.0).round() as usize]
        };
        means.iter().map(level).collect()
    }

    /// The curve, with the steps after the last mean as a value of their own.
    fn values(&self) -> Vec<f64> {
        let (sum, steps) = self.rest;
        let rest = (steps > 0).then(|| sum / steps as f64);
        self.means.iter().copied().chain(rest).collect()
    }
}

/// Steps below which a run is too short to tell whether its loss collapsed.
const COLLAPSE_STEPS_MIN: u64 = 20;

/// A loss has collapsed when it regains this share of its earlier decrease.
const COLLAPSE_SHARE: f64 = 0.5;

fn range(values: &[f64]) -> (f64, f64) {
    let start = (f64::INFINITY, f64::NEG_INFINITY);
    values.iter().fold(start, |(low, high), value| (low.min(*value), high.max(*value)))
}

/// Means of consecutive parts of about the same size; one for each value where these are fewer.
fn parts(values: &[f64], count: usize) -> Vec<f64> {
    let count = values.len().min(count);
    let mean = |part: usize| {
        let range = &values[part * values.len() / count..(part + 1) * values.len() / count];
        range.iter().sum::<f64>() / range.len() as f64
    };
    (0..count).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve_of(losses: impl IntoIterator<Item = f64>) -> LossCurve {
        let mut curve = LossCurve::default();
        losses.into_iter().for_each(|loss| curve.push(loss));
        curve
    }

    #[test]
    fn a_loss_that_grows_back_has_collapsed() {
        let falling: Vec<f64> = (0..40).map(|step| 5.0 - 0.05 * f64::from(step)).collect();
        let grown = |end: f64| curve_of([&falling[..36], &[end; 4]].concat());
        let is_collapsed = |curve: LossCurve| curve.is_collapsed();
        assert!(!is_collapsed(curve_of(falling.clone())) && !is_collapsed(grown(3.5)));
        assert!(is_collapsed(grown(4.8)) && is_collapsed(grown(9.0)));
        assert!(!is_collapsed(curve_of([1.0, 2.0])), "too short to tell");
    }

    #[test]
    fn axes_name_the_steps_and_the_range() {
        assert_eq!(curve_of([8.0, 4.5, 1.0]).axes(7), "steps 7 to 9; ▁ 1.0000, █ 8.0000");
    }

    #[test]
    fn a_curve_has_a_character_per_step_up_to_its_width() {
        assert_eq!(curve_of([]).line(), "");
        assert_eq!(curve_of([1.0]).line(), "▁");
        assert_eq!(curve_of([8.0, 4.5, 1.0]).line(), "█▅▁");
        assert_eq!(curve_of(vec![2.0; 1000]).line().chars().count(), CURVE_WIDTH);
    }

    #[test]
    fn a_long_curve_has_the_shape_of_all_its_steps_in_bounded_memory() {
        const STEPS: u32 = 1_000_001;
        let curve = curve_of((0..STEPS).map(|step| f64::from(STEPS - step)));
        assert!(curve.means.capacity() <= 2 * VALUES_MAX);
        assert_eq!((curve.first(), curve.last()), (Some(f64::from(STEPS)), Some(1.0)));
        let means = parts(&curve.values(), 10);
        assert!(means.is_sorted_by(|a, b| a > b), "{means:?}");
        let share = means[0] / f64::from(STEPS);
        assert!((share - 0.95).abs() < 0.01, "{share}");
        assert_eq!(curve.axes(1).split(';').next(), Some("steps 1 to 1000001"));
    }
}
