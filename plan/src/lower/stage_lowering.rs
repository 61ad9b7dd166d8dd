//! The state of lowering one stage: its buffers, and the instructions so far.

use rustc_hash::FxHashMap;

use crate::decisions::{ResolvedPlan, SegmentPlan};
use crate::emit::{InstrTemplate, OperandSlot, TemplateOperand};
use crate::graph::{OpId, Value, ValueId};
use crate::program::{
    Access, Action, Buffer, BufferId, BufferRole, CollectiveOp, Extent, Instr, InstrOrigin,
    ModelChunk, ParameterShard, Phase, StageProgram, StageSchedule, place_buffers,
};
use crate::{Bytes, Context};

/// Index of a segment within its stage: the embedding, a block, or the head.
pub(super) type SegmentInstance = u32;

/// The tensor that a buffer holds while a stage is lowered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum BufferKey {
    /// A copy of a value.
    ValueCopy(SegmentInstance, ValueId, usize),
    /// The summed gradient contributions of one layout.
    Gradient(SegmentInstance, ValueId, usize),
    /// An op's resident buffer (weight, gradient, optimizer state).
    Parameter(SegmentInstance, OpId, OperandSlot),
    /// The whole weight of an op whose parts the replicas store, in the current pass.
    GatheredWeight(SegmentInstance, OpId),
    /// The whole gradient of an op's weight for one microbatch, of which the replicas accumulate their parts.
    MicrobatchGradient(SegmentInstance, OpId),
    /// The bf16 copy of that gradient, for its reduction over the replicas.
    RoundedMicrobatchGradient(SegmentInstance, OpId),
    /// The statistic that an op saves for its backward pass.
    Statistic(SegmentInstance, OpId),
    /// The gradient of an online norm's statistic.
    StatisticGradient(SegmentInstance, OpId),
    /// Token ids, targets, loss, square sum.
    Shared(OperandSlot),
}

/// The state of lowering one stage.
pub(super) struct StageLowering<'a> {
    pub(super) plan: &'a ResolvedPlan,
    pub(super) stage: usize,
    pub(super) phase: Phase,
    /// Index of the chunk being lowered.
    pub(super) chunk: usize,
    pub(super) program: StageProgram,
    pub(super) buffers: FxHashMap<BufferKey, BufferId>,
    pub(super) name_counts: FxHashMap<String, u32>,
    /// Weight-gradient GEMMs that overlap with the collective of a value's gradient, held until this collective is emitted.
    pub(super) overlapped_gemms: FxHashMap<(SegmentInstance, ValueId), Instr>,
    /// Number of instructions of the forward pass before a segment's first, by segment.
    pub(super) forward_begins: FxHashMap<SegmentInstance, usize>,
    /// Numbers of instructions of the backward and of the weight-gradient pass up to a segment's last, by segment.
    pub(super) gradient_ends: FxHashMap<SegmentInstance, [usize; 2]>,
}

/// One segment of the stage being lowered.
#[derive(Clone, Copy)]
pub(super) struct SegmentSite<'a> {
    pub(super) instance: SegmentInstance,
    /// Index of the chunk in its stage.
    pub(super) chunk: usize,
    /// The block, for a block's segment.
    pub(super) block: Option<u64>,
    /// `embedding`, `layer 3` or `head`: the first part of buffer names.
    pub(super) name: &'a str,
    pub(super) plan: &'a SegmentPlan,
}

impl<'a> StageLowering<'a> {
    pub(super) fn new(plan: &'a ResolvedPlan, stage: usize) -> Self {
        let program = StageProgram {
            buffers: vec![],
            chunks: vec![ModelChunk::empty(); plan.context.chunks as usize],
            step: vec![],
            gradient_buckets: vec![],
            gather_buckets: vec![],
            exact_step: Default::default(),
            schedule: vec![],
            arena: crate::Bytes(0),
        };
        StageLowering {
            plan,
            stage,
            phase: Phase::Forward,
            chunk: 0,
            program,
            buffers: FxHashMap::default(),
            name_counts: FxHashMap::default(),
            overlapped_gemms: FxHashMap::default(),
            forward_begins: FxHashMap::default(),
            gradient_ends: FxHashMap::default(),
        }
    }

    pub(super) fn finish(mut self) -> StageProgram {
        debug_assert!(self.overlapped_gemms.is_empty());
        let schedule = StageSchedule::of(&self.plan.context, self.stage as u64);
        let has_weight_gradient_passes =
            self.program.chunks.iter().any(|chunk| !chunk.weight_gradient.is_empty());
        self.program.schedule = schedule.passes(has_weight_gradient_passes);
        place_buffers(&mut self.program);
        self.program
    }

