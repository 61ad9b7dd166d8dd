//! Checks of AdamW, of the norm it clips by, and of the state at the end of the step.

use crate::mesh::Axis;
use crate::program::{BufferId, Instr};

use super::super::error::{CheckResult, ensure, fault};
use super::super::lattice::PendingSum;
use super::{DataAxisLayout, StepChecker, WeightState};

impl StepChecker<'_, '_> {
    pub(super) fn update(&mut self, instr: &Instr) -> CheckResult {
        let mixed = self.check.context.precision == crate::Precision::MixedBf16;
        let (reads, writes) = (&instr.reads, &instr.writes);
        let states = if mixed { 3 } else { 2 };
        ensure(reads.len() == 4 && writes.len() == 2 + states, || {
            "needs a gradient, its states and the master or weight".into()
        })?;
        let (gradient, weight) = (reads[0], writes[0]);
        let shard = self.shard(gradient.buffer)?;
        let part = self.part(shard);
        for access in reads.iter().chain([&writes[0]]).chain(&writes[2..]) {
            self.accesses(access, part)?;
            ensure(self.shard(access.buffer)? == shard, || {
                format!("mixes {} with the state of another parameter", self.name(access.buffer))
            })?;
        }
        let all = self.check.stage.buffer(gradient.buffer).extent;
        self.accesses(&writes[1], all.rows * all.columns)?;
        let in_place = writes[1].buffer == gradient.buffer
            && writes[2..].iter().zip(&reads[1..]).all(|(write, read)| write == read)
            && (mixed || reads[3] == weight);
        ensure(in_place, || "does not update its operands in place".into())?;
        self.check_norm()?;
        let found = self.reduced(gradient.buffer)?.weight;
        let parted = self.reduced(gradient.buffer)?.data;
        for access in &writes[2..] {
            match self.states.get_mut(&access.buffer) {
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
            Some(held) if held.updated => return fault(format!("updates {name} twice")),
            Some(held) if Some(held.value) == found => {
                held.updated = true;
                held.data = parted;
            }
            _ => return fault(format!("updates {name} from the gradient of another parameter")),
        }
        if let Some(gradient) = self.gradients.get_mut(&gradient.buffer) {
            gradient.zeroed = true;
        }
        Ok(())
    }

    fn check_norm(&self) -> CheckResult {
        let Some(sum) = &self.square_sum else {
            return fault("clips by the norm of the gradients, but nothing summed their squares");
        };
        let uncounted = self.gradients.iter().filter(|(_, gradient)| {
            let elsewhere = gradient.weight == self.tied && self.check.index == 0;
            !(gradient.counted || (self.tied.is_some() && elsewhere))
        });
        if let Some(id) = uncounted.map(|(id, _)| *id).min() {
            let name = self.name(id);
            return fault(format!("clips by the norm of the gradients, but {name} is not in it"));
        }
        let owed = [
            (sum.tensor != PendingSum::Done, Axis::Tensor),
            (sum.data != DataAxisLayout::Whole, Axis::Data),
            (sum.pipeline != PendingSum::Done, Axis::Pipeline),
        ];
        match owed.into_iter().find(|(owed, _)| *owed) {
            Some((_, axis)) => fault(format!(
                "clips by the norm of the gradients, which has not been summed over the {} axis",
                axis.name()
            )),
            None => Ok(()),
        }
    }

    /// Violations at the end of the step.
    pub(super) fn ends(&self) -> Vec<String> {
        let mut found: Vec<(BufferId, &str)> = vec![];
        found.extend(self.weights.iter().filter_map(|(id, weight)| {
            let problem = match weight {
                WeightState { updated: false, .. } => "is not updated",
                WeightState { data: DataAxisLayout::Whole, .. } => return None,
                _ => "differs between replicas: each updated its part, and no all-gather followed",
            };
            Some((*id, problem))
        }));
        found.extend(
            self.gradients
                .iter()
                .filter(|(_, g)| !g.zeroed)
                .map(|(id, _)| (*id, "is not zeroed, so the next step would add to it")),
        );
        found.extend(
            self.states
                .iter()
                .filter(|(_, used)| !**used)
                .map(|(id, _)| (*id, "is an optimizer state that no update uses")),
        );
        found.sort();
        found
            .into_iter()
            .map(|(id, problem)| format!("at the end of the step {} {problem}", self.name(id)))
            .collect()
    }
}
