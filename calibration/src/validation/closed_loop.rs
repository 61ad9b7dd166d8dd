//! The closed loop: step times of plans predicted by a measured profile, compared with their measured step times, and
//! the interval of the next prediction.
//!
//! Plans of one task (model, batch and length) form a group with correlated errors. The error of a step is estimated from
//! all groups ([`step_error`]). Each group is left out in turn to count its plans within the interval by the other
//! groups.

use indexmap::IndexMap;
use narrows_cost_model::interval::ErrorModel;
use narrows_cost_model::profile::{Provenance, ProvenanceKind, RelativeError};
use narrows_cost_model::{Executor, Prices, Profile, StreamPrices, simulate};
use narrows_plan::{CheckedProgram, Defects, Kernel, Mesh};
use narrows_planner::kernels;
use serde::Serialize;

use super::errors::IntervalCoverage;
use crate::fit::{STEP_GROUPS_MIN, step_error, with_step_error};

/// Least relative difference of the step times of a pair of plans whose order is compared.
const STEP_TIME_DIFFERENCE_MIN: f64 = 0.10;

/// Measurements of a plan.
#[derive(Clone, Debug)]
pub struct MeasuredPlan<'a> {
    /// The name in reports.
    pub name: String,
    /// Model, batch and length. Plans of one task have correlated errors.
    pub task: String,
    /// Whether kernels of the model's widths were measured.
    pub widths_measured: bool,
    /// The program that was run.
    pub program: &'a CheckedProgram,
    /// The shortest step; on GPUs, of captured graphs.
    pub step_time_s: f64,
    /// The sum of the shortest times of the step's instructions.
    pub min_instruction_sum_s: f64,
    /// The slowest round over the fastest one, minus 1.
    pub spread: f64,
    /// Whether every device allocated the predicted bytes.
    pub memory_exact: bool,
}

/// Measurement and prediction of a plan.
#[derive(Clone, Debug, Serialize)]
pub struct ClosedLoopPlan {
    /// Model, batch, and how it was divided.
    pub name: String,
    /// Whether kernels of the model's widths were measured.
    #[serde(rename = "familiar")]
    pub widths_measured: bool,
    /// The shortest measured step; on GPUs, of captured graphs.
    pub measured_step_time_s: f64,
    /// The sum of the shortest times of the step's instructions.
    #[serde(rename = "undisturbed_step_time_s")]
    pub min_instruction_sum_s: f64,
    /// The predicted step time.
    pub predicted_step_time_s: f64,
    /// predicted / measured − 1.
    pub error: f64,
    /// The same for the instructions alone: their predicted time over the sum of their shortest measured times, minus 1.
    pub error_of_instructions: f64,
    /// The slowest round over the fastest one, minus 1.
    pub spread: f64,
    /// The 90 % interval by the errors of the other groups; absent where there are too few groups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval_s: Option<[f64; 2]>,
    /// Whether every device allocated the predicted bytes.
    pub memory_exact: bool,
    #[serde(skip)]
    task: String,
    /// Kernels, each with its number of launches in a step.
    #[serde(skip)]
    kernels: Vec<(Kernel, f64)>,
    #[serde(skip)]
    mesh: Mesh,
}

/// Comparison of plans with their predictions.
#[derive(Clone, Debug, Serialize)]
pub struct ClosedLoop {
    /// The plans.
    pub plans: Vec<ClosedLoopPlan>,
    /// Mean absolute error.
    pub mean_absolute_error: f64,
    /// Mean absolute error over plans of models whose widths were not measured.
    #[serde(rename = "mean_absolute_error_unfamiliar")]
    pub mean_absolute_error_other_widths: Option<f64>,
    /// Mean absolute error of the instructions.
    pub mean_absolute_error_of_instructions: f64,
    /// The largest absolute error.
    pub worst_error: f64,
    /// Pairs of plans that differ by more than a tenth.
    pub pairs: usize,
    /// Pairs that are predicted in the wrong order.
    pub pairs_wrong: usize,
    /// Pairs of plans of one task: a planner chooses among plans of one task.
    pub pairs_of_one_task: usize,
    /// Pairs of one task that are predicted in the wrong order.
    pub pairs_of_one_task_wrong: usize,
    /// Plans whose devices all allocated the predicted bytes.
    pub memory_exact: usize,
    /// The interval of the next prediction; absent where there are too few groups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval: Option<StepInterval>,
}

