//! The closed loop: what a profile predicts of plans, beside what they took, and what that says of the
//! next prediction.
//!
//! Plans of one model, batch and length are a group, and err alike. The interval of a step comes from the
//! errors of all groups ([`fit::steps`](narrows_calibration::fit::steps)). Whether it holds is seen by leaving each
//! group out in turn: how many of its plans lie within what the other groups say?

use indexmap::IndexMap;
use narrows_calibration::fit::{GROUPS_MIN, steps, with_steps};
use narrows_cost_model::interval::{Coverage, ErrorModel};
use narrows_cost_model::profile::{Provenance, ProvenanceKind, RelativeError};
use narrows_cost_model::simulate::simulate;
use narrows_cost_model::{Executor, Prices, Profile};
use narrows_plan::{Defects, Kernel, Mesh};
use narrows_planner::kernels;
use narrows_runtime::DeviceId;
use serde::Serialize;

use super::{PlannedBenchmark, machine};

/// Plans whose step times are closer than this need not be told apart.
const APART: f64 = 0.10;

/// One plan.
#[derive(Clone, Debug, Serialize)]
pub struct ComparedPlan {
    /// Model, batch, and how it was divided.
    pub name: String,
    /// Whether its model's widths were measured.
    pub familiar: bool,
    /// The shortest step by the clock; on GPUs, of captured graphs.
    pub measured_step_time_s: f64,
    /// The step without disturbance: the sum of its instructions' shortest times, which no step had all at once.
    pub undisturbed_step_time_s: f64,
    /// What the profile says of the step by the clock.
    pub predicted_step_time_s: f64,
    /// Predicted over measured, less one.
    pub error: f64,
    /// What the profile says of its instructions alone, over the undisturbed step, less one.
    pub error_of_instructions: f64,
    /// Slower round over the faster one, less one: how well the measurement repeats.
    pub spread: f64,
    /// Where nine in ten should lie, by the errors of the other groups; absent where they are too few.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval_s: Option<[f64; 2]>,
    /// Whether every device allocated what was predicted.
    pub memory_exact: bool,
    /// Its kernels, each with how often a step runs it.
    #[serde(skip)]
    kernels: Vec<(Kernel, f64)>,
    #[serde(skip)]
    mesh: Mesh,
}

/// All of them.
#[derive(Clone, Debug, Serialize)]
pub struct ClosedLoop {
    /// Every plan.
    pub plans: Vec<ComparedPlan>,
    /// Mean of the errors' sizes.
    pub mean_absolute_error: f64,
    /// The same over plans of models whose widths were not measured.
    pub mean_absolute_error_unfamiliar: Option<f64>,
    /// The mean of the sizes of the instructions' errors.
    pub mean_absolute_error_of_instructions: f64,
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
    /// What the errors say of the next prediction; absent where plans are of too few groups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval: Option<StepInterval>,
}

/// The interval of the next step's time.
#[derive(Clone, Debug, Serialize)]
pub struct StepInterval {
    /// Groups of plans, each of one model, batch and length.
    pub groups: usize,
    /// Nine steps in ten should lie within a factor of 1 + this of their prediction.
    pub half_width_90: f64,
    /// Plans that lie within their intervals, each group left out in turn.
    pub inside: usize,
    /// What goes into the profile.
    #[serde(skip)]
    error: RelativeError,
}

impl ClosedLoop {
    /// The profile with the interval that its comparison showed. Where plans are of too few groups to show
    /// one, the interval stays what is assumed.
    ///
    /// # Errors
    /// None, as long as the profile was measured.
    pub fn widened(&self, profile: Profile) -> Result<Profile, Defects> {
        match &self.interval {
            Some(interval) => with_steps(&profile, interval.error.clone()),
            None => Ok(profile),
        }
    }
}

