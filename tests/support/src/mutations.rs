//! Mutations of programs: each makes a correct program incorrect, as a careless edit or a wrong lowering
//! could.

mod exact_steps;
mod gradients;
mod overlap;

use narrows_plan::kernel::CollectiveKind;
use narrows_plan::model::{Activation, GatedProduct as Product};
use narrows_plan::program::{
    Access, Action, BufferId, BufferRole, ChunkPhase, CollectiveFunction, CollectiveOp, FusedOp,
    Instr, Program, Reduction, StageProgram,
};
use narrows_plan::{Axis, DType, Dim, GradReduceDtype, Layout, WeightSplit};

use crate::instruction_order::{commutes, depends, is_written_twice};
use crate::plans::TestRng;

/// Mutates a program and describes the mutation; returns `None` and leaves the program unchanged when the
/// random choices allow no mutation.
pub type Mutation = fn(&mut TestRng, &mut Program) -> Option<String>;

pub const MUTATIONS: [(&str, Mutation); 29] = [
    ("collective removed", remove_collective),
    ("collective duplicated", duplicate_collective),
    ("collective moved", move_collective),
    ("collective of the wrong kind", change_kind),
    ("collective with the wrong reduction", change_reduction),
    ("collective over the wrong group", change_group),
    ("ring of the wrong devices", change_ring),
    ("operand of the wrong dtype", change_operand_dtype),
    ("buffer of the wrong dtype", change_buffer_dtype),
    ("buffer overwritten early", overlap_live_buffer),
    ("buffer misplaced", misplace_buffer),
    ("write redirected", redirect_write),
    ("unmatched transfer", unmatch_transfer),
    ("wrong shard", change_shard),
    ("dependent instructions swapped", swap_dependent),
    ("wrong schedule", change_schedule),
    ("gradient reduced too early", overlap::change_bucket),
    ("weight gathered too late", overlap::change_gather_bucket),
    ("conflicting instructions overlapped", overlap::overlap_conflicting),
    ("microbatches of a pass mixed", overlap::mix_microbatches),
    ("wrong extent", change_extent),
    ("missing operand", drop_operand),
    ("wrong function", change_function),
    ("wrong sections", change_sections),
    ("gradient reduced in the wrong format", change_rounding),
    ("parameter left out of a collective", leave_out_parameter),
    ("gradient not accumulated", gradients::lose_accumulation),
    ("parameter not updated once", gradients::change_parameters),
    ("exact step of other pairs", exact_steps::change_exact_step),
];

/// Stage, phase of a chunk, and index of an instruction in its list.
type Location = (usize, ChunkPhase, usize);

fn instructions_mut(stage: &mut StageProgram, at: ChunkPhase) -> &mut Vec<Instr> {
    let StageProgram { chunks, step, .. } = stage;
    chunks[at.chunk].instructions_mut(at.phase).unwrap_or(step)
}

/// The location of a random instruction that satisfies a predicate: stage, phase of a chunk and index.
fn random_instruction(
    rng: &mut TestRng,
    program: &Program,
    fits: impl Fn(&Instr) -> bool,
) -> Option<Location> {
    let mut locations = vec![];
    for (index, stage) in program.stages.iter().enumerate() {
        for phase in stage.chunk_phases() {
            let fitting = stage.instructions(phase).iter().enumerate().filter(|(_, i)| fits(i));
            locations.extend(fitting.map(|(at, _)| (index, phase, at)));
        }
    }
    rng.pick(&locations).copied()
}

fn is_collective(instr: &Instr) -> bool {
    matches!(instr.action, Action::Collective(_))
}

fn describe((stage, phase, at): Location, program: &Program) -> String {
    let instr = &program.stages[stage].instructions(phase)[at];
    let names = |side: &[Access]| -> Vec<String> {
        side.iter().map(|a| program.stages[stage].buffer(a.buffer).name.clone()).collect()
    };
    let (writes, reads) = (names(&instr.writes), names(&instr.reads));
    let name = instr.action.name();
    format!("stage {stage}, {phase} {at} {}: {writes:?} = {name}{reads:?}", instr.origin)
}

fn remove_collective(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let location = random_instruction(rng, program, is_collective)?;
    let description = describe(location, program);
    instructions_mut(&mut program.stages[location.0], location.1).remove(location.2);
    Some(description)
}

fn duplicate_collective(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let location = random_instruction(rng, program, is_collective)?;
    let description = describe(location, program);
    let list = instructions_mut(&mut program.stages[location.0], location.1);
    list.insert(location.2, list[location.2].clone());
    Some(description)
}

