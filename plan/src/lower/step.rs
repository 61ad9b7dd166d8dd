//! The step phase: reduces all gradients, computes their norm, updates all weights.

use std::collections::HashSet;
use std::ops::Range;

use crate::context::BucketSplit;
use crate::decisions::SegmentPlan;
use crate::emit::{
    CoalescedCollective, InstrTemplate, MultiTensorOp, OperandSlot, ParameterOperands,
    TemplateOperand, clear_square_sum, count_square, is_gathered_in_forward,
    is_gradient_overwritten, is_reduced_in_backward, reduce_over_tensor, reduce_square_sum,
    reduce_tied_gradient, round_gradient, split_bucket, update_parameter, widen_gradient,
};
use crate::graph::{OpId, SegmentKind};
use crate::program::{
    Access, Action, BufferId, BufferRole, GatherBucket, GradientBucket, Instr, InstrOrigin, Phase,
};
use crate::strategy::OpParameters;

use super::stage_lowering::{BufferKey, SegmentSite, StageLowering};

/// The parameters of a segment by when their gradients are reduced over the data axis.
struct ReducedParameters {
    /// Whether the buckets are parts of the segment's.
    is_split: bool,
    /// Those reduced in buckets during the last pass.
    buckets: Vec<Vec<(OpId, OpParameters)>>,
    /// Those reduced in the step phase, in one collective each.
    late: Vec<Vec<(OpId, OpParameters)>>,
}