/// The interval of the next step's time.
#[derive(Clone, Debug, Serialize)]
pub struct StepInterval {
    /// Groups of plans of one task.
    pub groups: usize,
    /// The h for which 90 % of the steps should lie within a factor of 1 + h of their prediction.
    pub half_width_90: f64,
    /// Plans within the interval by the other groups.
    pub inside: usize,
    /// The step error for the profile.
    #[serde(skip)]
    error: RelativeError,
}

impl ClosedLoop {
    /// The profile with its measured step error. With too few groups, the step error stays as assumed.
    ///
    /// # Errors
    /// A profile that does not resolve; a measured profile does.
    pub fn apply_step_error(&self, profile: Profile) -> Result<Profile, Defects> {
        match &self.interval {
            Some(interval) => with_step_error(&profile, interval.error.clone()),
            None => Ok(profile),
        }
    }
}

/// Compares the predictions of a profile with measured plans. `source` and `date` are the provenance of the step error.
pub fn closed_loop(
    profile: &Profile,
    measured: &[MeasuredPlan],
    source: &str,
    date: &str,
) -> ClosedLoop {
    let mut plans: Vec<ClosedLoopPlan> =
        measured.iter().map(|plan| compare(profile, plan)).collect();
    let interval = step_interval(profile, &mut plans, source, date);
    let mean = |of: fn(&ClosedLoopPlan) -> f64, plans: Vec<&ClosedLoopPlan>| {
        let sum: f64 = plans.iter().map(|plan| of(plan).abs()).sum();
        (!plans.is_empty()).then(|| sum / plans.len() as f64)
    };
    let (error, error_of_instructions) =
        (|plan: &ClosedLoopPlan| plan.error, |plan: &ClosedLoopPlan| plan.error_of_instructions);
    let all = || plans.iter().collect();
    let other_widths = plans.iter().filter(|plan| !plan.widths_measured).collect();
    let (pairs, pairs_wrong) = count_pairs(&plans, |_, _| true);
    let (pairs_of_one_task, pairs_of_one_task_wrong) = count_pairs(&plans, |a, b| a.task == b.task);
    ClosedLoop {
        mean_absolute_error: mean(error, all()).unwrap_or_default(),
        mean_absolute_error_other_widths: mean(error, other_widths),
        mean_absolute_error_of_instructions: mean(error_of_instructions, all()).unwrap_or_default(),
        worst_error: plans.iter().map(|plan| plan.error.abs()).fold(0.0, f64::max),
        pairs,
        pairs_wrong,
        pairs_of_one_task,
        pairs_of_one_task_wrong,
        memory_exact: plans.iter().filter(|plan| plan.memory_exact).count(),
        interval,
        plans,
    }
}

fn compare(profile: &Profile, measured: &MeasuredPlan) -> ClosedLoopPlan {
    let program = measured.program.program();
    let mesh = program.context.mesh;
    let prices = Prices::new(profile, Executor::Captured, &mesh);
    let instructions_s =
        simulate(measured.program, StreamPrices::new(&|kernel| prices.kernel_time(kernel), None))
            .step_time
            .0;
    let predicted_s = instructions_s * profile.launch_costs(Executor::Captured).step_factor;
    ClosedLoopPlan {
        name: measured.name.clone(),
        widths_measured: measured.widths_measured,
        measured_step_time_s: measured.step_time_s,
        min_instruction_sum_s: measured.min_instruction_sum_s,
        predicted_step_time_s: predicted_s,
        error: predicted_s / measured.step_time_s - 1.0,
        error_of_instructions: instructions_s / measured.min_instruction_sum_s - 1.0,
        spread: measured.spread,
        interval_s: None,
        memory_exact: measured.memory_exact,
        task: measured.task.clone(),
        kernels: kernels(program),
        mesh,
    }
}

