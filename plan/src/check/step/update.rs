//! Checks of AdamW, of the norm that it clips by, and of the state at the end of the step.

use crate::program::{BufferId, Instr, ParameterUpdate};
use crate::{Layout, Precision};

use super::super::error::{CheckResult, ensure, fault};
use super::{GradientState, StepChecker, WeightState};

impl StepChecker<'_, '_> {
    pub(super) fn update(&mut self, instr: &Instr) -> CheckResult {
        ensure(!instr.reads.is_empty(), || "updates no parameter".into())?;
        self.check_gradient_norm()?;
        instr.parameter_updates().try_for_each(|update| match update {
            Some(update) => self.update_parameter(&update),
            None => fault(
                "needs a gradient, its states and the master or weight of each parameter, and updates them in place",
            ),
        })
    }

    fn update_parameter(&mut self, update: &ParameterUpdate) -> CheckResult {
        let ParameterUpdate { gradient, weight, zeroed, states } = update;
        let mixed = self.checker.context.precision == Precision::MixedBf16;
        ensure(states.len() == if mixed { 3 } else { 2 }, || {
            format!("updates {} and {} states", self.name(weight.buffer), states.len())
        })?;
        let shard = self.shard(gradient.buffer)?;
        let elements = self.updated_elements(shard);
        for access in [gradient, weight].into_iter().chain(*states) {
            self.check_elements(access, elements)?;
            ensure(self.shard(access.buffer)? == shard, || {
                format!("mixes {} with the state of another parameter", self.name(access.buffer))
            })?;
        }
        let whole = self.checker.stage.buffer(gradient.buffer).extent;
        if let Some(zeroed) = zeroed {
            self.check_elements(zeroed, whole.rows * whole.columns)?;
        }
        let reduced = self.reduced_gradient(gradient.buffer)?;
        let (gradient_of, shards) = (reduced.weight, reduced.layouts.shards);
        for access in *states {
            match self.optimizer_states.get_mut(&access.buffer) {
                Some(used) if !*used => *used = true,
                _ => {
                    return fault(format!(
                        "updates {} twice, or it is not an optimizer state",
                        self.name(access.buffer)
                    ));
                }
            }
        }
        let name = self.name(weight.buffer);
        match self.weights.get_mut(&weight.buffer) {
            Some(state) if state.updated => return fault(format!("updates {name} twice")),
            Some(state) if Some(state.value) == gradient_of => {
                state.updated = true;
                state.shards = if state.is_stored_in_parts { Layout::Replicated } else { shards };
            }
            _ => return fault(format!("updates {name} from the gradient of another parameter")),
        }
        if let Some(gradient) = self.gradients.get_mut(&gradient.buffer) {
            gradient.zeroed = zeroed.is_some();
        }
        Ok(())
    }

    /// Checks that the square sum contains every gradient and is reduced over all axes.
    fn check_gradient_norm(&self) -> CheckResult {
        let Some(sum) = &self.square_sum else {
            return fault("clips by the norm of the gradients, but nothing summed their squares");
        };
        let mut uncounted = self.uncounted.iter();
        let is_missing = |id: &&BufferId| !self.is_counted_on_last_stage(&self.gradients[id]);
        if let Some(id) = uncounted.find(is_missing) {
            let name = self.name(*id);
            return fault(format!("clips by the norm of the gradients, but {name} is not in it"));
        }
        match sum.layouts.unreduced_axis(Layout::Replicated) {
            Some(axis) => fault(format!(
                "clips by the norm of the gradients, which has not been summed over the {} axis",
                axis.name()
            )),
            None => Ok(()),
        }
    }

    /// Problems at the end of the step: weights without update, or whose replicas differ; gradients that
    /// are not zeroed; unused optimizer states.
    pub(super) fn end_of_step_problems(&self) -> Vec<String> {
        let mut problems: Vec<(BufferId, &str)> = vec![];
        problems.extend(self.weights.iter().filter_map(|(id, weight)| {
            let problem = match weight {
                WeightState { updated: false, .. } => "is not updated",
                WeightState { shards: Layout::Replicated, .. } => return None,
                _ => "differs between replicas: each updated its part, and no all-gather followed",
            };
            Some((*id, problem))
        }));
        let is_kept = |gradient: &GradientState| !gradient.zeroed && !gradient.is_overwritten;
        let kept = self.gradients.iter().filter(|(_, gradient)| is_kept(gradient));
        let problem = "is not zeroed, so the next step would add to it";
        problems.extend(kept.map(|(id, _)| (*id, problem)));
        let unused = self.optimizer_states.iter().filter(|(_, used)| !**used);
        problems.extend(unused.map(|(id, _)| (*id, "is an optimizer state that no update uses")));
        problems.sort();
        problems
            .into_iter()
            .map(|(id, problem)| format!("at the end of the step {} {problem}", self.name(id)))
            .collect()
    }
}
