//! Passes of two microbatches: the instructions of a pass, once for each, so that collectives of one overlap with the computation
//! of the other.
//!
//! A pass alternates between runs of computation and of collectives: S₁ C₁ S₂ C₂ … The second microbatch is one run behind the
//! first, so that a pass of both is S₁a, C₁a beside S₁b, C₁b beside S₂a, C₂a beside S₂b, … Both share weights and their
//! gradients. To the gradient of each op, the first microbatch adds before the second, as in passes of one.
//!
//! Computation between two collectives may be too short to hide either: a norm between the reduce-scatter and the all-gather of
//! sequence parallelism. Without a GEMM or attention it belongs to the collectives around it, so that a run C is C' s C'', and the
//! computation S of the other microbatch is divided: C' beside the first part of S, then s, then C'' beside the rest of S.
//!
//! A transfer between stages has the tensors of both, follows everything before it, and overlaps with nothing. Of two
//! transfers, the second would wait for the other stage to receive the first, which may wait for this one to end its pass.

use std::collections::HashMap;

use crate::kernel::Kernel;
use crate::program::{Access, Action, BufferId, Instr, Phase};

use super::stage_lowering::StageLowering;

/// FLOPs that take about as long as a byte of memory traffic on an A100 or H100. It decides where computation is divided, and no
/// price.
const FLOPS_PER_BYTE: f64 = 150.0;

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
    // The last computation or collectives of the second microbatch, which overlap with what follows or precedes them.
    let (mut computation, mut collectives): (&[Instr], &[Instr]) = (&[], &[]);
    let mut start = 0;
    for run in run_kinds(first).chunk_by(RunKind::eq) {
        let end = start + run.len();
        let (a, b) = (&first[start..end], &second[start..end]);
        start = end;
        match run[0] {
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

/// The kinds of the runs that instructions belong to: short computation between collectives belongs to these.
fn run_kinds(instructions: &[Instr]) -> Vec<RunKind> {
    let mut kinds: Vec<RunKind> = instructions.iter().map(RunKind::of).collect();
    let mut start = 0;
    for run in instructions.chunk_by(same_kind) {
        let end = start + run.len();
        let around = [start.checked_sub(1).map(|before| kinds[before]), kinds.get(end).copied()];
        if around == [Some(RunKind::Collectives); 2] && run.iter().all(is_fused) {
            kinds[start..end].fill(RunKind::Collectives);
        }
        start = end;
    }
    kinds
}

fn same_kind(a: &Instr, b: &Instr) -> bool {
    RunKind::of(a) == RunKind::of(b)
}

fn is_fused(instr: &Instr) -> bool {
    matches!(instr.action, Action::Fused(_))
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

/// A run of collectives that overlaps with computation of the other microbatch. Where short computation divides the run, each part
/// overlaps with a share of that computation, by its bytes.
fn push_overlapped(merged: &mut Vec<Instr>, run: &[Instr], mut computation: &[Instr]) {
    let mut payload_left = payload(run);
    for part in run.chunk_by(same_kind) {
        if RunKind::of(&part[0]) == RunKind::Computation {
            merged.extend_from_slice(part);
            continue;
        }
        let own = payload(part);
        let beside = match own < payload_left {
            true => division(computation, own / payload_left),
            false => computation.len(),
        };
        payload_left -= own;
        let beside = computation.split_off(..beside).unwrap_or_default();
        let all = part.len() + beside.len();
        for (index, collective) in part.iter().enumerate() {
            let overlapped_instrs = if beside.is_empty() { 0 } else { all - index - 1 };
            merged.push(Instr { overlapped_instrs, ..collective.clone() });
        }
        merged.extend_from_slice(beside);
    }
    merged.extend_from_slice(computation);
}

/// Bytes of all collectives of a run.
fn payload(run: &[Instr]) -> f64 {
    let of_instr = |instr: &Instr| match instr.kernel() {
        Kernel::Collective(collective) => collective.payload.as_f64(),
        _ => 0.0,
    };
    run.iter().map(of_instr).sum()
}

/// The number of first instructions whose work is nearest to this share of all.
fn division(computation: &[Instr], share: f64) -> usize {
    let work: Vec<f64> = computation.iter().map(work).collect();
    let target = share * work.iter().sum::<f64>();
    let mut before = 0.0;
    let is_behind = |work: &f64| {
        let middle = before + work / 2.0;
        before += work;
        middle > target
    };
    work.iter().position(is_behind).unwrap_or(work.len())
}

/// Bytes of memory traffic that take about as long as an instruction.
fn work(instr: &Instr) -> f64 {
    match instr.kernel() {
        Kernel::Gemm(gemm) => gemm.traffic().as_f64().max(gemm.flops().0 / FLOPS_PER_BYTE),
        Kernel::Attention(attention) => attention.flops().0 / FLOPS_PER_BYTE,
        Kernel::Fused(fused) => fused.traffic.as_f64(),
        Kernel::Collective(_) | Kernel::Transfer(_) => 0.0,
    }
}