/// Estimates the step error from all plans, and sets the interval of each plan from the other groups.
fn step_interval(
    profile: &Profile,
    plans: &mut [ClosedLoopPlan],
    source: &str,
    date: &str,
) -> Option<StepInterval> {
    let mut groups: IndexMap<String, Vec<f64>> = IndexMap::new();
    for plan in &*plans {
        let residual = (plan.measured_step_time_s / plan.predicted_step_time_s).ln();
        groups.entry(plan.task.clone()).or_default().push(residual);
    }
    if groups.len() < STEP_GROUPS_MIN {
        return None;
    }
    let provenance = |inside: Option<usize>| Provenance {
        kind: ProvenanceKind::Measured,
        source: match inside {
            Some(inside) => format!(
                "{source}: {} plans in {} groups, of which {inside} lie within the interval by the other groups",
                plans.len(),
                groups.len()
            ),
            None => source.to_owned(),
        },
        date: date.to_owned(),
        assumed: vec![],
    };
    let error_without = |left_out: Option<&str>, provenance| {
        let others = groups.iter().filter(|(task, _)| Some(task.as_str()) != left_out);
        let residuals: Vec<&[f64]> = others.map(|(_, residuals)| residuals.as_slice()).collect();
        step_error(&residuals, provenance)
    };
    let mut intervals = vec![];
    for plan in &*plans {
        let others = error_without(Some(&plan.task), provenance(None))?;
        let profile = with_step_error(profile, others).ok()?;
        let errors = ErrorModel::new(&profile, Executor::Captured, &plan.mesh);
        let ratios = errors.step_interval(&plan.kernels);
        intervals.push(ratios.map(|ratio| ratio * plan.predicted_step_time_s));
    }
    let measured = plans.iter().map(|plan| plan.measured_step_time_s);
    let inside = IntervalCoverage::count(measured.zip(intervals.iter().copied())).inside;
    let error = error_without(None, provenance(Some(inside)))?;
    let (groups, half_width_90) = (groups.len(), error.half_width_90);
    plans.iter_mut().zip(intervals).for_each(|(plan, own)| plan.interval_s = Some(own));
    Some(StepInterval { groups, half_width_90, inside, error })
}

