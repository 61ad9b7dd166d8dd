//! State of the check of one stage: contents of every buffer, and the checks of reads and writes.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::DType;
use crate::context::Context;
use crate::program::{
    Access, Action, Buffer, BufferId, BufferRole, ChunkPhase, FusedOp, GemmRole, Instr, Phase,
    StageProgram,
};

use super::error::{CheckErrors, CheckFault, CheckResult, ensure, fault, fault_hint};
use super::lattice::{
    AbstractState, AbstractValue, ContextPart, ForwardValueId, OperandWrite, ShardedExtent,
    WriteTarget,
};
use super::memory::ByteOwners;
use super::shards;
use super::values::{ForwardGraph, ForwardOpKind};

/// Contents of a buffer, or the reason why it is not readable.
#[derive(Clone, Copy, Debug)]
pub(super) enum BufferContents {
    /// Not written in this microbatch.
    Unwritten,
    /// Overwritten by the instruction at this phase and index, which wrote this buffer to the same bytes.
    Overwritten(ChunkPhase, usize, BufferId),
    /// Overwritten by other microbatches, which share the single copy.
    Expired,
    /// Unknown after a reported error.
    Unknown,
    /// A tensor in this state.
    Tensor(AbstractState),
    /// A tensor of which each replica has one part, in this state once gathered.
    ReplicaPart(AbstractState),
}

/// Values at the ends of a chunk, in the order of their transfers.
#[derive(Clone, Debug, Default)]
pub(super) struct ChunkBoundary {
    pub received: Vec<ForwardValueId>,
    pub sent: Vec<ForwardValueId>,
}

/// A tensor on its way to another stage.
#[derive(Clone, Copy, Debug)]
pub(super) struct SentTensor {
    /// The state, with a value of the sending stage.
    pub state: AbstractState,
    /// The microbatch that an activation belongs to, counted from the first of its pass.
    pub microbatch: Option<u64>,
}

/// Checker of one stage.
pub(super) struct StageChecker<'a> {
    pub context: &'a Context,
    pub stage: &'a StageProgram,
    pub index: usize,
    pub tied: bool,
    pub graph: ForwardGraph,
    pub contents: Vec<BufferContents>,
    /// The buffer of each weight.
    pub weights: HashMap<ForwardValueId, BufferId>,
    /// Gradients of the microbatch that were zeroed, their padding too.
    pub zeroed_gradients: HashSet<BufferId>,
    /// Gradients that a pass wrote without adding to their contents.
    pub overwritten_gradients: HashSet<BufferId>,
    /// Sections of the values.
    pub known_sections: HashMap<ForwardValueId, Vec<u64>>,
    /// Tensors sent by the previous stage of the pass.
    pub incoming: VecDeque<SentTensor>,
    /// Tensors sent to the next stage of the pass.
    pub outgoing: VecDeque<SentTensor>,
    /// Values received and sent in the forward pass through each chunk.
    pub boundaries: Vec<ChunkBoundary>,
    /// The phase that is walked.
    pub at: ChunkPhase,
    owners: ByteOwners,
    /// Whether each buffer has an unread result of a collective or fill.
    unread: Vec<bool>,
    pub errors: CheckErrors,
}

impl BufferContents {
    /// Whether each replica has one part of a tensor.
    pub fn is_replica_part(&self) -> bool {
        matches!(self, BufferContents::ReplicaPart(_))
    }

    /// The state of a tensor, or of one whose parts are gathered.
    pub fn state(&self) -> Option<AbstractState> {
        match self {
            BufferContents::Tensor(state) | BufferContents::ReplicaPart(state) => Some(*state),
            _ => None,
        }
    }
}

