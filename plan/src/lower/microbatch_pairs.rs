//! Passes of two microbatches: the instructions of a pass, once for each, so that collectives of one overlap with the computation
//! of the other.
//!
//! A pass alternates between runs of computation and of collectives: S₁ C₁ S₂ C₂ … The second microbatch is one run behind the
//! first, so that a pass of both is S₁a, C₁a beside S₁b, C₁b beside S₂a, C₂a beside S₂b, … Both share weights and their
//! gradients. To the gradient of each op, the first microbatch adds before the second, as in passes of one.
//! A transfer between stages has the tensors of both, follows everything before it, and overlaps with nothing. Of two
//! transfers, the second would wait for the other stage to receive the first, which may wait for this one to end its pass.

use std::collections::HashMap;

use crate::program::{Access, Action, BufferId, Instr, Phase};

use super::stage_lowering::StageLowering;

impl StageLowering<'_> {
    /// Turns the passes of all chunks into passes of two microbatches.
    pub(super) fn pair_microbatches(&mut self) {
        let mut second = HashMap::new();
        for chunk in 0..self.program.chunks.len() {
            for phase in Phase::PASSES {
                let first = self.program.chunks[chunk].instructions(phase).to_vec();
                let of_second = |instr| self.of_second(instr, &mut second);
                let paired = alternate(&first, &first.iter().map(of_second).collect::<Vec<_>>());
                if let Some(list) = self.program.chunks[chunk].instructions_mut(phase) {
                    *list = paired;
                }
            }
        }
    }

    /// The instruction for the second microbatch, which has inputs and activations of its own.
    fn of_second(&mut self, instr: &Instr, second: &mut HashMap<BufferId, BufferId>) -> Instr {
        let mut renamed = |side: &[Access]| -> Vec<Access> {
            let access = |access: &Access| Access {
                buffer: self.buffer_of_second(access.buffer, second),
                extent: access.extent,
            };
            side.iter().map(access).collect()
        };
        let (reads, writes) = (renamed(&instr.reads), renamed(&instr.writes));
        Instr { reads, writes, ..instr.clone() }
    }

    fn buffer_of_second(
        &mut self,
        id: BufferId,
        second: &mut HashMap<BufferId, BufferId>,
    ) -> BufferId {
        let buffer = self.program.buffer(id);
        if buffer.role.is_resident() && !buffer.role.is_input() {
            return id;
        }
        *second.entry(id).or_insert_with(|| {
            let mut buffer = self.program.buffer(id).clone();
            buffer.name += " of the second microbatch";
            self.program.buffers.push(buffer);
            BufferId(self.program.buffers.len() as u32 - 1)
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum RunKind {
    Computation,
    Collectives,
    Transfers,
}

impl RunKind {
    fn of(instr: &Instr) -> RunKind {
        match instr.action {
            Action::Collective(_) => RunKind::Collectives,
            Action::Send(_) | Action::Receive(_) => RunKind::Transfers,
            Action::Gemm(_) | Action::Attention(_) | Action::Fused(_) => RunKind::Computation,
        }
    }
}

/// The instructions of two microbatches, of which the second is one run behind.
fn alternate(first: &[Instr], second: &[Instr]) -> Vec<Instr> {
    let mut merged = Vec::with_capacity(first.len() + second.len());
    let same_kind = |a: &Instr, b: &Instr| RunKind::of(a) == RunKind::of(b);
    let runs = first.chunk_by(same_kind).zip(second.chunk_by(same_kind));
    // The last computation or collectives of the second microbatch, which overlap with what follows or precedes them.
    let (mut computation, mut collectives): (&[Instr], &[Instr]) = (&[], &[]);
    for (a, b) in runs {
        match RunKind::of(&a[0]) {
            RunKind::Computation => {
                push_overlapped(&mut merged, std::mem::take(&mut collectives), a);
                computation = b;
            }
            RunKind::Collectives => {
                push_overlapped(&mut merged, a, std::mem::take(&mut computation));
                collectives = b;
            }
            RunKind::Transfers => {
                merged.extend_from_slice(std::mem::take(&mut computation));
                merged.extend_from_slice(std::mem::take(&mut collectives));
                merged.extend(a.iter().zip(b).map(|(a, b)| together(a, b)));
            }
        }
    }
    merged.extend_from_slice(computation);
    merged.extend_from_slice(collectives);
    merged
}

/// One transfer of the tensors of both microbatches.
fn together(first: &Instr, second: &Instr) -> Instr {
    let mut both = first.clone();
    both.reads.extend(&second.reads);
    both.writes.extend(&second.writes);
    if let (
        Action::Send(transfer) | Action::Receive(transfer),
        Action::Send(other) | Action::Receive(other),
    ) = (&mut both.action, &second.action)
    {
        transfer.tensors.extend(&other.tensors);
    }
    both
}

/// Collectives that overlap with computation, one after the other.
fn push_overlapped(merged: &mut Vec<Instr>, collectives: &[Instr], computation: &[Instr]) {
    let all = collectives.len() + computation.len();
    for (index, collective) in collectives.iter().enumerate() {
        let overlapped_instrs = if computation.is_empty() { 0 } else { all - index - 1 };
        merged.push(Instr { overlapped_instrs, ..collective.clone() });
    }
    merged.extend_from_slice(computation);
}
