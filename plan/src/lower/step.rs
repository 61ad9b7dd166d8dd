//! The step phase: reduces all gradients, computes their norm, updates all weights.

use crate::emit::{
    InstrTemplate, OperandSlot, TemplateOperand, clear_square_sum, reduce_owned_gradient,
    reduce_square_sum, reduce_tied_gradient, update_parameter,
};
use crate::graph::{OpId, SegmentKind};
use crate::program::{BufferId, BufferRole, GradientBucket, Phase};
use crate::strategy::OpParameters;

use super::stage_lowering::{BufferKey, SegmentSite, StageLowering};

impl StageLowering<'_> {
    pub(super) fn step(&mut self, sites: &[SegmentSite]) {
        self.phase = Phase::Step;
        let context = self.plan.context;
        self.gradient_buckets(sites);
        let square_sum = self.buffer_of(BufferKey::Shared(OperandSlot::SquareSum));
        self.push(clear_square_sum(), &"step".into(), |_, _| square_sum);
        self.reduce_tied_gradients(sites);
        for (site, op, parameter) in self.owned_parameters(sites) {
            let kind = site.plan.segment.kind;
            let reductions = reduce_owned_gradient(kind, &parameter, self.plan.tied, &context);
            let templates = match is_reduced_early(&site, sites) {
                true => reductions.rest,
                false => reductions.into_all().collect(),
            };
            self.push_parameter(site, op, templates);
        }
        for template in reduce_square_sum(&context) {
            self.push(template, &"step gradient norm".into(), |_, _| square_sum);
        }
        for (site, op, parameter) in self.owned_parameters(sites) {
            self.push_parameter(site, op, update_parameter(&parameter, &context));
        }
    }

    /// The reductions that run during the last pass, one bucket for each segment: when its part of the pass has ended,
    /// its gradients are complete.
    fn gradient_buckets(&mut self, sites: &[SegmentSite]) {
        let context = self.plan.context;
        for site in sites.iter().rev().filter(|site| is_reduced_early(site, sites)) {
            let start = self.program.step.len();
            let kind = site.plan.segment.kind;
            for (_, op, parameter) in self.owned_parameters(std::slice::from_ref(site)) {
                let reductions = reduce_owned_gradient(kind, &parameter, self.plan.tied, &context);
                self.push_parameter(*site, op, reductions.overlapped);
            }
            let reductions = start..self.program.step.len();
            if !reductions.is_empty() {
                let [backward, weight_gradient] = self.gradient_ends[&site.instance];
                let is_deferred = self.program.chunks[0].last_phase() == Phase::WeightGradient;
                let after = match site.chunk {
                    0 if is_deferred => weight_gradient,
                    0 => backward,
                    // The last pass is one through the first chunk.
                    _ => 0,
                };
                self.program.gradient_buckets.push(GradientBucket { after, reductions });
            }
        }
    }

    fn owned_parameters<'b>(
        &self,
        sites: &[SegmentSite<'b>],
    ) -> Vec<(SegmentSite<'b>, OpId, OpParameters)> {
        let ops = sites
            .iter()
            .copied()
            .flat_map(|site| site.plan.segment.op_ids().map(move |op| (site, op)));
        ops.filter_map(|(site, op)| Some((site, op, self.parameters(site, op)?))).collect()
    }

    fn push_parameter(&mut self, site: SegmentSite, op: OpId, templates: Vec<InstrTemplate>) {
        let square_sum = self.buffer_of(BufferKey::Shared(OperandSlot::SquareSum));
        let origin = site.origin(&site.plan.segment.op(op).name);
        for template in templates {
            self.push(template, &origin, |lowering, operand| match operand.slot {
                OperandSlot::SquareSum => square_sum,
                OperandSlot::RoundedGradient(_) => lowering.rounded_gradient(site, op, operand),
                slot => lowering.buffer_of(BufferKey::Parameter(site.instance, op, slot)),
            });
        }
    }

    /// The bf16 copy of a gradient, created when the gradient is rounded.
    fn rounded_gradient(
        &mut self,
        site: SegmentSite,
        op: OpId,
        TemplateOperand { slot, extent }: TemplateOperand,
    ) -> BufferId {
        let key = BufferKey::Parameter(site.instance, op, slot);
        if let Some(buffer) = self.buffers.get(&key) {
            return *buffer;
        }
        let shard = self.parameters(site, op).map(|own| self.parameter_shard(site, &own));
        let name = format!("{} {} rounded gradient", site.name, site.plan.segment.op(op).name);
        self.add_bound_buffer(key, &name, extent, BufferRole::RoundedGradient, shard)
    }

    /// All-reduces the gradient of a tied weight that the first and the last stage both have.
    fn reduce_tied_gradients(&mut self, sites: &[SegmentSite]) {
        if !self.plan.tied || self.plan.context.mesh.pipeline == 1 {
            return;
        }
        for site in sites {
            let segment = &site.plan.segment;
            let Some(op) = segment.vocabulary_op() else { continue };
            let gradient = self.buffer_of(BufferKey::Parameter(
                site.instance,
                op,
                OperandSlot::WeightGradient(0),
            ));
            let extent = self.program.buffer(gradient).extent;
            let template = reduce_tied_gradient(extent, &self.plan.context);
            self.push(template, &site.origin(&segment.op(op).name), |_, _| gradient);
        }
    }
}

/// Whether a segment's reductions may run during the last pass of the segments before it. After that of a stage's first
/// block at most the embedding's is left, too short to hide a reduction.
fn is_reduced_early(site: &SegmentSite, sites: &[SegmentSite]) -> bool {
    let is_block = |site: &&SegmentSite| site.plan.segment.kind == SegmentKind::Block;
    let first = sites.iter().find(is_block).map(|first| first.instance);
    first != Some(site.instance)
}