/// Counts the pairs of plans that differ by more than [`STEP_TIME_DIFFERENCE_MIN`], and those predicted in the wrong order.
fn count_pairs(
    plans: &[ClosedLoopPlan],
    comparable: impl Fn(&ClosedLoopPlan, &ClosedLoopPlan) -> bool,
) -> (usize, usize) {
    let (mut pairs, mut wrong) = (0, 0);
    for (index, a) in plans.iter().enumerate() {
        for b in plans[index + 1..].iter().filter(|b| comparable(a, b)) {
            let (fast, slow) =
                if a.measured_step_time_s < b.measured_step_time_s { (a, b) } else { (b, a) };
            if slow.measured_step_time_s
                > fast.measured_step_time_s * (1.0 + STEP_TIME_DIFFERENCE_MIN)
            {
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
    use crate::fit::{CpuMachine, fit_cpu_profile};
    use narrows_cost_model::profile::MeasuredPoint;
    use narrows_plan::Bytes;
    use narrows_plan::kernel::FusedKernel;

    fn kernel() -> Kernel {
        Kernel::Fused(FusedKernel::memory_pass(Bytes(1 << 20)))
    }

    fn plan(task: &str, measured: f64, predicted: f64) -> ClosedLoopPlan {
        ClosedLoopPlan {
            name: format!("{task} on 1"),
            task: task.into(),
            widths_measured: true,
            measured_step_time_s: measured,
            min_instruction_sum_s: measured,
            predicted_step_time_s: predicted,
            error: 0.0,
            error_of_instructions: 0.0,
            spread: 0.0,
            interval_s: None,
            memory_exact: true,
            kernels: vec![(kernel(), 1.0)],
            mesh: Mesh { tensor: 1, pipeline: 1, data: 1, context: 1 },
        }
    }

    fn profile() -> Profile {
        let points = [1.0, 1.1, 0.9].map(|factor| {
            let Kernel::Fused(op) = kernel() else { panic!("a fused op") };
            let traffic = Bytes((op.traffic.as_f64() * factor) as u64);
            let kernel = Kernel::Fused(FusedKernel { traffic, ..op });
            MeasuredPoint { kernel, devices: 1, time_s: 1e-3 * factor, spread: 0.0 }
        });
        let machine = CpuMachine {
            name: "invented".into(),
            title: "an invented processor, 1 thread".into(),
            description: "A machine for a test.".into(),
            memory: Bytes(1 << 34),
            threads: 1,
            source: "a test".into(),
            date: "2026-11-21".into(),
        };
        fit_cpu_profile(&machine, points.to_vec(), None).unwrap()
    }

    fn interval(profile: &Profile, plans: &mut [ClosedLoopPlan]) -> Option<StepInterval> {
        step_interval(profile, plans, "a loop", "2026-11-21")
    }

    #[test]
    fn only_distinct_pairs_count() {
        let plans = [plan("a", 1.0, 1.0), plan("a", 1.05, 0.5), plan("b", 2.0, 0.9)];
        assert_eq!(count_pairs(&plans, |_, _| true), (2, 1));
        assert_eq!(count_pairs(&plans, |a, b| a.task == b.task), (0, 0));
    }

    /// Three groups have errors of 2 %, one of 30 %, which the errors of the others do not cover.
    #[test]
    fn each_group_is_compared_with_the_interval_of_the_others() {
        let group = |task: &'static str, error: f64| {
            [1.0, 1.1, 0.9].map(|factor| plan(task, 1.0 + error * factor, 1.0))
        };
        let mut plans =
            [group("a", 0.02), group("b", -0.02), group("c", 0.02), group("d", 0.3)].concat();
        let step_interval = interval(&profile(), &mut plans).unwrap();
        assert_eq!((step_interval.groups, step_interval.inside), (4, 9));
        assert!(
            step_interval.half_width_90 > 0.2,
            "the step error does not include group d: {step_interval:?}"
        );
        for plan in &plans {
            let [low, high] = plan.interval_s.unwrap();
            assert!(low < plan.predicted_step_time_s && plan.predicted_step_time_s < high);
            let wide = high > 1.25;
            assert_ne!(wide, plan.task == "d", "the interval is not by the other groups: {plan:?}");
        }
        assert!(interval(&profile(), &mut plans[..6]).is_none(), "two groups are too few");
    }

    #[test]
    fn the_assumed_step_error_stays_until_plans_are_compared() {
        let profile = profile();
        let comparison = |interval| ClosedLoop {
            plans: vec![],
            mean_absolute_error: 0.0,
            mean_absolute_error_other_widths: None,
            mean_absolute_error_of_instructions: 0.0,
            worst_error: 0.0,
            pairs: 0,
            pairs_wrong: 0,
            pairs_of_one_task: 0,
            pairs_of_one_task_wrong: 0,
            memory_exact: 0,
            interval,
        };
        assert_eq!(comparison(None).apply_step_error(profile.clone()).unwrap(), profile);
        let mut plans = ["a", "b", "c"].map(|task| plan(task, 1.1, 1.0)).to_vec();
        let step_interval = interval(&profile, &mut plans);
        let after = comparison(step_interval).apply_step_error(profile).unwrap();
        let error = after.file().measured.as_ref().unwrap().steps.as_ref().unwrap();
        assert!(error.provenance.source.contains("3 plans in 3 groups, of which 3"), "{error:?}");
        assert_eq!(after.file().executors.captured.step_error, None);
    }
}
