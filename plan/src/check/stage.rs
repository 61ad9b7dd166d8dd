//! The state of the check on one stage: the contents of every buffer, and reads and writes of them.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::context::Context;
use crate::program::{Access, Action, BufferId, BufferRole, FusedOp, Instr, Phase, StageProgram};

use super::error::{CheckError, CheckErrors, CheckFault, CheckResult, ensure, fault, phase_name};
use super::lattice::{
    AbstractState, AbstractValue, OperandWrite, ShardedExtent, SymbolId, WriteTarget,
};
use super::memory::ByteOwners;
use super::shards;
use super::values::{ForwardOpKind, SymbolTable};

/// Contents of one buffer, or why it has none that can be read.
#[derive(Clone, Copy, Debug)]
pub(super) enum BufferContents {
    /// Not written in this microbatch.
    Unwritten,
    /// Overwritten by this instruction, which wrote another buffer to the same bytes.
    Overwritten(Phase, usize, BufferId),
    /// Other microbatches ran in between, and all share one copy.
    Expired,
    /// Unknown, because the instruction that wrote it was reported.
    Unknown,
    /// A tensor in this state.
    Holds(AbstractState),
}

/// One stage while its passes are walked.
pub(super) struct StageChecker<'a> {
    pub context: &'a Context,
    pub stage: &'a StageProgram,
    pub index: usize,
    pub tied: bool,
    pub values: SymbolTable,
    pub contents: Vec<BufferContents>,
    /// The parameter in each weight's buffer.
    pub weights: HashMap<SymbolId, BufferId>,
    /// The sections of every value.
    pub known_sections: HashMap<SymbolId, Vec<u64>>,
    /// Tensors that the previous stage of the pass sent.
    pub incoming: VecDeque<AbstractState>,
    /// Tensors sent to the next stage of the pass.
    pub outgoing: VecDeque<AbstractState>,
    /// Values received and sent in the forward pass, in order.
    pub received: Vec<SymbolId>,
    pub sent: Vec<SymbolId>,
    pub phase: Phase,
    owners: ByteOwners,
    /// Results of collectives and fills that nothing has read yet.
    unread: Vec<bool>,
    pub errors: CheckErrors,
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
            values: SymbolTable::default(),
            contents: vec![BufferContents::Unwritten; stage.buffers.len()],
            weights: HashMap::new(),
            known_sections: HashMap::new(),
            incoming: VecDeque::new(),
            outgoing: VecDeque::new(),
            received: vec![],
            sent: vec![],
            phase: Phase::Forward,
            owners: ByteOwners::default(),
            unread: vec![false; stage.buffers.len()],
            errors: CheckErrors::default(),
        };
        for index in 0..stage.buffers.len() {
            check.contents[index] = check.resident(BufferId(index as u32));
        }
        check
    }

    /// Contents of a buffer at the start of a microbatch.
    fn resident(&mut self, id: BufferId) -> BufferContents {
        let buffer = self.stage.buffer(id);
        let dtype = buffer.extent.dtype;
        match (buffer.role, &buffer.shard) {
            (BufferRole::Weight, Some(shard)) => {
                let (rows, columns) = shards::sides(shard, self.context.tensor_size());
                let value = self.values.add_input(&buffer.name);
                self.weights.insert(value, id);
                BufferContents::Holds(AbstractState::new(
                    AbstractValue::Value(value),
                    rows,
                    columns,
                    dtype,
                ))
            }
            // Sums of earlier microbatches have the same layout as this one's contribution.
            (BufferRole::WeightGradient, Some(shard)) => {
                let (rows, columns) = shards::sides(shard, self.context.tensor_size());
                BufferContents::Holds(AbstractState::new(AbstractValue::Zero, rows, columns, dtype))
            }
            (BufferRole::Tokens | BufferRole::Targets, _) => {
                match self.tokens(buffer.extent.rows) {
                    Some(rows) => {
                        let value = self.values.add_input(&buffer.name);
                        let state = AbstractState::new(
                            AbstractValue::Value(value),
                            rows,
                            ShardedExtent::whole(1),
                            dtype,
                        );
                        BufferContents::Holds(state)
                    }
                    None => BufferContents::Unwritten,
                }
            }
            _ => BufferContents::Unwritten,
        }
    }

    /// The token side of a tensor with `rows` rows on a device; `None` for other row counts.
    pub fn tokens(&self, rows: u64) -> Option<ShardedExtent> {
        let (tokens, devices) = (self.context.tokens(), self.context.tensor_size());
        if rows == tokens {
            return Some(ShardedExtent::whole(tokens));
        }
        let cut = self.context.token_dim()?;
        (rows * devices == tokens).then_some(ShardedExtent { size: tokens, cut: Some(cut) })
    }

    /// Marks the single copies of activations as overwritten by other microbatches.
    pub(super) fn expire(&mut self) {
        for (buffer, content) in self.stage.buffers.iter().zip(&mut self.contents) {
            let shared = buffer.role == BufferRole::Activation && !buffer.per_microbatch;
            if shared && matches!(content, BufferContents::Holds(_)) {
                *content = BufferContents::Expired;
            }
        }
    }

    pub fn report(&mut self, at: usize, instr: &Instr, fault: CheckFault) {
        self.errors.push(CheckError {
            stage: Some(self.index),
            instruction: Some((self.phase, at, instr.origin.clone())),
            problem: format!("{} {}", instr.action.name(), fault.problem),
            hint: fault.hint,
        });
    }

    /// State of an operand as the instruction accesses it; `None` after a reported fault.
    pub(super) fn read(
        &mut self,
        instr: &Instr,
        port: usize,
        access: &Access,
    ) -> CheckResult<Option<AbstractState>> {
        let buffer = self.stage.buffer(access.buffer);
        let state = match self.contents[access.buffer.0 as usize] {
            BufferContents::Holds(state) => state,
            BufferContents::Unknown => return Ok(None),
            BufferContents::Unwritten => {
                return fault(format!("reads `{}` before it is written", buffer.name));
            }
            BufferContents::Overwritten(phase, at, by) => {
                return fault(format!(
                    "reads `{}`, but {} instruction {at} overwrote it with `{}`: their bytes overlap",
                    buffer.name,
                    phase_name(phase),
                    self.stage.buffer(by).name
                ));
            }
            BufferContents::Expired => {
                return fault(format!(
                    "reads `{}` from the forward pass, but it has a single copy, which other microbatches in between overwrote",
                    buffer.name
                ));
            }
        };
        self.unread[access.buffer.0 as usize] = false;
        let moves = matches!(
            instr.action,
            Action::Collective(_) | Action::Fused(FusedOp::Pack { .. } | FusedOp::Unpack { .. })
        );
        ensure(moves || state.packed.is_none(), || {
            format!("reads `{}`, which is packed for a collective", buffer.name)
        })?;
        let state =
            if self.sees_table_transposed(instr, port) { state.transposed() } else { state };
        let (accessed, stored) = (access.extent, state.extent(self.context.tensor_size()));
        let part = matches!(
            instr.action,
            Action::Fused(FusedOp::Rope { .. } | FusedOp::RopeBackward { .. })
        );
        let fits = accessed == stored
            || (part
                && accessed.columns <= stored.columns
                && (accessed.rows, accessed.dtype) == (stored.rows, stored.dtype));
        ensure(fits, || {
            format!("accesses `{}` as {accessed}, but it holds {stored}", buffer.name)
        })?;
        Ok(Some(state))
    }

    /// Whether an operand is the head's weight (hidden × vocab), accessed as a tied embedding's table.
    pub fn sees_table_transposed(&self, instr: &Instr, port: usize) -> bool {
        let table = matches!(instr.action, Action::Fused(FusedOp::Gather | FusedOp::ScatterAdd));
        table && port == 1 && self.tied && self.context.mesh.pipeline == 1
    }

    pub(super) fn write_all(
        &mut self,
        at: usize,
        instr: &Instr,
        written: Vec<OperandWrite>,
    ) -> CheckResult {
        ensure(written.len() == instr.writes.len(), || {
            format!("has {} results, not {}", written.len(), instr.writes.len())
        })?;
        for (access, OperandWrite { state, target }) in instr.writes.iter().zip(written) {
            let name = &self.stage.buffer(access.buffer).name;
            let over =
                |port: usize| instr.reads.get(port).is_some_and(|r| r.buffer == access.buffer);
            let fresh = !instr.reads.iter().any(|read| read.buffer == access.buffer);
            let allowed = match target {
                WriteTarget::Fresh => fresh,
                WriteTarget::Over(port) => over(port),
                WriteTarget::Either(port) => fresh || over(port),
            };
            ensure(allowed, || match target {
                WriteTarget::Over(port) => {
                    format!("must write its result over operand {port}, not to `{name}`")
                }
                _ => format!("writes `{name}` while reading it"),
            })?;
            let state = state.consistent(self.context.tensor_size())?;
            let accessed = access.extent;
            let computed = state.extent(self.context.tensor_size());
            let part = matches!(
                instr.action,
                Action::Fused(FusedOp::Rope { .. } | FusedOp::RopeBackward { .. })
            );
            ensure(accessed == computed || part, || {
                format!("computes {computed}, but writes `{name}` as {accessed}")
            })?;
            self.check_role(access.buffer, &state, instr)?;
            if self.stage.buffer(access.buffer).role == BufferRole::Activation {
                self.keep_sections(access.buffer, &state)?;
            }
            let table = self.sees_table_transposed(instr, 1)
                && matches!(state.meaning, AbstractValue::Gradient { .. });
            let state = if table { state.transposed() } else { state };
            self.write(at, instr, access.buffer, state)?;
        }
        Ok(())
    }

    fn write(
        &mut self,
        at: usize,
        instr: &Instr,
        id: BufferId,
        state: AbstractState,
    ) -> CheckResult {
        let name = &self.stage.buffer(id).name;
        // An unread result means a duplicated collective, or zeros that no sum starts from.
        let must_be_read =
            matches!(instr.action, Action::Collective(_) | Action::Fused(FusedOp::Fill));
        ensure(!self.unread[id.0 as usize], || {
            format!("overwrites `{name}`, the result of a collective or fill that nothing has read")
        })?;
        self.unread[id.0 as usize] = must_be_read;
        let overwritten = self.store(at, id, BufferContents::Holds(state));
        let touched = |lost: &BufferId| {
            instr.reads.iter().chain(&instr.writes).any(|access| access.buffer == *lost)
        };
        match overwritten.into_iter().find(touched) {
            Some(lost) => {
                let lost = &self.stage.buffer(lost).name;
                fault(format!("writes `{name}` over its own operand `{lost}`: their bytes overlap"))
            }
            None => Ok(()),
        }
    }

    /// Stores the contents of a buffer and returns the buffers whose contents this destroys.
    pub(super) fn store(
        &mut self,
        at: usize,
        id: BufferId,
        content: BufferContents,
    ) -> Vec<BufferId> {
        self.contents[id.0 as usize] = content;
        let buffer = self.stage.buffer(id);
        if buffer.role != BufferRole::Activation {
            return vec![];
        }
        let overwritten = self.owners.claim(buffer, id);
        for buffer in &overwritten {
            let contents = &mut self.contents[buffer.0 as usize];
            if matches!(contents, BufferContents::Holds(_)) {
                *contents = BufferContents::Overwritten(self.phase, at, id);
            }
        }
        overwritten
    }

    /// Checks that a result may be written to a buffer of this role: weights and optimizer states do
    /// not change within a microbatch, and weight gradients go to buffers of their own.
    fn check_role(&self, id: BufferId, state: &AbstractState, instr: &Instr) -> CheckResult {
        let buffer = self.stage.buffer(id);
        let parameter = match state.meaning {
            AbstractValue::Gradient { of, .. } => self.weights.contains_key(&of),
            _ => false,
        };
        let loss = matches!(instr.action, Action::Fused(FusedOp::LossGradient));
        let fits = match buffer.role {
            BufferRole::Activation => !parameter,
            BufferRole::WeightGradient => parameter,
            BufferRole::Loss => loss,
            _ => false,
        };
        ensure(fits, || {
            format!("writes {} to `{}`", self.values.describe(state.meaning), buffer.name)
        })
    }

    /// State of a weight's buffer.
    pub fn weight_state(&self, id: BufferId) -> Option<AbstractState> {
        match self.contents[id.0 as usize] {
            BufferContents::Holds(state) => Some(state),
            _ => None,
        }
    }

    /// The weight that an operation of this kind reads at its second port.
    pub fn weight_used_by(&self, matches: impl Fn(ForwardOpKind) -> bool) -> Option<SymbolId> {
        let mut weights: Vec<SymbolId> = self.weights.keys().copied().collect();
        weights.sort();
        weights.into_iter().find(|weight| {
            let uses = self.values.uses(*weight).iter();
            uses.into_iter().any(|(node, port)| *port == 1 && matches(self.values.kind(*node)))
        })
    }

    /// The weight of the head: its GEMM computes the logits of the loss.
    pub fn weight_of_logits(&self) -> Option<SymbolId> {
        let mut weights: Vec<SymbolId> = self.weights.keys().copied().collect();
        weights.sort();
        weights.into_iter().find(|weight| {
            self.values.uses(*weight).iter().any(|(node, port)| {
                let logits = self.values.outputs(*node).first();
                let users = logits.map_or(&[][..], |logits| self.values.uses(*logits));
                *port == 1
                    && users.iter().any(|(user, _)| self.values.kind(*user) == ForwardOpKind::Loss)
            })
        })
    }

    /// Checks that every weight has its complete gradient after the backward pass.
    pub fn check_gradients(&mut self) {
        let mut complete = HashSet::new();
        let buffers = self.stage.buffers.iter().zip(&self.contents);
        for (_, content) in buffers.filter(|(buffer, _)| buffer.role == BufferRole::WeightGradient)
        {
            match content {
                BufferContents::Holds(state) => {
                    complete.extend(self.values.completed(state.meaning))
                }
                // Already reported: the buffer may be any weight's gradient.
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
            self.errors.of_stage(self.index, CheckFault { problem, hint: None });
        }
    }
}