impl StageLowering<'_> {
    pub(super) fn step(&mut self, sites: &[SegmentSite]) {
        self.phase = Phase::Step;
        let context = self.plan.context;
        self.gradient_buckets(sites);
        let square_sum = self.buffer_of(BufferKey::Shared(OperandSlot::SquareSum));
        self.push(clear_square_sum(), &"step".into(), |_, _| square_sum);
        // The last stage ends its passes long before the first, and reduces the gradients of its blocks before it waits for
        // the first stage's gradient of a tied weight.
        let is_tied = self.plan.tied && context.mesh.pipeline > 1;
        let is_first =
            |site: &&SegmentSite| !is_tied || site.plan.segment.kind == SegmentKind::Block;
        let (first, others): (Vec<_>, Vec<_>) = sites.iter().partition(is_first);
        self.reduce_in_step(&first, sites);
        if is_tied {
            self.reduce_tied_gradients(sites);
        }
        self.reduce_in_step(&others, sites);
        for template in reduce_square_sum(&context) {
            self.push(template, &"step gradient norm".into(), |_, _| square_sum);
        }
        for site in sites {
            let owned = self.owned_parameters(site);
            let updates = owned.iter().map(|(op, parameters)| {
                let node = &site.plan.segment.op(*op).op;
                let is_overwritten = is_gradient_overwritten(node, parameters, &context);
                (*op, update_parameter(parameters, is_overwritten, &context))
            });
            self.push_multi_tensor(site, updates.collect(), MultiTensorOp::AdamW);
            let [_, exposed] = self.gathered_in_forward_or_step(site, &owned);
            self.push_coalesced(site, &exposed, CoalescedCollective::AllGather);
        }
        self.gather_buckets(sites);
    }

    /// Reduces the gradients of some sites of the stage, besides those that are reduced during the last pass, and sums their
    /// squares.
    fn reduce_in_step(&mut self, some: &[&SegmentSite], sites: &[SegmentSite]) {
        let context = self.plan.context;
        for site in some {
            let owned = self.owned_parameters(site);
            for (op, parameters) in &owned {
                self.push_parameter(site, *op, reduce_over_tensor(parameters, &context));
            }
            let ReducedParameters { late, .. } = self.reduced_early_or_late(site, sites, &owned);
            for together in &late {
                self.reduce_over_replicas(site, together);
            }
            let (kind, tied) = (site.plan.segment.kind, self.plan.tied);
            let counted = owned.iter().filter_map(|(op, parameters)| {
                Some((*op, count_square(kind, parameters, tied, &context)?))
            });
            self.push_multi_tensor(site, counted.collect(), MultiTensorOp::SquareSum);
        }
    }

    /// The gathers that run during the first pass of the next step, one bucket for each segment, or several for the first block:
    /// weights are whole when the pass reads the first of them.
    fn gather_buckets(&mut self, sites: &[SegmentSite]) {
        let split = self.plan.context.first_gather_bucket;
        for site in sites {
            let owned = self.owned_parameters(site);
            let [in_forward, _] = self.gathered_in_forward_or_step(site, &owned);
            let is_split = split != BucketSplit::Whole && is_first_block(site, sites);
            let buckets = match is_split {
                true => {
                    let parts = split_bucket(split, &site.plan.segment, in_forward.into_iter());
                    [parts.first].into_iter().chain(parts.rest.into_iter().rev()).collect()
                }
                false => vec![in_forward],
            };
            for bucket in &buckets {
                let start = self.program.step.len();
                self.push_coalesced(site, bucket, CoalescedCollective::AllGather);
                let gathers = start..self.program.step.len();
                if !gathers.is_empty() {
                    // Positions in the pass of one microbatch are none in that of two.
                    let before = match is_split || self.plan.context.overlap_microbatch_pairs {
                        true => self.first_access(&gathers),
                        false => self.forward_begins[&site.instance],
                    };
                    self.program.gather_buckets.push(GatherBucket { before, gathers });
                }
            }
        }
    }

    /// Number of instructions of the first pass before the first that accesses the operands of these gathers of the step phase,
    /// and before those that it may overlap with.
    fn first_access(&self, gathers: &Range<usize>) -> usize {
        let first_pass = &self.program.chunks[0].forward;
        let accesses = accesses_any(&self.program.step[gathers.clone()]);
        let before = first_pass.iter().position(accesses).unwrap_or(first_pass.len());
        let overlapped = first_pass[..before].iter().enumerate();
        let mut beside = overlapped.filter(|(at, instr)| at + instr.overlapped_instrs >= before);
        beside.next().map_or(before, |(at, _)| at)
    }

    /// The parameters whose weights are gathered during the first pass of the next step, and the others.
    fn gathered_in_forward_or_step(
        &self,
        site: &SegmentSite,
        owned: &[(OpId, OpParameters)],
    ) -> [Vec<(OpId, OpParameters)>; 2] {
        let (kind, context) = (site.plan.segment.kind, &self.plan.context);
        let is_in_forward = |(_, parameters): &(OpId, OpParameters)| {
            is_gathered_in_forward(kind, parameters, self.plan.tied, context)
        };
        let (in_forward, in_step) = owned.iter().cloned().partition(is_in_forward);
        [in_forward, in_step]
    }

    /// The reductions that run during the last pass, one bucket for each segment, or several for the first block: when its
    /// part of the pass has ended, its gradients are complete.
    fn gradient_buckets(&mut self, sites: &[SegmentSite]) {
        for site in sites.iter().rev() {
            let owned = self.owned_parameters(site);
            let reduced = self.reduced_early_or_late(site, sites, &owned);
            for bucket in &reduced.buckets {
                let start = self.program.step.len();
                self.reduce_over_replicas(site, bucket);
                let reductions = start..self.program.step.len();
                if !reductions.is_empty() {
                    let after = match reduced.is_split || self.plan.context.overlap_microbatch_pairs
                    {
                        true => self.last_access(&reductions),
                        false => self.segment_end(site),
                    };
                    // Buckets run in order.
                    let previous = self.program.gradient_buckets.last();
                    let after = previous.map_or(after, |previous| previous.after.max(after));
                    self.program.gradient_buckets.push(GradientBucket { after, reductions });
                }
            }
        }
    }

    /// Number of instructions of the last pass up to a segment's last that computes gradients.
    fn segment_end(&self, site: &SegmentSite) -> usize {
        let [backward, weight_gradient] = self.gradient_ends[&site.instance];
        let is_deferred = self.program.chunks[0].last_phase() == Phase::WeightGradient;
        match site.chunk {
            0 if is_deferred => weight_gradient,
            0 => backward,
            // The last pass is one through the first chunk.
            _ => 0,
        }
    }

    /// Number of instructions of the last pass up to the last that accesses the operands of these reductions of the step
    /// phase, with the instructions that may overlap with it.
    fn last_access(&self, reductions: &Range<usize>) -> usize {
        let chunk = &self.program.chunks[0];
        let last_pass = chunk.instructions(chunk.last_phase());
        let accesses = accesses_any(&self.program.step[reductions.clone()]);
        let after = last_pass.iter().rposition(accesses).map_or(0, |last| last + 1);
        let ends =
            last_pass[..after].iter().enumerate().map(|(at, i)| at + 1 + i.overlapped_instrs);
        ends.max().unwrap_or(0).max(after)
    }

    /// Divides the parameters of a segment by when their gradients are reduced.
    fn reduced_early_or_late(
        &self,
        site: &SegmentSite,
        sites: &[SegmentSite],
        owned: &[(OpId, OpParameters)],
    ) -> ReducedParameters {
        let SegmentPlan { segment, .. } = site.plan;
        let context = &self.plan.context;
        let is_early = |(_, parameters): &(OpId, OpParameters)| {
            is_reduced_in_backward(segment.kind, parameters, self.plan.tied, context)
        };
        let (early, late): (Vec<_>, Vec<_>) = owned.iter().cloned().partition(is_early);
        if !is_first_block(site, sites) {
            return ReducedParameters { is_split: false, buckets: vec![early], late: vec![late] };
        }
        if context.last_gradient_bucket == BucketSplit::Whole
            || !context.can_split_gradient_bucket()
        {
            return ReducedParameters {
                is_split: false,
                buckets: vec![],
                late: vec![owned.to_vec()],
            };
        }
        let split = split_bucket(context.last_gradient_bucket, segment, early.into_iter());
        ReducedParameters { is_split: true, buckets: split.rest, late: vec![late, split.first] }
    }

    /// Reduces gradients of a segment over the data axis, with the casts around that.
    fn reduce_over_replicas(&mut self, site: &SegmentSite, owned: &[(OpId, OpParameters)]) {
        let context = self.plan.context;
        for (op, parameters) in owned {
            self.push_parameter(site, *op, round_gradient(parameters, &context));
        }
        for reduction in CoalescedCollective::REDUCTIONS {
            self.push_coalesced(site, owned, reduction);
        }
        for (op, parameters) in owned {
            self.push_parameter(site, *op, widen_gradient(parameters, &context));
        }
    }

    /// One collective for all parameters that need it.
    fn push_coalesced(
        &mut self,
        site: &SegmentSite,
        owned: &[(OpId, OpParameters)],
        collective: CoalescedCollective,
    ) {
        let context = self.plan.context;
        let needed = owned
            .iter()
            .filter_map(|(op, parameters)| Some((*op, collective.operand(parameters, &context)?)));
        let mut operands = vec![];
        for (op, operand) in needed.collect::<Vec<_>>() {
            let buffer = self.parameter_buffer(site, op, operand);
            operands.push((op, Access { buffer, extent: operand.extent }));
        }
        let shared = match collective {
            CoalescedCollective::AllGather => "weights",
            _ => "gradients",
        };
        let ops: Vec<OpId> = operands.iter().map(|(op, _)| *op).collect();
        let origin = shared_origin(site, &ops, shared);
        let in_place = operands.into_iter().map(|(_, access)| (access, access)).collect();
        self.push_collective(origin, in_place, |payload, context| collective.op(payload, context));
    }

    /// One fused op for all parameters that take part in it.
    fn push_multi_tensor(
        &mut self,
        site: &SegmentSite,
        parameters: Vec<(OpId, ParameterOperands)>,
        multi_tensor: MultiTensorOp,
    ) {
        if parameters.is_empty() {
            return;
        }
        let (mut reads, mut writes) = (vec![], vec![]);
        for (op, operands) in &parameters {
            let mut access = |operand: &TemplateOperand| {
                let buffer = self.parameter_buffer(site, *op, *operand);
                Access { buffer, extent: operand.extent }
            };
            reads.extend(operands.reads.iter().map(&mut access));
            writes.extend(operands.writes.iter().map(&mut access));
        }
        if let Some(TemplateOperand { slot, extent }) = multi_tensor.shared_operand() {
            let shared = Access { buffer: self.buffer_of(BufferKey::Shared(slot)), extent };
            reads.push(shared);
            writes.push(shared);
        }
        let shared = match multi_tensor {
            MultiTensorOp::SquareSum => "gradients",
            MultiTensorOp::AdamW => "weights",
        };
        let ops: Vec<OpId> = parameters.iter().map(|(op, _)| *op).collect();
        let origin = shared_origin(site, &ops, shared);
        let action = Action::Fused(multi_tensor.fused_op());
        self.instructions().push(Instr { action, reads, writes, origin, overlapped_instrs: 0 });
    }

    /// The parameters of a segment that this stage updates.
    fn owned_parameters(&self, site: &SegmentSite) -> Vec<(OpId, OpParameters)> {
        let ops = site.plan.segment.op_ids();
        ops.filter_map(|op| Some((op, self.parameters(*site, op)?))).collect()
    }

    fn push_parameter(&mut self, site: &SegmentSite, op: OpId, template: Option<InstrTemplate>) {
        let Some(template) = template else { return };
        let origin: InstrOrigin = site.origin(&site.plan.segment.op(op).name);
        self.push(template, &origin, |lowering, operand| {
            lowering.parameter_buffer(site, op, operand)
        });
    }

    /// The buffer of an operand that belongs to a parameter. The bf16 copy of a gradient is created when the gradient is
    /// rounded.
    fn parameter_buffer(
        &mut self,
        site: &SegmentSite,
        op: OpId,
        operand: TemplateOperand,
    ) -> BufferId {
        match operand.slot {
            OperandSlot::RoundedGradient(_) => self.rounded_gradient(*site, op, operand),
            slot => self.buffer_of(BufferKey::Parameter(site.instance, op, slot)),
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

/// The origin of an instruction that ops of a segment share: that of a single op, or else `shared`.
fn shared_origin(site: &SegmentSite, ops: &[OpId], shared: &str) -> InstrOrigin {
    match ops {
        [op] => site.origin(&site.plan.segment.op(*op).name),
        _ => site.origin(shared),
    }
}

/// Whether a segment is the first block of a stage. After its part of the last pass at most the embedding's is left, too
/// short to hide a reduction.
fn is_first_block(site: &SegmentSite, sites: &[SegmentSite]) -> bool {
    let is_block = |site: &&SegmentSite| site.plan.segment.kind == SegmentKind::Block;
    let first = sites.iter().find(is_block).map(|first| first.instance);
    first == Some(site.instance)
}

/// A test whether an instruction accesses an operand of any of these.
fn accesses_any(instructions: &[Instr]) -> impl Fn(&Instr) -> bool + use<> {
    let operands: HashSet<BufferId> =
        instructions.iter().flat_map(accesses).map(|access| access.buffer).collect();
    move |instr| accesses(instr).any(|access| operands.contains(&access.buffer))
}

fn accesses(instr: &Instr) -> impl Iterator<Item = &Access> {
    instr.reads.iter().chain(&instr.writes)
}
