//! Times of steps.

use narrows_calibration::upper_median;

/// Times and loss of a step.
pub struct Times {
    pub wall_s: f64,
    pub processor_s: f64,
    pub loss: f64,
}

/// The shortest time.
pub fn min(steps: &[Times], time: fn(&Times) -> f64) -> f64 {
    steps.iter().map(time).fold(f64::INFINITY, f64::min)
}

/// The median time.
pub fn median(steps: &[Times], time: fn(&Times) -> f64) -> f64 {
    upper_median(steps.iter().map(time).collect()).unwrap_or(f64::NAN)
}

/// Processor time of all threads of this process so far, in seconds; NaN where it is not available. The
/// resolution on Linux is a hundredth of a second.
pub fn processor_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The second field is a name in parentheses, which may contain any character.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
    let ticks: Vec<f64> = fields.filter_map(|field| field.parse().ok()).collect();
    if let [user, system] = ticks[..] { (user + system) / 100.0 } else { f64::NAN }
}
