//! The objectives of searches, and the comparison of two plans under an objective.

use narrows_plan::{Context, Seconds};

use crate::feasible_plan::FeasiblePlan;

/// Quantity that a search minimises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Objective {
    /// Step time on all devices of the request.
    #[default]
    StepTime,
    /// Memory of the fullest device; among plans of equal memory, step time.
    Memory,
    /// Device-seconds of a step, on any number of devices up to that of the request.
    Cost,
}

impl Objective {
    /// All objectives.
    pub const ALL: [Objective; 3] = [Objective::StepTime, Objective::Memory, Objective::Cost];

    /// Name in JSON and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Objective::StepTime => "step-time",
            Objective::Memory => "memory",
            Objective::Cost => "cost",
        }
    }

    /// Value of a second of a step in a context: contexts of different numbers of devices are ordered and pruned by their
    /// times multiplied by it.
    pub(crate) fn weight(self, context: &Context) -> f64 {
        match self {
            Objective::StepTime | Objective::Memory => 1.0,
            Objective::Cost => context.mesh.devices() as f64,
        }
    }

    /// Value of a plan: seconds, bytes or device-seconds.
    pub(crate) fn value(self, plan: &FeasiblePlan) -> f64 {
        match self {
            Objective::StepTime => plan.average_time().0,
            Objective::Memory => plan.peak_arena().as_f64(),
            Objective::Cost => self.weight(&plan.decisions.context) * plan.average_time().0,
        }
    }

    /// The better of two plans, and the faster of plans of equal value; the first of equal ones.
    pub(crate) fn better(
        self,
        one: Option<FeasiblePlan>,
        other: Option<FeasiblePlan>,
    ) -> Option<FeasiblePlan> {
        let key = |plan: &FeasiblePlan| [self.value(plan), plan.average_time().0];
        let to_beat = one.as_ref().map_or([f64::INFINITY; 2], key);
        other.filter(|plan| key(plan) < to_beat).or(one)
    }

    /// Bound on the step time that follows from a bound on the objective.
    pub(crate) fn step_time_bound(self, bound: f64) -> Seconds {
        match self {
            Objective::StepTime => Seconds(bound),
            Objective::Memory | Objective::Cost => Seconds(0.0),
        }
    }
}