impl<'a> StageChecker<'a> {
    pub fn new(
        context: &'a Context,
        stage: &'a StageProgram,
        index: usize,
        tied: bool,
    ) -> StageChecker<'a> {
        let mut check = StageChecker {
            context,
            stage,
            index,
            tied,
            graph: ForwardGraph::default(),
            contents: vec![BufferContents::Unwritten; stage.buffers.len()],
            weights: HashMap::new(),
            zeroed_gradients: HashSet::new(),
            overwritten_gradients: HashSet::new(),
            known_sections: HashMap::new(),
            incoming: VecDeque::new(),
            outgoing: VecDeque::new(),
            boundaries: vec![ChunkBoundary::default(); stage.chunks.len()],
            at: ChunkPhase { chunk: 0, phase: Phase::Forward },
            owners: ByteOwners::default(),
            unread: vec![false; stage.buffers.len()],
            errors: CheckErrors::default(),
        };
        for index in 0..stage.buffers.len() {
            check.contents[index] = check.initial_contents(BufferId(index as u32));
        }
        check
    }

    /// Contents of a buffer at the start of a microbatch.
    fn initial_contents(&mut self, id: BufferId) -> BufferContents {
        let buffer = self.stage.buffer(id);
        let dtype = buffer.extent.dtype;
        match (buffer.role, &buffer.shard) {
            (BufferRole::Weight, Some(shard)) => {
                let (rows, columns) = shards::sharded_extents(shard, self.context.tensor_size());
                let value = self.graph.add_input(&buffer.name, None);
                self.weights.insert(value, id);
                let state = AbstractState::new(AbstractValue::Value(value), rows, columns, dtype);
                self.parameter_contents(buffer, state)
            }
            // Sums of earlier microbatches have the layout of the contribution of this one.
            (BufferRole::WeightGradient, Some(shard)) => {
                let (rows, columns) = shards::sharded_extents(shard, self.context.tensor_size());
                let state = AbstractState::new(AbstractValue::Zero, rows, columns, dtype);
                self.parameter_contents(buffer, state)
            }
            (BufferRole::Tokens | BufferRole::Targets, _) => {
                match self.tokens(buffer.extent.rows) {
                    Some(rows) => {
                        let mut inputs = self.stage.inputs();
                        let microbatch = inputs.find(|(other, _)| *other == id).map(|(_, at)| at);
                        let value = self.graph.add_input(&buffer.name, microbatch);
                        let state = AbstractState::new(
                            AbstractValue::Value(value),
                            rows,
                            ShardedExtent::whole(1),
                            dtype,
                        );
                        BufferContents::Tensor(state)
                    }
                    None => BufferContents::Unwritten,
                }
            }
            _ => BufferContents::Unwritten,
        }
    }

    /// The contents of a stored weight or gradient: whole, or one part per replica.
    fn parameter_contents(&self, buffer: &Buffer, state: AbstractState) -> BufferContents {
        match buffer.is_replica_part(self.context) {
            true => BufferContents::ReplicaPart(state),
            false => BufferContents::Tensor(state),
        }
    }

    /// The token side of a tensor with this many rows on a device; `None` for other row counts.
    pub fn tokens(&self, rows: u64) -> Option<ShardedExtent> {
        let (tokens, devices) = (self.context.tokens(), self.context.tensor_size());
        if rows == tokens {
            return Some(ShardedExtent::whole(tokens));
        }
        let dim = self.context.token_dim()?;
        (rows * devices == tokens).then_some(ShardedExtent { size: tokens, sharded: Some(dim) })
    }

    /// The values at the ends of the chunk that is walked.
    pub fn boundary(&mut self) -> &mut ChunkBoundary {
        &mut self.boundaries[self.at.chunk]
    }

    /// Marks the single copies of activations as overwritten by other passes.
    pub(super) fn expire(&mut self) {
        for (buffer, content) in self.stage.buffers.iter().zip(&mut self.contents) {
            let single_copy = !buffer.role.is_resident() && buffer.copies == 1;
            if single_copy && content.state().is_some() {
                *content = BufferContents::Expired;
            }
        }
    }

    pub fn report(&mut self, at: usize, instr: &Instr, fault: CheckFault) {
        let problem = format!("{} {}", instr.action.name(), fault.problem);
        let fault = CheckFault { problem, ..fault };
        self.errors.push_instruction((self.index, self.at, at), instr, fault);
    }

    /// State of an operand as the instruction accesses it; `None` after a reported error.
    pub(super) fn read(
        &mut self,
        instr: &Instr,
        port: usize,
        access: &Access,
    ) -> CheckResult<Option<AbstractState>> {
        let buffer = self.stage.buffer(access.buffer);
        let state = match self.contents[access.buffer.0 as usize] {
            BufferContents::Tensor(state) => state,
            BufferContents::Unknown => return Ok(None),
            BufferContents::Unwritten => {
                return fault(format!("reads `{}` before it is written", buffer.name));
            }
            BufferContents::Overwritten(phase, at, by) => {
                return fault(format!(
                    "reads `{}`, but {} instruction {at} overwrote it with `{}`: their bytes overlap",
                    buffer.name,
                    phase,
                    self.stage.buffer(by).name
                ));
            }
            BufferContents::Expired => {
                return fault(format!(
                    "reads `{}` from an earlier pass, but it has a single copy, which other microbatches in between overwrote",
                    buffer.name
                ));
            }
            BufferContents::ReplicaPart(_) => {
                return fault_hint(
                    format!("reads `{}`, of which each replica has only a part", buffer.name),
                    "gather the parts of a weight first",
                );
            }
        };
        self.unread[access.buffer.0 as usize] = false;
        let accepts_packed = matches!(
            instr.action,
            Action::Collective(_) | Action::Fused(FusedOp::Pack { .. } | FusedOp::Unpack { .. })
        );
        ensure(accepts_packed || state.packed.is_none(), || {
            format!("reads `{}`, which is packed for a collective", buffer.name)
        })?;
        let accepts_heads = accepts_packed || matches!(instr.action, Action::Attention(_));
        ensure(accepts_heads || state.over_context == ContextPart::Positions, || {
            format!("reads `{}` ({state}), but needs the positions of one device", buffer.name)
        })?;
        let state =
            if self.reads_transposed_table(instr, port) { state.transposed() } else { state };
        let (accessed, stored) = (access.extent, state.extent(self.context));
        let is_prefix = matches!(
            instr.action,
            Action::Fused(FusedOp::Rope { .. } | FusedOp::RopeBackward { .. })
        );
        let fits = accessed == stored
            || (is_prefix
                && accessed.columns <= stored.columns
                && (accessed.rows, accessed.dtype) == (stored.rows, stored.dtype));
        ensure(fits, || {
            format!("accesses `{}` as {accessed}, but it holds {stored}", buffer.name)
        })?;
        Ok(Some(state))
    }

    /// Whether an operand is the weight of a tied head (hidden × vocab), accessed as the embedding table.
    pub fn reads_transposed_table(&self, instr: &Instr, port: usize) -> bool {
        let table = matches!(instr.action, Action::Fused(FusedOp::Gather | FusedOp::ScatterAdd));
        table && port == 1 && self.tied && self.context.mesh.pipeline == 1
    }

    pub(super) fn write_all(
        &mut self,
        at: usize,
        instr: &Instr,
        writes: Vec<OperandWrite>,
    ) -> CheckResult {
        ensure(writes.len() == instr.writes.len(), || {
            format!("has {} results, not {}", writes.len(), instr.writes.len())
        })?;
        for (access, OperandWrite { state, target }) in instr.writes.iter().zip(writes) {
            let name = &self.stage.buffer(access.buffer).name;
            let in_place =
                |port: usize| instr.reads.get(port).is_some_and(|r| r.buffer == access.buffer);
            let fresh = !instr.reads.iter().any(|read| read.buffer == access.buffer);
            let allowed = match target {
                WriteTarget::Fresh | WriteTarget::Scratch => fresh,
                WriteTarget::InPlace(port) => in_place(port),
                WriteTarget::FreshOrInPlace(port) => fresh || in_place(port),
            };
            ensure(allowed, || match target {
                WriteTarget::InPlace(port) => {
                    format!("must write its result over operand {port}, not to `{name}`")
                }
                _ => format!("writes `{name}` while reading it"),
            })?;
            let state = state.consistent(self.context)?;
            let accessed = access.extent;
            let computed = state.extent(self.context);
            let is_prefix = matches!(
                instr.action,
                Action::Fused(FusedOp::Rope { .. } | FusedOp::RopeBackward { .. })
            );
            ensure(accessed == computed || is_prefix, || {
                format!("computes {computed}, but writes `{name}` as {accessed}")
            })?;
            self.check_role(access.buffer, &state, instr)?;
            if self.stage.buffer(access.buffer).role == BufferRole::Activation {
                self.record_sections(access.buffer, &state)?;
            }
            let table = self.reads_transposed_table(instr, 1)
                && matches!(state.value, AbstractValue::Gradient { .. });
            let state = if table { state.transposed() } else { state };
            let contents = match target {
                WriteTarget::Scratch => BufferContents::Unwritten,
                _ => BufferContents::Tensor(state),
            };
            self.write(at, instr, access.buffer, contents)?;
        }
        Ok(())
    }

    /// Marks an operand as read.
    pub(super) fn mark_read(&mut self, id: BufferId) {
        self.unread[id.0 as usize] = false;
    }

    /// Writes the result of an instruction to a buffer.
    pub(super) fn write(
        &mut self,
        at: usize,
        instr: &Instr,
        id: BufferId,
        contents: BufferContents,
    ) -> CheckResult {
        let name = &self.stage.buffer(id).name;
        // An overwritten unread result is a duplicated collective, or zeros to which nothing was added.
        let must_be_read =
            matches!(instr.action, Action::Collective(_) | Action::Fused(FusedOp::Fill));
        ensure(!self.unread[id.0 as usize], || {
            format!("overwrites `{name}`, the result of a collective or fill that nothing has read")
        })?;
        self.unread[id.0 as usize] = must_be_read;
        let overwritten = self.store(at, id, contents);
        let is_operand = |lost: &BufferId| {
            instr.reads.iter().chain(&instr.writes).any(|access| access.buffer == *lost)
        };
        match overwritten.into_iter().find(is_operand) {
            Some(lost) => {
                let lost = &self.stage.buffer(lost).name;
                fault(format!("writes `{name}` over its own operand `{lost}`: their bytes overlap"))
            }
            None => Ok(()),
        }
    }

    /// Stores the contents of a buffer and returns the buffers that this overwrites.
    pub(super) fn store(
        &mut self,
        at: usize,
        id: BufferId,
        content: BufferContents,
    ) -> Vec<BufferId> {
        self.contents[id.0 as usize] = content;
        let buffer = self.stage.buffer(id);
        if buffer.role.is_resident() {
            return vec![];
        }
        let overwritten = self.owners.claim(buffer, id);
        for buffer in &overwritten {
            let contents = &mut self.contents[buffer.0 as usize];
            if contents.state().is_some() {
                *contents = BufferContents::Overwritten(self.at, at, id);
            }
        }
        overwritten
    }

    /// Checks that a result may be written to a buffer of this role: weights and optimizer states do
    /// not change within a microbatch, and weight gradients go to buffers of their own.
    fn check_role(&self, id: BufferId, state: &AbstractState, instr: &Instr) -> CheckResult {
        let buffer = self.stage.buffer(id);
        let parameter = match state.value {
            AbstractValue::Gradient { of, .. } => self.weights.contains_key(&of),
            _ => false,
        };
        let loss = matches!(instr.action, Action::Fused(FusedOp::LossGradient));
        let fits = match buffer.role {
            BufferRole::Activation => !parameter,
            role if role.is_gradient() => {
                parameter && (state.dtype == DType::F32 || writes_once(&instr.action))
            }
            BufferRole::Loss => loss,
            _ => false,
        };
        ensure(fits, || {
            let (value, dtype) = (self.graph.describe(state.value), state.dtype.name());
            format!("writes {value} to `{}` in {dtype}", buffer.name)
        })
    }

    /// State of a weight's buffer, once gathered.
    pub fn weight_state(&self, id: BufferId) -> Option<AbstractState> {
        self.contents[id.0 as usize].state()
    }

    /// The weight that an operation of this kind reads at its second port.
    pub fn weight_used_by(
        &self,
        matches: impl Fn(ForwardOpKind) -> bool,
    ) -> Option<ForwardValueId> {
        let mut weights: Vec<ForwardValueId> = self.weights.keys().copied().collect();
        weights.sort();
        weights.into_iter().find(|weight| {
            let uses = self.graph.uses(*weight).iter();
            uses.into_iter().any(|(node, port)| *port == 1 && matches(self.graph.kind(*node)))
        })
    }

    /// The weight of the head, whose GEMM computes the logits of the loss.
    pub fn weight_of_logits(&self) -> Option<ForwardValueId> {
        let mut weights: Vec<ForwardValueId> = self.weights.keys().copied().collect();
        weights.sort();
        weights.into_iter().find(|weight| {
            self.graph.uses(*weight).iter().any(|(node, port)| {
                let logits = self.graph.outputs(*node).first();
                let users = logits.map_or(&[][..], |logits| self.graph.uses(*logits));
                *port == 1
                    && users.iter().any(|(user, _)| self.graph.kind(*user) == ForwardOpKind::Loss)
            })
        })
    }

    /// Checks that every microbatch of a pass goes through each chunk: its activations are sent to the next stage, or its loss
    /// is computed.
    pub fn check_microbatches(&mut self) {
        for chunk in 0..self.boundaries.len() {
            let virtual_stage = self.context.virtual_stage(self.index, chunk);
            let is_last = virtual_stage + 1 == self.context.virtual_stages();
            let sent =
                self.boundaries[chunk].sent.iter().map(|value| self.graph.microbatch(*value));
            let mut found = match is_last {
                true => self.graph.microbatches_of_losses(),
                false => sent.collect(),
            };
            found.sort();
            // Several tensors of a microbatch are sent, but there is one loss.
            let losses = found.len();
            found.dedup();
            let expected = (0..self.context.pass_microbatches()).map(Some);
            if !found.iter().copied().eq(expected) || is_last && losses != found.len() {
                let what = if is_last { "compute the loss" } else { "send the activations" };
                let problem =
                    format!("the forward pass does not {what} of each of its microbatches");
                self.errors.push_stage(self.index, CheckFault { problem, hint: None });
            }
        }
    }

    /// Checks that every weight has its complete gradient after the backward pass.
    pub fn check_gradients(&mut self) {
        let mut complete = HashSet::new();
        let buffers = self.stage.buffers.iter().zip(&self.contents);
        for (_, content) in buffers.filter(|(buffer, _)| buffer.role == BufferRole::WeightGradient)
        {
            match content {
                BufferContents::Tensor(state) | BufferContents::ReplicaPart(state) => {
                    complete.extend(self.graph.completed_values(state.value))
                }
                // After a reported error, the buffer may be the gradient of any weight.
                BufferContents::Unknown => return,
                _ => {}
            }
        }
        let missing = self.weights.iter().filter(|(value, _)| !complete.contains(*value));
        let mut missing: Vec<BufferId> = missing.map(|(_, weight)| *weight).collect();
        missing.sort();
        for weight in missing {
            let name = &self.stage.buffer(weight).name;
            let problem =
                format!("the backward pass does not compute the complete gradient of `{name}`");
            self.errors.push_stage(self.index, CheckFault { problem, hint: None });
        }
    }
}

/// Whether an instruction writes all contributions to the gradient of a weight at once, and so may round their sum.
fn writes_once(action: &Action) -> bool {
    matches!(action, Action::Gemm(gemm) if gemm.role == GemmRole::WeightGradient && !gemm.accumulate)
}
