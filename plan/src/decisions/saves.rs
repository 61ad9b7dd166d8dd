//! Checks that a plan keeps or recomputes every copy that the backward pass reads.

use std::collections::HashSet;

use crate::graph::Segment;
use crate::strategy::{Save, SegmentChoice, backward_reads_input, backward_reads_output};
use crate::{Defect, Defects, Layout};

use super::SegmentDecisions;

/// Names in `keep` and `redo` of a segment that are not matched with a copy yet.
pub(super) struct SaveDecisions {
    kept: HashSet<String>,
    recomputed: HashSet<String>,
}

impl SaveDecisions {
    /// Reads both lists, and reports names that are listed twice or in both.
    pub(super) fn read(
        decisions: &SegmentDecisions,
        field: &str,
        defects: &mut Defects,
    ) -> SaveDecisions {
        for (list, names) in [("keep", &decisions.keep), ("redo", &decisions.recompute)] {
            let (mut seen, mut reported) = (HashSet::new(), HashSet::new());
            for (at, name) in names.iter().enumerate() {
                if seen.insert(name) || !reported.insert(name) {
                    continue;
                }
                let problem = format!("`{name}` is listed twice");
                let defect = Defect::new(format!("{field}.{list}[{at}]"), problem);
                defects.push(defect.hint("remove one of the two entries"));
            }
        }
        let kept: HashSet<String> = decisions.keep.iter().cloned().collect();
        let recomputed: HashSet<String> = decisions.recompute.iter().cloned().collect();
        for name in kept.intersection(&recomputed) {
            let problem = format!("`{name}` is listed in `keep` too");
            let defect = Defect::new(format!("{field}.redo"), problem);
            defects.push(defect.hint("keep it or recompute it, not both"));
        }
        SaveDecisions { kept, recomputed }
    }

    /// Removes a copy from both lists and returns its save.
    pub(super) fn take(&mut self, name: &str) -> Save {
        if self.kept.remove(name) {
            Save::Kept
        } else if self.recomputed.remove(name) {
            Save::Recomputed
        } else {
            Save::Dropped
        }
    }

    /// Reports names that match no copy of the segment.
    pub(super) fn report_unmatched(self, field: &str, defects: &mut Defects) {
        for (list, names) in [("keep", self.kept), ("redo", self.recomputed)] {
            let mut names: Vec<String> = names.into_iter().collect();
            names.sort();
            for name in names {
                let problem = format!(
                    "`{name}` is not a copy of any value of this segment under these strategies"
                );
                defects.push(Defect::new(format!("{field}.{list}"), problem));
            }
        }
    }
}

/// Checks that every copy that the backward pass reads is kept or recomputed, and that copies can be
/// recomputed from saved ones.
pub(super) fn check_saves(
    field: &str,
    segment: &Segment,
    choice: &SegmentChoice,
    defects: &mut Defects,
) {
    let mut reported = vec![];
    let mut missing = |value: &str, layout: Layout, reader: String| {
        let problem = format!("`{value}@{layout}` is {reader}, but neither kept nor recomputed");
        let hint = format!("add `{value}@{layout}` to `keep` or to `redo`");
        reported.push(Defect::new(format!("{field}.keep"), problem).hint(hint));
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
                missing(name, layout, format!("read when `{}` is recomputed", node.name));
            }
        }
        for value in &node.outputs {
            let flow = &choice.flows[value.0 as usize];
            let name = &segment.value(*value).name;
            if backward_reads_output(&node.op, option.choice.strategy)
                && flow.saves[0] == Save::Dropped
            {
                let reader = format!("read by the backward pass of `{}`", node.name);
                missing(name, flow.producer.forward, reader);
            }
        }
    }
    for (value, flow) in segment.values.iter().zip(&choice.flows) {
        if flow.saves[1..].contains(&Save::Recomputed) && flow.saves[0] == Save::Dropped {
            missing(
                &value.name,
                flow.producer.forward,
                "the source of another copy that is recomputed".into(),
            );
        }
    }
    for (value, flow) in segment.values.iter().zip(&choice.flows) {
        let partial_kept = flow.producer.forward == Layout::Partial && flow.saves[0] == Save::Kept;
        if partial_kept || (value.producer.is_none() && flow.saves[0] == Save::Recomputed) {
            let name = format!("{}@{}", value.name, flow.producer.forward);
            let (list, problem) = if partial_kept {
                ("keep", format!("`{name}` is a partial sum, which cannot be kept"))
            } else {
                ("redo", format!("`{name}` is an input of the segment, which cannot be recomputed"))
            };
            reported.push(Defect::new(format!("{field}.{list}"), problem));
        }
    }
    defects.0.extend(reported);
}