fn move_collective(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let location = random_instruction(rng, program, is_collective)?;
    let down = rng.random_bool();
    move_past_dependent(program, location, down)
}

fn swap_dependent(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let location = random_instruction(rng, program, |instr| !is_collective(instr))?;
    let down = rng.random_bool();
    move_past_dependent(program, location, down)
}

/// Moves an instruction past the nearest one that depends on it or that it depends on.
fn move_past_dependent(program: &mut Program, location: Location, down: bool) -> Option<String> {
    let (index, phase, at) = location;
    let stage = &program.stages[index];
    let instr = &stage.instructions(phase)[at];
    let list = stage.instructions(phase);
    let is_dependent = |other: &&usize| depends(stage, instr, &list[**other]);
    let positions: Vec<usize> =
        if down { (at + 1..list.len()).collect() } else { (0..at).rev().collect() };
    let past = *positions.iter().find(is_dependent)?;
    if commutes(stage, instr, &list[past]) {
        return None;
    }
    let description =
        format!("{} past {}", describe(location, program), describe((index, phase, past), program));
    let list = instructions_mut(&mut program.stages[index], phase);
    let instr = list.remove(at);
    list.insert(past, instr);
    Some(description)
}

fn collective_at(program: &mut Program, (stage, phase, at): Location) -> Option<&mut CollectiveOp> {
    match &mut instructions_mut(&mut program.stages[stage], phase)[at].action {
        Action::Collective(collective) => Some(collective),
        _ => None,
    }
}

fn change_kind(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    use CollectiveFunction::{AllGather, AllReduce, AllToAll, ReduceScatter};
    let location = random_instruction(rng, program, is_collective)?;
    let description = describe(location, program);
    let functions = [AllGather, AllReduce(Reduction::Sum), AllToAll, ReduceScatter];
    let function = *rng.pick(&functions)?;
    let (keeps_layouts, dim) = (rng.random_bool(), *rng.pick(&[Dim::Feature, Dim::Sequence])?);
    let collective = collective_at(program, location)?;
    if collective.kind() == function.kind() {
        return None;
    }
    collective.function = function;
    if !keeps_layouts {
        // Layouts that are valid for the new kind, but are not those of the operands.
        let sharded = Layout::Sharded(dim);
        (collective.from, collective.to) = match function {
            AllReduce(_) => (Layout::Partial, Layout::Replicated),
            ReduceScatter => (Layout::Partial, sharded),
            AllGather => (sharded, Layout::Replicated),
            AllToAll => (sharded, Layout::Sharded(Dim::Position)),
        };
    }
    Some(format!("{description} as {function:?}"))
}

fn change_reduction(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let reduces = |instr: &Instr| matches!(&instr.action, Action::Collective(collective) if collective.kind() == CollectiveKind::AllReduce);
    let location = random_instruction(rng, program, reduces)?;
    let description = describe(location, program);
    let collective = collective_at(program, location)?;
    collective.function = CollectiveFunction::AllReduce(match collective.function.reduction() {
        Reduction::Sum => Reduction::Maximum,
        Reduction::Maximum => Reduction::Sum,
    });
    Some(description)
}

fn change_group(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let location = random_instruction(rng, program, is_collective)?;
    let description = describe(location, program);
    let mesh = program.context.mesh;
    let (variant, axis) = (rng.below(4), *rng.pick(&Axis::ALL)?);
    let collective = collective_at(program, location)?;
    match variant {
        0 => collective.group.size += 1,
        1 => collective.group.stride += 1,
        _ if axis == collective.axis => return None,
        2 => collective.axis = axis,
        _ => (collective.axis, collective.group) = (axis, mesh.group(axis)),
    }
    Some(description)
}

/// Gives attention a ring that its context lacks, takes it away, or changes its devices.
fn change_ring(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let is_attention = |instr: &Instr| matches!(instr.action, Action::Attention(_));
    let (stage, phase, at) = random_instruction(rng, program, is_attention)?;
    let description = describe((stage, phase, at), program);
    let (context, variant) = (program.context, rng.below(4));
    let instr = &mut instructions_mut(&mut program.stages[stage], phase)[at];
    let Action::Attention(attention) = &mut instr.action else { return None };
    match (&mut attention.ring, variant) {
        (Some(ring), 0) => ring.size += 1,
        (Some(ring), 1) => ring.stride += 1,
        (Some(ring), 2) => ring.axis = Axis::Data,
        (Some(_), _) => attention.ring = None,
        (none, _) => *none = Some(context.mesh.group(Axis::Context)),
    }
    Some(description)
}

