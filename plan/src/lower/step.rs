//! The step phase: reduce all gradients, find their norm, update all weights.

use crate::context::Context;
use crate::emit::{
    InstrTemplate, OperandSlot, clear_square_sum, reduce_owned_gradient, reduce_square_sum,
    reduce_tied_gradient, update_parameter,
};
use crate::graph::OpId;
use crate::layout::WeightSplit;
use crate::program::{ParameterShard, Phase};
use crate::strategy::{OpParameters, owned_parameters};

use super::{BufferKey, SegmentSite, StageLowering};

impl StageLowering<'_> {
    pub(super) fn step(&mut self, places: &[SegmentSite]) {
        self.phase = Phase::Step;
        let context = self.plan.context;
        let square_sum = self.get(BufferKey::Shared(OperandSlot::SquareSum));
        self.push(clear_square_sum(), &"step".into(), |_, _| square_sum);
        self.tied_reduce(places);
        for (place, op, parameter) in self.owned(places) {
            let kind = place.plan.segment.kind;
            let templates = reduce_owned_gradient(kind, &parameter, self.plan.tied, &context);
            self.push_parameter(place, op, templates);
        }
        for template in reduce_square_sum(&context) {
            self.push(template, &"step gradient norm".into(), |_, _| square_sum);
        }
        for (place, op, parameter) in self.owned(places) {
            self.push_parameter(place, op, update_parameter(&parameter, &context));
        }
    }

    fn owned<'b>(&self, places: &[SegmentSite<'b>]) -> Vec<(SegmentSite<'b>, OpId, OpParameters)> {
        let mut owned = vec![];
        for place in places {
            let segment = &place.plan.segment;
            for op in segment.op_ids() {
                let strategy = place.plan.choice.ops[op.0 as usize].choice.strategy;
                let parameter =
                    owned_parameters(segment, op, strategy, self.plan.tied, &self.plan.context);
                owned.extend(parameter.map(|parameter| (*place, op, parameter)));
            }
        }
        owned
    }

    fn push_parameter(&mut self, place: SegmentSite, op: OpId, templates: Vec<InstrTemplate>) {
        let square_sum = self.get(BufferKey::Shared(OperandSlot::SquareSum));
        let origin = place.origin(&place.plan.segment.op(op).name);
        for template in templates {
            self.push(template, &origin, |lowering, operand| match operand.slot {
                OperandSlot::SquareSum => square_sum,
                slot => lowering.get(BufferKey::Parameter(place.instance, op, slot)),
            });
        }
    }

    /// With several stages a tied weight lies on the first and the last: its gradients are added.
    fn tied_reduce(&mut self, places: &[SegmentSite]) {
        if !self.plan.tied || self.plan.stages.len() == 1 {
            return;
        }
        for place in places {
            let segment = &place.plan.segment;
            let Some(op) = segment.vocabulary_op() else { continue };
            let gradient =
                self.get(BufferKey::Parameter(place.instance, op, OperandSlot::WeightGradient(0)));
            let extent = self.program.buffer(gradient).extent;
            let template = reduce_tied_gradient(extent, &self.plan.context);
            self.push(template, &place.origin(&segment.op(op).name), |_, _| gradient);
        }
    }
}

impl ParameterShard {
    /// How a parameter lies over the tensor axis.
    pub(super) fn of(
        block: Option<u64>,
        parameter: &OpParameters,
        context: &Context,
    ) -> ParameterShard {
        let part = |size: u64| size / context.tensor_size();
        let offset_stride = parameter
            .members
            .iter()
            .map(|member| match parameter.split {
                WeightSplit::Whole => 0,
                WeightSplit::Rows => part(member.rows),
                WeightSplit::Columns => part(member.columns),
            })
            .collect();
        let OpParameters { members, split, .. } = parameter.clone();
        ParameterShard { block, members, split, offset_stride }
    }
}
