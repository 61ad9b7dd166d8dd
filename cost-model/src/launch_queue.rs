//! The host's launches and the device's work of an eager run.
//!
//! The host launches operator i after hᵢ seconds and does not wait for the device. The device runs operators in order,
//! each once it is launched and its predecessor has ended:
//!
//! ```text
//! Hᵢ = Hᵢ₋₁ + hᵢ                      launched
//! Dᵢ = max(Hᵢ, Dᵢ₋₁) + dᵢ             ended
//! ```
//! A run of operators maps (H, D) to (H + h, max(D + d, H + e)): the host's time h, the device's time d, and the end e of
//! the device after both began together. Runs are composed without looking at their operators again, so that a step of
//! equal blocks takes no longer to price than one block.

/// A run of operators, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LaunchQueue {
    /// Time of the host.
    host_s: f64,
    /// Time of the device without waiting.
    device_s: f64,
    /// End of the device, when host and device begin together.
    end_s: f64,
}

impl LaunchQueue {
    /// One operator.
    pub fn operator(host_s: f64, device_s: f64) -> LaunchQueue {
        LaunchQueue { host_s, device_s, end_s: host_s + device_s }
    }

    /// This run followed by another.
    pub fn then(self, next: LaunchQueue) -> LaunchQueue {
        LaunchQueue {
            host_s: self.host_s + next.host_s,
            device_s: self.device_s + next.device_s,
            end_s: f64::max(self.end_s + next.device_s, self.host_s + next.end_s),
        }
    }

    /// This run, `times` times.
    pub fn repeated(self, times: u64) -> LaunchQueue {
        let (mut power, mut result) = (self, LaunchQueue::default());
        let mut left = times;
        while left > 0 {
            if left % 2 == 1 {
                result = result.then(power);
            }
            power = power.then(power);
            left /= 2;
        }
        result
    }

    /// Time of the device without waiting.
    pub fn device_s(&self) -> f64 {
        self.device_s
    }

    /// Time that the device waits for the host, when they begin together.
    pub fn wait_s(&self) -> f64 {
        self.time_s() - self.device_s
    }

    /// Time until both have ended, when they begin together.
    pub fn time_s(&self) -> f64 {
        self.end_s.max(self.host_s)
    }
}

#[cfg(test)]
mod tests {
    use narrows_plan::random::SplitMix64;

    use super::LaunchQueue;

    /// The recurrence, operator by operator.
    fn simulate(operators: &[(f64, f64)]) -> f64 {
        let (mut launched, mut ended) = (0.0_f64, 0.0_f64);
        for (host_s, device_s) in operators {
            launched += host_s;
            ended = launched.max(ended) + device_s;
        }
        ended.max(launched)
    }

    #[test]
    fn composed_runs_take_the_time_of_their_operators() {
        let mut random = SplitMix64::new(7);
        for _ in 0..100 {
            let mut draw = || (random.below(100) as f64, random.below(100) as f64);
            let operators: Vec<(f64, f64)> = (0..12).map(|_| draw()).collect();
            let run = operators.iter().fold(LaunchQueue::default(), |run, &(host_s, device_s)| {
                run.then(LaunchQueue::operator(host_s, device_s))
            });
            assert_eq!(run.time_s(), simulate(&operators));
            let repeated: Vec<(f64, f64)> =
                operators.iter().copied().cycle().take(12 * 5).collect();
            assert_eq!(run.repeated(5).time_s(), simulate(&repeated));
        }
    }

    #[test]
    fn the_slower_of_host_and_device_decides() {
        let of = |host_s, device_s| LaunchQueue::operator(host_s, device_s).repeated(10).time_s();
        assert_eq!(of(1.0, 5.0), 51.0);
        assert_eq!(of(5.0, 1.0), 51.0);
    }
}