fn other_dtype(rng: &mut TestRng, dtype: DType) -> DType {
    let dtypes: Vec<DType> =
        [DType::Bf16, DType::F32, DType::U32].into_iter().filter(|d| *d != dtype).collect();
    dtypes[rng.below(2)]
}

fn change_operand_dtype(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let location = random_instruction(rng, program, |_| true)?;
    let description = describe(location, program);
    let instr = &mut instructions_mut(&mut program.stages[location.0], location.1)[location.2];
    let operands = instr.reads.len() + instr.writes.len();
    let operand = instr.reads.iter_mut().chain(&mut instr.writes).nth(rng.below(operands))?;
    operand.extent.dtype = other_dtype(rng, operand.extent.dtype);
    Some(description)
}

/// Changes the dtype of a buffer and of all its operands.
fn change_buffer_dtype(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let index = rng.below(program.stages.len());
    let stage = &mut program.stages[index];
    let id = BufferId(rng.below(stage.buffers.len()) as u32);
    let buffer = &mut stage.buffers[id.0 as usize];
    buffer.extent.dtype = other_dtype(rng, buffer.extent.dtype);
    let (dtype, name) = (buffer.extent.dtype, buffer.name.clone());
    for phase in stage.chunk_phases().collect::<Vec<_>>() {
        for instr in instructions_mut(stage, phase) {
            for access in instr.reads.iter_mut().chain(&mut instr.writes) {
                if access.buffer == id {
                    access.extent.dtype = dtype;
                }
            }
        }
    }
    Some(format!("stage {index} {name} as {dtype:?}"))
}

/// Moves a buffer over another one, so that it is written while the other's contents are still needed.
fn overlap_live_buffer(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let index = rng.below(program.stages.len());
    let stage = &mut program.stages[index];
    let timeline: Vec<&Instr> = stage.pass_phases().flat_map(|at| stage.instructions(at)).collect();
    let live = BufferId(rng.below(stage.buffers.len()) as u32);
    let writes = |instr: &Instr| instr.writes.iter().any(|access| access.buffer == live);
    let reads = |instr: &Instr| instr.reads.iter().any(|access| access.buffer == live);
    // The last read, and the last write before it.
    let end = timeline.iter().rposition(|instr| reads(instr))?;
    let begin = match stage.buffer(live).role {
        role if !role.is_resident() => timeline[..end].iter().rposition(|instr| writes(instr))?,
        _ => 0,
    };
    let candidates: Vec<BufferId> = timeline[(begin + 1).min(end)..end]
        .iter()
        .flat_map(|instr| &instr.writes)
        .map(|access| access.buffer)
        .filter(|id| *id != live && !stage.buffer(*id).role.is_resident())
        .collect();
    let moved = *rng.pick(&candidates)?;
    stage.buffers[moved.0 as usize].offset = stage.buffer(live).offset;
    let (moved, live) = (&stage.buffer(moved).name, &stage.buffer(live).name);
    Some(format!("stage {index} {moved} over {live}"))
}

fn misplace_buffer(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let index = rng.below(program.stages.len());
    let stage = &mut program.stages[index];
    let at = rng.below(stage.buffers.len());
    let arena = stage.arena.0;
    let variant = rng.below(3);
    let buffer = &mut stage.buffers[at];
    match variant {
        0 => buffer.offset += 128,
        1 => buffer.offset = arena,
        _ => stage.arena.0 = buffer.offset + buffer.extent.bytes().0 - 1,
    }
    Some(format!("stage {index} buffer {at} variant {variant}"))
}

/// Redirects a result to another buffer, where no other instruction writes it to its own.
fn redirect_write(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let location = random_instruction(rng, program, |instr| !instr.writes.is_empty())?;
    let (index, phase, at) = location;
    let stage = &program.stages[index];
    let instr = &stage.instructions(phase)[at];
    let output = rng.below(instr.writes.len());
    let target = instr.writes[output].buffer;
    let in_place = instr.reads.iter().any(|access| access.buffer == target);
    let timeline: Vec<&Instr> = stage.all_instructions().collect();
    let read = timeline.iter().any(|i| i.reads.iter().any(|access| access.buffer == target));
    let needed = in_place || (read && !is_written_twice(stage, target));
    let other = BufferId(rng.below(stage.buffers.len()) as u32);
    if !needed || other == target {
        return None;
    }
    let description = format!("{} to {}", describe(location, program), stage.buffer(other).name);
    instructions_mut(&mut program.stages[index], phase)[at].writes[output].buffer = other;
    Some(description)
}

