//! Which copies a plan keeps and redoes, and whether that is all the backward pass needs.

use std::collections::HashSet;

use crate::graph::Segment;
use crate::strategy::{Save, SegmentChoice, backward_reads_input, backward_reads_output};
use crate::{Defect, Defects, Layout};

use super::SegmentDecisions;

pub(super) struct SaveDecisions {
    kept: HashSet<String>,
    redone: HashSet<String>,
}

impl SaveDecisions {
    pub(super) fn read(
        decisions: &SegmentDecisions,
        field: &str,
        defects: &mut Defects,
    ) -> SaveDecisions {
        for (list, names) in [("keep", &decisions.keep), ("redo", &decisions.recompute)] {
            let mut seen = HashSet::new();
            for (at, name) in names.iter().enumerate().filter(|(_, name)| !seen.insert(*name)) {
                let problem = format!("`{name}` is listed twice");
                let defect = Defect::new(format!("{field}.{list}[{at}]"), problem);
                defects.push(defect.hint("once is enough"));
            }
        }
        let kept: HashSet<String> = decisions.keep.iter().cloned().collect();
        let redone: HashSet<String> = decisions.recompute.iter().cloned().collect();
        for name in kept.intersection(&redone) {
            let problem = format!("`{name}` is both kept and redone");
            defects.push(Defect::new(format!("{field}.redo"), problem));
        }
        SaveDecisions { kept, redone }
    }

    pub(super) fn take(&mut self, name: &str) -> Save {
        if self.kept.remove(name) {
            Save::Kept
        } else if self.redone.remove(name) {
            Save::Recomputed
        } else {
            Save::Dropped
        }
    }

    pub(super) fn unused(self, field: &str, defects: &mut Defects) {
        for (list, names) in [("keep", self.kept), ("redo", self.redone)] {
            let mut names: Vec<String> = names.into_iter().collect();
            names.sort();
            for name in names {
                let problem = format!("`{name}` is no copy of this segment under its strategies");
                defects.push(Defect::new(format!("{field}.{list}"), problem));
            }
        }
    }
}

/// What the backward pass reads is there, and what is redone can be.
pub(super) fn check_saves(
    field: &str,
    segment: &Segment,
    choice: &SegmentChoice,
    defects: &mut Defects,
) {
    let mut found = vec![];
    let mut missing = |value: &str, layout: Layout, why: String| {
        let problem = format!("`{value}@{layout}` is {why}, but is neither kept nor redone");
        found.push(Defect::new(format!("{field}.keep"), problem));
    };
    for (index, node) in segment.ops.iter().enumerate() {
        let option = &choice.ops[index];
        for (port, value) in node.inputs.iter().enumerate() {
            let flow = &choice.flows[value.0 as usize];
            let layout = option.choice.inputs[port].forward;
            let name = &segment.value(*value).name;
            if backward_reads_input(&node.op) && !flow.is_saved(layout) {
                missing(name, layout, format!("read by the backward pass of `{}`", node.name));
            } else if option.recompute && !flow.is_saved(layout) {
                missing(name, layout, format!("read when `{}` is redone", node.name));
            }
        }
        for value in &node.outputs {
            let flow = &choice.flows[value.0 as usize];
            let name = &segment.value(*value).name;
            if backward_reads_output(&node.op, option.choice.strategy)
                && flow.saves[0] == Save::Dropped
            {
                let why = format!("read by the backward pass of `{}`", node.name);
                missing(name, flow.producer.forward, why);
            }
        }
    }
    for (value, flow) in segment.values.iter().zip(&choice.flows) {
        if flow.saves[1..].contains(&Save::Recomputed) && flow.saves[0] == Save::Dropped {
            missing(&value.name, flow.producer.forward, "what another copy is redone from".into());
        }
    }
    for (value, flow) in segment.values.iter().zip(&choice.flows) {
        let partial_kept = flow.producer.forward == Layout::Partial && flow.saves[0] == Save::Kept;
        if partial_kept || (value.producer.is_none() && flow.saves[0] == Save::Recomputed) {
            let problem =
                format!("`{}@{}` cannot be saved like this", value.name, flow.producer.forward);
            found.push(Defect::new(format!("{field}.keep"), problem));
        }
    }
    defects.0.extend(found);
}
