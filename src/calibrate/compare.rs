//! The closed loop: what a profile predicts of plans, beside what they took.

use narrows_cost_model::simulate::simulate;
use narrows_cost_model::{Executor, Prices, Profile};
use narrows_runtime::DeviceId;
use serde::Serialize;

use super::Subject;

/// Plans whose step times are closer than this need not be told apart.
const APART: f64 = 0.10;

/// One plan.
#[derive(Clone, Debug, Serialize)]
pub struct Compared {
    /// Model, batch, and how it was divided.
    pub name: String,
    /// Whether its model's widths were measured.
    pub familiar: bool,
    /// The step without disturbance: the sum of its instructions' shortest times.
    pub measured_step_time_s: f64,
    /// The shortest step by the clock, other work on the machine included.
    pub shortest_step_time_s: f64,
    /// What the profile says.
    pub predicted_step_time_s: f64,
    /// Predicted over measured, less one.
    pub error: f64,
    /// Slower round over the faster one, less one: how well the measurement repeats.
    pub spread: f64,
    /// Whether every device allocated what was predicted.
    pub memory_exact: bool,
}

/// All of them.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Every plan.
    pub plans: Vec<Compared>,
    /// Mean of the errors' sizes.
    pub mean_absolute_error: f64,
    /// The same over plans of models whose widths were not measured.
    pub mean_absolute_error_unfamiliar: Option<f64>,
    /// The largest of them.
    pub worst_error: f64,
    /// Pairs that lie more than a tenth apart.
    pub pairs: usize,
    /// Those of them that are predicted in the wrong order.
    pub pairs_wrong: usize,
    /// The same among plans of one model, batch and length only, which is what a planner chooses from.
    pub pairs_of_one_task: usize,
    /// Those of them that are predicted in the wrong order.
    pub pairs_of_one_task_wrong: usize,
    /// Plans whose devices allocated what was predicted.
    pub memory_exact: usize,
}

/// Holds a profile against plans that were run.
pub fn compare(profile: &Profile, subjects: &[Subject]) -> Comparison {
    let plans: Vec<Compared> =
        subjects.iter().filter_map(|subject| compared(profile, subject)).collect();
    let mean = |plans: Vec<&Compared>| {
        let sum: f64 = plans.iter().map(|plan| plan.error.abs()).sum();
        (!plans.is_empty()).then(|| sum / plans.len() as f64)
    };
    let (pairs, pairs_wrong) = order(&plans, |_, _| true);
    let (of_one_task, of_one_task_wrong) = order(&plans, |a, b| task(a) == task(b));
    Comparison {
        mean_absolute_error: mean(plans.iter().collect()).unwrap_or_default(),
        mean_absolute_error_unfamiliar: mean(plans.iter().filter(|p| !p.familiar).collect()),
        worst_error: plans.iter().map(|plan| plan.error.abs()).fold(0.0, f64::max),
        pairs,
        pairs_wrong,
        pairs_of_one_task: of_one_task,
        pairs_of_one_task_wrong: of_one_task_wrong,
        memory_exact: plans.iter().filter(|plan| plan.memory_exact).count(),
        plans,
    }
}

fn compared(profile: &Profile, subject: &Subject) -> Option<Compared> {
    let best = subject.best()?;
    let program = subject.program.program();
    let mesh = program.context.mesh;
    let prices = Prices::new(profile, Executor::Captured, &mesh);
    let predicted = simulate(&subject.program, &|kernel| prices.kernel(kernel)).step_time.0;
    let arena = |device: usize| program.stages[DeviceId(device as u64).stage(&mesh)].arena.0;
    let mut allocated = best.allocated.iter().enumerate();
    let rounds = subject.rounds.iter().map(|round| round.step_s());
    let fastest = rounds.clone().fold(f64::INFINITY, f64::min);
    let measured = best.step_s();
    Some(Compared {
        name: subject.work.name.clone(),
        familiar: subject.work.familiar,
        measured_step_time_s: measured,
        shortest_step_time_s: best.shortest_step_s,
        predicted_step_time_s: predicted,
        error: predicted / measured - 1.0,
        spread: rounds.fold(0.0, f64::max) / fastest - 1.0,
        memory_exact: allocated.all(|(device, bytes)| *bytes == arena(device)),
    })
}

/// What a plan is for: its name up to the devices.
fn task(plan: &Compared) -> &str {
    plan.name.split(" on ").next().unwrap_or_default()
}

/// Pairs more than a tenth apart, and how many of them are predicted the wrong way round.
fn order(plans: &[Compared], of: impl Fn(&Compared, &Compared) -> bool) -> (usize, usize) {
    let (mut pairs, mut wrong) = (0, 0);
    for (index, a) in plans.iter().enumerate() {
        for b in plans[index + 1..].iter().filter(|b| of(a, b)) {
            let (fast, slow) =
                if a.measured_step_time_s < b.measured_step_time_s { (a, b) } else { (b, a) };
            if slow.measured_step_time_s > fast.measured_step_time_s * (1.0 + APART) {
                pairs += 1;
                wrong += usize::from(fast.predicted_step_time_s >= slow.predicted_step_time_s);
            }
        }
    }
    (pairs, wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_counted_where_they_lie_apart() {
        let plan = |name: &str, measured: f64, predicted: f64| Compared {
            name: name.into(),
            familiar: true,
            measured_step_time_s: measured,
            shortest_step_time_s: measured,
            predicted_step_time_s: predicted,
            error: 0.0,
            spread: 0.0,
            memory_exact: true,
        };
        let plans = [plan("a on 1", 1.0, 1.0), plan("a on 2", 1.05, 0.5), plan("b on 1", 2.0, 0.9)];
        assert_eq!(order(&plans, |_, _| true), (2, 1));
        assert_eq!(order(&plans, |a, b| task(a) == task(b)), (0, 0));
    }
}