fn unmatch_transfer(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let is_transfer = |instr: &Instr| matches!(instr.action, Action::Send(_) | Action::Receive(_));
    let location = random_instruction(rng, program, is_transfer)?;
    let description = describe(location, program);
    let removes = rng.random_bool();
    let list = instructions_mut(&mut program.stages[location.0], location.1);
    if removes {
        list.remove(location.2);
    } else if let Action::Send(transfer) | Action::Receive(transfer) = &mut list[location.2].action
    {
        transfer.peer_stage += 1;
    }
    Some(description)
}

fn change_shard(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let devices = program.context.tensor_size();
    let index = rng.below(program.stages.len());
    let stage = &mut program.stages[index];
    let at = rng.below(stage.buffers.len());
    let shard = stage.buffers[at].shard.as_mut()?;
    let member = rng.below(shard.offset_stride.len());
    match rng.below(3) {
        0 => shard.offset_stride[member] += 1,
        1 if shard.offset_stride[member] > 0 => shard.offset_stride[member] -= 1,
        2 if devices > 1 => {
            shard.split = match shard.split {
                WeightSplit::Whole => WeightSplit::Rows,
                _ => WeightSplit::Whole,
            }
        }
        _ => return None,
    }
    Some(format!("stage {index} {} member {member}", stage.buffers[at].name))
}

fn change_schedule(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let index = rng.below(program.stages.len());
    let passes = &mut program.stages[index].schedule;
    let at = rng.below(passes.len());
    let variant = rng.below(4);
    match variant {
        0 => drop(passes.remove(at)),
        1 => passes.insert(at, passes[at]),
        2 => {
            // The backward pass of a microbatch before its forward pass.
            let other = passes.iter().rposition(|pass| pass.microbatch == passes[at].microbatch)?;
            if other == at {
                return None;
            }
            passes.swap(at, other);
        }
        _ => passes[at].microbatch += 1,
    }
    Some(format!("stage {index} pass {at} variant {variant}"))
}

/// Changes the extent of an operand, or the sizes of a GEMM but not those of its operands.
fn change_extent(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let location = random_instruction(rng, program, |_| true)?;
    let description = describe(location, program);
    let variant = rng.below(4);
    let instr = &mut instructions_mut(&mut program.stages[location.0], location.1)[location.2];
    let operands = instr.reads.len() + instr.writes.len();
    if let (0, Action::Gemm(gemm)) = (variant, &mut instr.action) {
        *[&mut gemm.m, &mut gemm.n, &mut gemm.k][rng.below(3)] += 1;
        return Some(description);
    }
    let operand = instr.reads.iter_mut().chain(&mut instr.writes).nth(rng.below(operands))?;
    match variant {
        1 => operand.extent.rows += 1,
        2 => operand.extent.columns *= 2,
        _ => operand.extent.rows *= 2,
    }
    Some(format!("{description} variant {variant}"))
}

/// Removes an operand.
fn drop_operand(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let location = random_instruction(rng, program, |_| true)?;
    let description = describe(location, program);
    let instr = &mut instructions_mut(&mut program.stages[location.0], location.1)[location.2];
    let at = rng.below(instr.reads.len() + instr.writes.len());
    match at.checked_sub(instr.reads.len()) {
        None => instr.reads.remove(at),
        Some(at) => instr.writes.remove(at),
    };
    Some(format!("{description} without operand {at}"))
}

/// Changes a parameter of a fused op: activation, gated product, sizes of a gate, head size or dimension.
fn change_function(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let location = random_instruction(rng, program, |instr| match &instr.action {
        Action::Fused(op) => other_function(*op).is_some(),
        _ => false,
    })?;
    let description = describe(location, program);
    let instr = &mut instructions_mut(&mut program.stages[location.0], location.1)[location.2];
    let Action::Fused(op) = &mut instr.action else { return None };
    *op = other_function(*op)?;
    Some(description)
}