    pub(super) fn add_buffer(&mut self, name: &str, extent: Extent, role: BufferRole) -> BufferId {
        let name = match self.name_counts.get_mut(name) {
            Some(count) => {
                *count += 1;
                format!("{name}#{count}")
            }
            None => {
                self.name_counts.insert(name.to_string(), 1);
                name.to_string()
            }
        };
        self.program.buffers.push(Buffer {
            name,
            extent,
            role,
            offset: 0,
            copies: 1,
            shard: None,
            sections: vec![],
        });
        BufferId(self.program.buffers.len() as u32 - 1)
    }

    /// A buffer for a value or its gradient.
    pub(super) fn add_value_buffer(
        &mut self,
        name: &str,
        extent: Extent,
        value: &Value,
    ) -> BufferId {
        let id = self.add_buffer(name, extent, BufferRole::Activation);
        if value.sections.len() > 1 {
            self.program.buffers[id.0 as usize].sections = value.sections.clone();
        }
        id
    }

    /// A new buffer of this role that the key is bound to.
    pub(super) fn add_bound_buffer(
        &mut self,
        key: BufferKey,
        name: &str,
        extent: Extent,
        role: BufferRole,
        shard: Option<ParameterShard>,
    ) -> BufferId {
        let id = self.add_buffer(name, extent, role);
        self.program.buffers[id.0 as usize].shard = shard;
        self.buffers.insert(key, id);
        id
    }

    pub(super) fn buffer_of(&self, key: BufferKey) -> BufferId {
        *self
            .buffers
            .get(&key)
            .unwrap_or_else(|| unreachable!("a resolved plan provides {key:?} in {:?}", self.phase))
    }

    /// Emits a template's instruction with its slots bound.
    pub(super) fn push(
        &mut self,
        template: InstrTemplate,
        origin: &InstrOrigin,
        mut bind: impl FnMut(&mut Self, TemplateOperand) -> BufferId,
    ) {
        let reads: Vec<Access> = template
            .reads
            .iter()
            .map(|operand| Access { buffer: bind(self, *operand), extent: operand.extent })
            .collect();
        let writes: Vec<Access> = template
            .writes
            .iter()
            .map(|operand| Access { buffer: bind(self, *operand), extent: operand.extent })
            .collect();
        let (action, origin) = (template.action, origin.clone());
        self.instructions().push(Instr { action, reads, writes, origin, overlapped_instrs: 0 });
    }

    /// Emits one collective for operands that are read and written, if there are any. Its payload is the larger of both
    /// sides.
    pub(super) fn push_collective(
        &mut self,
        origin: InstrOrigin,
        operands: Vec<(Access, Access)>,
        collective: impl FnOnce(Bytes, &Context) -> CollectiveOp,
    ) {
        if operands.is_empty() {
            return;
        }
        let (reads, writes): (Vec<Access>, Vec<Access>) = operands.into_iter().unzip();
        let bytes = |side: &[Access]| side.iter().map(|access| access.extent.bytes()).sum();
        let payload = Bytes::max(bytes(&reads), bytes(&writes));
        let action = Action::Collective(collective(payload, &self.plan.context));
        self.instructions().push(Instr { action, reads, writes, origin, overlapped_instrs: 0 });
    }

    /// The instructions of the current phase of the current chunk.
    pub(super) fn instructions(&mut self) -> &mut Vec<Instr> {
        let StageProgram { chunks, step, .. } = &mut self.program;
        chunks[self.chunk].instructions_mut(self.phase).unwrap_or(step)
    }

    /// The current chunk.
    pub(super) fn current_chunk(&mut self) -> &mut ModelChunk {
        &mut self.program.chunks[self.chunk]
    }

    /// Emits reshards with slot `Before` bound to `from`, `After` to `to` and `NormStatistic` to `statistic`.
    pub(super) fn push_reshard(
        &mut self,
        templates: Vec<InstrTemplate>,
        origin: &InstrOrigin,
        (from, to): (BufferId, BufferId),
        statistic: Option<BufferId>,
    ) {
        let mut temporaries: FxHashMap<u8, BufferId> = FxHashMap::default();
        for template in templates {
            self.push(template, origin, |lowering, operand| match operand.slot {
                OperandSlot::Before => from,
                OperandSlot::After => to,
                OperandSlot::NormStatistic => statistic.unwrap_or(from),
                OperandSlot::Temporary(n) => *temporaries.entry(n).or_insert_with(|| {
                    let name = format!("{origin} packed");
                    let sections = lowering.program.buffer(from).sections.clone();
                    let id = lowering.add_buffer(&name, operand.extent, BufferRole::Activation);
                    lowering.program.buffers[id.0 as usize].sections = sections;
                    id
                }),
                _ => from,
            });
        }
    }
}

impl SegmentSite<'_> {
    /// The origin of the instructions of an op or value of the segment.
    pub(super) fn origin(&self, op: &str) -> InstrOrigin {
        match self.block {
            Some(block) => InstrOrigin { block: Some(block), op: op.into() },
            None => InstrOrigin { block: None, op: format!("{} {op}", self.name) },
        }
    }
}