/// Holds a profile against plans that were run. `source` says where and how, for the provenance.
pub fn compare(profile: &Profile, subjects: &[PlannedBenchmark], source: &str) -> ClosedLoop {
    let mut plans: Vec<ComparedPlan> =
        subjects.iter().filter_map(|subject| compared(profile, subject)).collect();
    let interval = interval(profile, &mut plans, source);
    let mean = |of: fn(&ComparedPlan) -> f64, plans: Vec<&ComparedPlan>| {
        let sum: f64 = plans.iter().map(|plan| of(plan).abs()).sum();
        (!plans.is_empty()).then(|| sum / plans.len() as f64)
    };
    let (error, of_instructions) =
        (|plan: &ComparedPlan| plan.error, |plan: &ComparedPlan| plan.error_of_instructions);
    let all = || plans.iter().collect();
    let unfamiliar = plans.iter().filter(|plan| !plan.familiar).collect();
    let (pairs, pairs_wrong) = order(&plans, |_, _| true);
    let (of_one_task, of_one_task_wrong) = order(&plans, |a, b| task(a) == task(b));
    ClosedLoop {
        mean_absolute_error: mean(error, all()).unwrap_or_default(),
        mean_absolute_error_unfamiliar: mean(error, unfamiliar),
        mean_absolute_error_of_instructions: mean(of_instructions, all()).unwrap_or_default(),
        worst_error: plans.iter().map(|plan| plan.error.abs()).fold(0.0, f64::max),
        pairs,
        pairs_wrong,
        pairs_of_one_task: of_one_task,
        pairs_of_one_task_wrong: of_one_task_wrong,
        memory_exact: plans.iter().filter(|plan| plan.memory_exact).count(),
        interval,
        plans,
    }
}

fn compared(profile: &Profile, subject: &PlannedBenchmark) -> Option<ComparedPlan> {
    let best = subject.best()?;
    let program = subject.program.program();
    let mesh = program.context.mesh;
    let prices = Prices::new(profile, Executor::Captured, &mesh);
    let instructions = simulate(&subject.program, &|kernel| prices.kernel(kernel)).step_time.0;
    let predicted = instructions * profile.launching(Executor::Captured).step_factor;
    let arena = |device: usize| program.stages[DeviceId(device as u64).stage(&mesh)].arena.0;
    let mut allocated = best.allocated_bytes.iter().enumerate();
    let rounds = subject.rounds.iter().map(|round| round.whole_step_s);
    let fastest = rounds.clone().fold(f64::INFINITY, f64::min);
    let (measured, undisturbed) = (best.whole_step_s, best.undisturbed_step_s());
    Some(ComparedPlan {
        name: subject.work.name.clone(),
        familiar: subject.work.familiar,
        measured_step_time_s: measured,
        undisturbed_step_time_s: undisturbed,
        predicted_step_time_s: predicted,
        error: predicted / measured - 1.0,
        error_of_instructions: instructions / undisturbed - 1.0,
        spread: rounds.fold(0.0, f64::max) / fastest - 1.0,
        interval_s: None,
        memory_exact: allocated.all(|(device, bytes)| *bytes == arena(device)),
        kernels: kernels(program),
        mesh,
    })
}

/// The interval that all plans show, and for each plan the one that the other groups do.
fn interval(profile: &Profile, plans: &mut [ComparedPlan], source: &str) -> Option<StepInterval> {
    let mut groups: IndexMap<String, Vec<f64>> = IndexMap::new();
    for plan in &*plans {
        let residual = (plan.measured_step_time_s / plan.predicted_step_time_s).ln();
        groups.entry(task(plan).to_owned()).or_default().push(residual);
    }
    if groups.len() < GROUPS_MIN {
        return None;
    }
    let provenance = |inside: Option<usize>| Provenance {
        kind: ProvenanceKind::Measured,
        source: match inside {
            Some(inside) => format!(
                "{source}: {} plans in {} groups, of which {inside} lie within what the other groups say",
                plans.len(),
                groups.len()
            ),
            None => source.to_owned(),
        },
        date: machine::today(),
        assumed: vec![],
    };
    let without = |left_out: Option<&str>, provenance| {
        let others = groups.iter().filter(|(name, _)| Some(name.as_str()) != left_out);
        steps(&others.map(|(_, residuals)| residuals.as_slice()).collect::<Vec<_>>(), provenance)
    };
    let mut intervals = vec![];
    for plan in &*plans {
        let others = without(Some(task(plan)), provenance(None))?;
        let profile = with_steps(profile, others).ok()?;
        let spread = ErrorModel::new(&profile, Executor::Captured, &plan.mesh);
        let ratios = spread.of_step(&plan.kernels);
        intervals.push(ratios.map(|ratio| ratio * plan.predicted_step_time_s));
    }
    let measured = plans.iter().map(|plan| plan.measured_step_time_s);
    let inside = Coverage::of(measured.zip(intervals.iter().copied())).inside;
    let error = without(None, provenance(Some(inside)))?;
    let (groups, half_width_90) = (groups.len(), error.half_width_90);
    plans.iter_mut().zip(intervals).for_each(|(plan, own)| plan.interval_s = Some(own));
    Some(StepInterval { groups, half_width_90, inside, error })
}

/// What a plan is for: its name up to the devices.
fn task(plan: &ComparedPlan) -> &str {
    plan.name.split(" on ").next().unwrap_or_default()
}