fn other_function(op: FusedOp) -> Option<FusedOp> {
    use FusedOp::*;
    let phi = |activation| match activation {
        Activation::Identity => Activation::Silu,
        Activation::Silu => Activation::Identity,
    };
    let gated = |gated_product| match gated_product {
        Product::Plain => Product::SwiGlu,
        Product::SwiGlu => Product::Plain,
    };
    let along = |dim| match dim {
        Dim::Feature => Dim::Sequence,
        _ => Dim::Feature,
    };
    Some(match op {
        LatentForward { activation } => LatentForward { activation: phi(activation) },
        LatentRecover { activation } => LatentRecover { activation: phi(activation) },
        LatentBackward { activation } => LatentBackward { activation: phi(activation) },
        LatentRecoverBackward { activation } => {
            LatentRecoverBackward { activation: phi(activation) }
        }
        LatentNorm { activation } => LatentNorm { activation: phi(activation) },
        LatentNormBackward { activation } => LatentNormBackward { activation: phi(activation) },
        TensorGate { a, b } => TensorGate { a: a * 2, b: b / 2 },
        TensorGateBackward { a, b } => TensorGateBackward { a: a / 2, b: b * 2 },
        Rope { head_dim } => Rope { head_dim: head_dim / 2 },
        RopeBackward { head_dim } => RopeBackward { head_dim: head_dim / 2 },
        GatedProduct { product } => GatedProduct { product: gated(product) },
        GatedProductBackward { product } => GatedProductBackward { product: gated(product) },
        Pack { dim, axis } => Pack { dim: along(dim), axis },
        Unpack { dim, axis } => Unpack { dim: along(dim), axis },
        Slice { dim } => Slice { dim: along(dim) },
        _ => return None,
    })
}

/// Changes the sections of a buffer but not those of its operands.
fn change_sections(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let stage = rng.below(program.stages.len());
    let buffers = &mut program.stages[stage].buffers;
    let candidates: Vec<usize> = (0..buffers.len())
        .filter(|at| buffers[*at].sections.len() > 1 && buffers[*at].role == BufferRole::Activation)
        .collect();
    let buffer = &mut buffers[*rng.pick(&candidates)?];
    match rng.below(3) {
        0 => buffer.sections.clear(),
        1 => buffer.sections[0] += 1,
        _ => {
            buffer.sections[0] -= 1;
            buffer.sections[1] += 1;
        }
    }
    Some(format!("stage {stage} `{}` has sections {:?}", buffer.name, buffer.sections))
}

/// Removes a cast of a gradient, or changes the format in which the context reduces gradients.
fn change_rounding(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let is_cast = |instr: &Instr| instr.action == Action::Fused(FusedOp::Cast);
    let reduces_gradient = |instr: &Instr| match &instr.action {
        Action::Collective(op) => op.axis == Axis::Data && op.from == Layout::Partial,
        _ => is_cast(instr),
    };
    let location = random_instruction(rng, program, reduces_gradient)?;
    let description = describe(location, program);
    let list = instructions_mut(&mut program.stages[location.0], location.1);
    if is_cast(&list[location.2]) {
        list.remove(location.2);
        return Some(description);
    }
    let dtype = &mut program.context.grad_reduce_dtype;
    *dtype = match dtype {
        GradReduceDtype::Fp32 => GradReduceDtype::Bf16,
        GradReduceDtype::Bf16 => GradReduceDtype::Fp32,
    };
    Some(format!("{description} in {}", dtype.name()))
}

/// Removes a parameter from a collective over the data axis, with its bytes. A weight that is gathered for a pass is one that
/// the pass reads: a backward pass reads no bias.
fn leave_out_parameter(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let is_coalesced = |instr: &Instr| match &instr.action {
        Action::Collective(op) => op.axis == Axis::Data && instr.writes.len() > 1,
        _ => false,
    };
    let location = random_instruction(rng, program, is_coalesced)?;
    let description = describe(location, program);
    let stage = &mut program.stages[location.0];
    let (instr, later) = stage.instructions(location.1)[location.2..].split_first()?;
    let is_read = |written: &Access| {
        stage.buffer(written.buffer).role != BufferRole::GatheredWeight
            || later.iter().flat_map(|instr| &instr.reads).any(|a| a.buffer == written.buffer)
    };
    let writes = instr.writes.iter().enumerate();
    let removable: Vec<usize> = writes.filter(|(_, a)| is_read(a)).map(|(at, _)| at).collect();
    let instr = &mut instructions_mut(stage, location.1)[location.2];
    let at = *rng.pick(&removable)?;
    let (read, written) = (instr.reads.remove(at), instr.writes.remove(at));
    let bytes = read.extent.bytes().max(written.extent.bytes());
    collective_at(program, location)?.payload.0 -= bytes.0;
    Some(format!("{description} without parameter {at}"))
}
