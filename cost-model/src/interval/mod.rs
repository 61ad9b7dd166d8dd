//! How far a prediction may be off: 90 % intervals by the bootstrap.
//!
//! Measurements are drawn with replacement, as many as there are, and the few numbers of the fit are
//! fitted again to each draw. The interval of a new prediction x is where the middle 90 % lie of
//!
//! ```text
//! ln x(θ_b) + scale(x) · rᵢ          for every draw b and every residual i
//! rᵢ = (0.632 · unseenᵢ + 0.368 · ownᵢ) / scaleᵢ
//! unseenᵢ = mean of ln(measuredᵢ / predictedᵢ(θ_b)) over the draws b without i      ownᵢ: of the fit itself
//! ```
//! the bootstrap's spread of the parameters, plus a residual. About 37 % of the measurements are missing in
//! a draw: their residuals are honest, but hold the error of a fit to fewer measurements, which the draws
//! already show; the fit's own residuals are too small by what it has adapted to. Between them stands
//! Efron's .632 (JASA 1983; for intervals Kumar and Srivastava, 2012). The scale grows with the distance from
//! what was measured ([`price::shapes`](crate::price::shapes)). n residuals are spread by √((n + 1)/(n − 1)),
//! what a normal sample of n falls short of the next one. The point prediction always lies within.

mod spread;

pub use spread::drawn as error_drawn;
pub use spread::{ErrorModel, UnmeasuredKernel};

/// Share that lies within.
pub const COVERED: f64 = 0.9;

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): small, and the same on every machine.
///
/// ```
/// use narrows_cost_model::interval::Random;
///
/// assert_eq!(Random::new(0).next(), 0xe220_a839_7b1d_cdaf);
/// ```
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// With a seed of its own.
    pub fn new(seed: u64) -> SplitMix64 {
        SplitMix64(seed)
    }

    /// The next 64 bits.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A number below `count`, which must be more than zero.
    pub fn below(&mut self, count: usize) -> usize {
        ((u128::from(self.next()) * count as u128) >> 64) as usize
    }

    /// A number in (0, 1).
    pub fn share(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }

    /// A number of the standard normal distribution, by Box and Muller.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.share().ln()).sqrt();
        radius * (std::f64::consts::TAU * self.share()).cos()
    }
}

/// A fit repeated on draws of its measurements.
#[derive(Clone, Debug)]
pub struct Bootstrap<P> {
    /// What was fitted to each draw.
    pub draws: Vec<P>,
    /// One residual for each measurement that some draw has not seen, in their order.
    pub residuals: Vec<(usize, f64)>,
}

/// Efron's weight of what draws have not seen.
const UNSEEN: f64 = 0.632;

/// Drawing goes on for at most so many times what was asked for. A unit alone in its stratum is never left out.
const LONGER: usize = 4;

/// What is drawn together: measurements, by their indexes, that err alike.
pub type ResamplingUnit = Vec<usize>;

/// Every measurement for itself.
pub fn each_alone(measurements: usize) -> Vec<Vec<ResamplingUnit>> {
    vec![(0..measurements).map(|index| vec![index]).collect()]
}

/// Repeats a fit so many times. Of each of `strata` as many units are drawn as it has, whole ("cluster bootstrap":
/// Field and Welsh, 2007): where the next measurement is of a unit that nobody saw, as a step of another
/// model is, what a draw has not seen must be whole units. `fit` is told how often each measurement was
/// drawn, and `fitted` is the one to all of them; `residual` is ln(measured / predicted) over the scale of one.
///
/// A unit that is in every draw has no residual, and with few units it may be the one that errs most: drawing goes on,
/// for at most four times as many draws, until each was left out once.
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
    let mut sums = vec![(0.0, 0_usize); measurements];
    let mut drawn = vec![];
    let left_out = |sums: &[(f64, usize)]| sums.iter().all(|(_, unseen)| *unseen > 0);
    while drawn.len() < draws || (drawn.len() < LONGER * draws && !left_out(&sums)) {
        let mut times = vec![0.0; measurements];
        for units in strata {
            for _ in 0..units.len() {
                units[random.below(units.len())].iter().for_each(|index| times[*index] += 1.0);
            }
        }
        let draw = fit(&times);
        for (index, (sum, unseen)) in sums.iter_mut().enumerate() {
            if times[index] == 0.0 {
                *sum += residual(&draw, index);
                *unseen += 1;
            }
        }
        drawn.push(draw);
    }
    let weighed = |(index, (sum, unseen)): (usize, (f64, usize))| {
        let unseen = (unseen > 0).then(|| sum / unseen as f64)?;
        Some((index, UNSEEN * unseen + (1.0 - UNSEEN) * residual(fitted, index)))
    };
    let residuals = sums.into_iter().enumerate().filter_map(weighed).collect();
    Bootstrap { draws: drawn, residuals }
}

/// The middle 90 % of all sums of one of `draws` and one of `residuals` times `scale`, as a pair of
/// logarithms around the point prediction: low ≤ 0 ≤ high. Draws are ln x(θ_b) − ln x(θ).
pub fn around(draws: &[f64], residuals: &[f64], scale: f64) -> [f64; 2] {
    let none = [0.0];
    let draws = if draws.is_empty() { &none[..] } else { draws };
    let scale = scale * few(residuals.len());
    middle(draws.iter().flat_map(|draw| residuals.iter().map(move |r| draw + scale * r)).collect())
}

/// How much further than `residuals` of them the next one lies.
pub fn few(residuals: usize) -> f64 {
    let n = residuals.max(2) as f64;
    ((n + 1.0) / (n - 1.0)).sqrt()
}

/// The middle 90 % of logarithms, 0 within.
fn middle(mut logarithms: Vec<f64>) -> [f64; 2] {
    logarithms.sort_by(f64::total_cmp);
    let beyond = (1.0 - COVERED) / 2.0;
    let [low, high] = [beyond, 1.0 - beyond].map(|share| quantile(&logarithms, share));
    [low.min(0.0), high.max(0.0)]
}

/// A quantile of sorted numbers, linear between them; 0 of none.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let at = share.clamp(0.0, 1.0) * last as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    below + (above - below) * at.fract()
}

/// At most `count` numbers that are distributed as these are: their quantiles, where they are more.
pub fn thinned(mut numbers: Vec<f64>, count: usize) -> Vec<f64> {
    numbers.sort_by(f64::total_cmp);
    if numbers.len() <= count {
        return numbers;
    }
    let share = |index: usize| (index as f64 + 0.5) / count as f64;
    (0..count).map(|index| quantile(&numbers, share(index))).collect()
}

/// Of how many figures how many lie within their intervals.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Coverage {
    /// Figures.
    pub figures: usize,
    /// Of these, within.
    pub inside: usize,
}

impl Coverage {
    /// Counts figures and their intervals.
    pub fn of(figures: impl IntoIterator<Item = (f64, [f64; 2])>) -> Coverage {
        let mut counted = Coverage::default();
        for (figure, [low, high]) in figures {
            counted.figures += 1;
            counted.inside += usize::from(low <= figure && figure <= high);
        }
        counted
    }

    /// The share within; `None` of nothing.
    pub fn share(&self) -> Option<f64> {
        (self.figures > 0).then(|| self.inside as f64 / self.figures as f64)
    }
}