/// Pairs more than a tenth apart, and how many of them are predicted the wrong way round.
fn order(
    plans: &[ComparedPlan],
    of: impl Fn(&ComparedPlan, &ComparedPlan) -> bool,
) -> (usize, usize) {
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
    use narrows_calibration::fit;
    use narrows_cost_model::profile::MeasuredPoint;
    use narrows_plan::Bytes;
    use narrows_plan::kernel::{FusedKernel, FusedKind};

    fn kernel() -> Kernel {
        let traffic = Bytes(1 << 20);
        let kind = FusedKind::Add;
        Kernel::Fused(FusedKernel { kind, traffic, unfused_traffic: traffic, unfused_launches: 1 })
    }

    fn plan(name: &str, measured: f64, predicted: f64) -> ComparedPlan {
        ComparedPlan {
            name: name.into(),
            familiar: true,
            measured_step_time_s: measured,
            undisturbed_step_time_s: measured,
            predicted_step_time_s: predicted,
            error: 0.0,
            error_of_instructions: 0.0,
            spread: 0.0,
            interval_s: None,
            memory_exact: true,
            kernels: vec![(kernel(), 1.0)],
            mesh: Mesh { tensor: 1, pipeline: 1, data: 1 },
        }
    }

    fn profile() -> Profile {
        let points = [1.0, 1.1, 0.9].map(|factor| {
            let Kernel::Fused(pass) = kernel() else { panic!("a pass") };
            let traffic = Bytes((pass.traffic.as_f64() * factor) as u64);
            let kernel = Kernel::Fused(FusedKernel { traffic, ..pass });
            MeasuredPoint { kernel, devices: 1, time_s: 1e-3 * factor, spread: 0.0 }
        });
        let machine = machine::describe(1, "a test");
        fit::profile(&machine, points.to_vec(), None).unwrap()
    }

    #[test]
    fn pairs_are_counted_where_they_lie_apart() {
        let plans = [plan("a on 1", 1.0, 1.0), plan("a on 2", 1.05, 0.5), plan("b on 1", 2.0, 0.9)];
        assert_eq!(order(&plans, |_, _| true), (2, 1));
        assert_eq!(order(&plans, |a, b| task(a) == task(b)), (0, 0));
    }

    /// Three groups err by 2 %, one by 30 %: no other group says that it would.
    #[test]
    fn each_group_is_held_against_the_others() {
        let group = |name: &'static str, error: f64| {
            [1.0, 1.1, 0.9].map(|s| plan(&format!("{name} on 1: {s}"), 1.0 + error * s, 1.0))
        };
        let mut plans =
            [group("a", 0.02), group("b", -0.02), group("c", 0.02), group("d", 0.3)].concat();
        let found = interval(&profile(), &mut plans, "a loop").unwrap();
        assert_eq!((found.groups, found.inside), (4, 9));
        assert!(found.half_width_90 > 0.2, "the profile itself knows of all: {found:?}");
        for plan in &plans {
            let [low, high] = plan.interval_s.unwrap();
            assert!(low < plan.predicted_step_time_s && plan.predicted_step_time_s < high);
            let wide = high > 1.25;
            assert_ne!(wide, task(plan) == "d", "only the others' errors count: {plan:?}");
        }
        assert!(interval(&profile(), &mut plans[..6], "a loop").is_none(), "two groups");
    }

    #[test]
    fn a_profile_keeps_what_was_assumed_until_it_was_compared() {
        let profile = profile();
        let compared = |interval| ClosedLoop {
            plans: vec![],
            mean_absolute_error: 0.0,
            mean_absolute_error_unfamiliar: None,
            mean_absolute_error_of_instructions: 0.0,
            worst_error: 0.0,
            pairs: 0,
            pairs_wrong: 0,
            pairs_of_one_task: 0,
            pairs_of_one_task_wrong: 0,
            memory_exact: 0,
            interval,
        };
        assert_eq!(compared(None).widened(profile.clone()).unwrap(), profile);
        let mut plans =
            ["a", "b", "c"].map(|name| plan(&format!("{name} on 1"), 1.1, 1.0)).to_vec();
        let found = interval(&profile, &mut plans, "a loop");
        let after = compared(found).widened(profile).unwrap();
        let error = after.file().measured.as_ref().unwrap().steps.as_ref().unwrap();
        assert!(error.provenance.source.contains("3 plans in 3 groups, of which 3"), "{error:?}");
        assert_eq!(after.file().executors.captured.step_error, None);
    }
}
