//! The kinds of damage.

use narrows_plan::Axis;
use narrows_plan::WeightSplit;
use narrows_plan::kernel::CollectiveKind;
use narrows_plan::model::{Activation, GatedProduct as Product};
use narrows_plan::program::{
    Access, Action, BufferId, BufferRole, CollectiveOp, FusedOp, Instr, Phase, Program, Reduction,
    StageProgram,
};
use narrows_plan::{DType, Dim, Layout};

use crate::order::{commutes, depends, is_written_twice};
use crate::plans::TestRng;

/// Damages a program and says how, or leaves it as it is when it cannot.
pub type Mutation = fn(&mut TestRng, &mut Program) -> Option<String>;

pub const MUTATIONS: [(&str, Mutation); 19] = [
    ("collective removed", remove_collective),
    ("collective doubled", duplicate_collective),
    ("collective moved", move_collective),
    ("collective of the wrong kind", change_kind),
    ("collective with the wrong reduction", change_reduction),
    ("collective over the wrong group", change_group),
    ("operand of the wrong dtype", change_operand_dtype),
    ("buffer of the wrong dtype", change_buffer_dtype),
    ("buffer overwritten early", overlap_live_buffer),
    ("buffer outside its place", misplace_buffer),
    ("write redirected", redirect_write),
    ("transfer without its other half", unmatch_transfer),
    ("wrong shard", change_shard),
    ("dependent instructions swapped", swap_dependent),
    ("schedule damaged", change_schedule),
    ("extent damaged", change_extent),
    ("operand dropped", drop_operand),
    ("another function", change_function),
    ("sections damaged", change_sections),
];

const PHASES: [Phase; 3] = [Phase::Forward, Phase::Backward, Phase::Step];

fn instructions_mut(stage: &mut StageProgram, phase: Phase) -> &mut Vec<Instr> {
    match phase {
        Phase::Forward => &mut stage.forward,
        Phase::Backward => &mut stage.backward,
        Phase::Step => &mut stage.step,
    }
}

/// A random instruction among those that fit.
fn random_instruction(
    dice: &mut TestRng,
    program: &Program,
    fits: impl Fn(&Instr) -> bool,
) -> Option<(usize, Phase, usize)> {
    let mut found = vec![];
    for (index, stage) in program.stages.iter().enumerate() {
        for phase in PHASES {
            let fitting = stage.instructions(phase).iter().enumerate().filter(|(_, i)| fits(i));
            found.extend(fitting.map(|(at, _)| (index, phase, at)));
        }
    }
    dice.pick(&found).copied()
}

fn is_collective(instr: &Instr) -> bool {
    matches!(instr.action, Action::Collective(_))
}

fn describe((stage, phase, at): (usize, Phase, usize), program: &Program) -> String {
    let instr = &program.stages[stage].instructions(phase)[at];
    let names = |side: &[Access]| -> Vec<String> {
        side.iter().map(|a| program.stages[stage].buffer(a.buffer).name.clone()).collect()
    };
    let (writes, reads) = (names(&instr.writes), names(&instr.reads));
    let name = instr.action.name();
    format!("stage {stage} {phase:?} {at} {}: {writes:?} = {name}{reads:?}", instr.origin)
}

fn remove_collective(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let place = random_instruction(dice, program, is_collective)?;
    let what = describe(place, program);
    instructions_mut(&mut program.stages[place.0], place.1).remove(place.2);
    Some(what)
}

fn duplicate_collective(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let place = random_instruction(dice, program, is_collective)?;
    let what = describe(place, program);
    let list = instructions_mut(&mut program.stages[place.0], place.1);
    list.insert(place.2, list[place.2].clone());
    Some(what)
}

fn move_collective(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let place = random_instruction(dice, program, is_collective)?;
    let down = dice.coin();
    move_past_dependent(program, place, down)
}

fn swap_dependent(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let place = random_instruction(dice, program, |instr| !is_collective(instr))?;
    let down = dice.coin();
    move_past_dependent(program, place, down)
}

/// Moves an instruction past the nearest one that depends on it or that it depends on.
fn move_past_dependent(
    program: &mut Program,
    place: (usize, Phase, usize),
    down: bool,
) -> Option<String> {
    let (index, phase, at) = place;
    let stage = &program.stages[index];
    let instr = &stage.instructions(phase)[at];
    let others = stage.instructions(phase);
    let meets = |other: &&usize| depends(stage, instr, &others[**other]);
    let positions: Vec<usize> =
        if down { (at + 1..others.len()).collect() } else { (0..at).rev().collect() };
    let past = *positions.iter().find(meets)?;
    if commutes(stage, instr, &others[past]) {
        return None;
    }
    let what =
        format!("{} past {}", describe(place, program), describe((index, phase, past), program));
    let list = instructions_mut(&mut program.stages[index], phase);
    let instr = list.remove(at);
    list.insert(past, instr);
    Some(what)
}

fn collective_at(
    program: &mut Program,
    (stage, phase, at): (usize, Phase, usize),
) -> Option<&mut CollectiveOp> {
    match &mut instructions_mut(&mut program.stages[stage], phase)[at].action {
        Action::Collective(exchange) => Some(exchange),
        _ => None,
    }
}

fn change_kind(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    use CollectiveKind::{AllGather, AllReduce, AllToAll, ReduceScatter};
    let place = random_instruction(dice, program, is_collective)?;
    let what = describe(place, program);
    let other = *dice.pick(&[AllGather, AllReduce, AllToAll, ReduceScatter])?;
    let (keeps_layouts, dim) = (dice.coin(), *dice.pick(&[Dim::Feature, Dim::Sequence])?);
    let exchange = collective_at(program, place)?;
    if exchange.kind == other {
        return None;
    }
    exchange.kind = other;
    if !keeps_layouts {
        // Layouts that the other kind could take, only not these.
        let sharded = Layout::Sharded(dim);
        (exchange.from, exchange.to) = match other {
            AllReduce => (Layout::Partial, Layout::Replicated),
            ReduceScatter => (Layout::Partial, sharded),
            AllGather => (sharded, Layout::Replicated),
            AllToAll => (sharded, Layout::Sharded(Dim::Position)),
        };
    }
    Some(format!("{what} as {other:?}"))
}

fn change_reduction(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let reduces = |instr: &Instr| matches!(&instr.action, Action::Collective(exchange) if exchange.from == Layout::Partial);
    let place = random_instruction(dice, program, reduces)?;
    let what = describe(place, program);
    let exchange = collective_at(program, place)?;
    exchange.reduction = match exchange.reduction {
        Reduction::Sum => Reduction::Maximum,
        Reduction::Maximum => Reduction::Sum,
    };
    Some(what)
}

fn change_group(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let place = random_instruction(dice, program, is_collective)?;
    let what = describe(place, program);
    let mesh = program.context.mesh;
    let (way, axis) = (dice.below(4), *dice.pick(&[Axis::Tensor, Axis::Data, Axis::Pipeline])?);
    let exchange = collective_at(program, place)?;
    match way {
        0 => exchange.group.size += 1,
        1 => exchange.group.stride += 1,
        _ if axis == exchange.axis => return None,
        2 => exchange.axis = axis,
        _ => (exchange.axis, exchange.group) = (axis, mesh.group(axis)),
    }
    Some(what)
}

fn other_dtype(dice: &mut TestRng, dtype: DType) -> DType {
    let others: Vec<DType> =
        [DType::Bf16, DType::F32, DType::U32].into_iter().filter(|d| *d != dtype).collect();
    others[dice.below(2)]
}

fn change_operand_dtype(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let place = random_instruction(dice, program, |_| true)?;
    let what = describe(place, program);
    let instr = &mut instructions_mut(&mut program.stages[place.0], place.1)[place.2];
    let sides = instr.reads.len() + instr.writes.len();
    let operand = instr.reads.iter_mut().chain(&mut instr.writes).nth(dice.below(sides))?;
    operand.extent.dtype = other_dtype(dice, operand.extent.dtype);
    Some(what)
}

/// A buffer and all that see it, together.
fn change_buffer_dtype(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let index = dice.below(program.stages.len());
    let stage = &mut program.stages[index];
    let id = BufferId(dice.below(stage.buffers.len()) as u32);
    let buffer = &mut stage.buffers[id.0 as usize];
    buffer.extent.dtype = other_dtype(dice, buffer.extent.dtype);
    let (dtype, name) = (buffer.extent.dtype, buffer.name.clone());
    for phase in PHASES {
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

/// A buffer is put where another one's contents are still needed when it is written.
fn overlap_live_buffer(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let index = dice.below(program.stages.len());
    let stage = &mut program.stages[index];
    let timeline: Vec<&Instr> = stage.forward.iter().chain(&stage.backward).collect();
    let victim = BufferId(dice.below(stage.buffers.len()) as u32);
    let writes = |instr: &Instr| instr.writes.iter().any(|access| access.buffer == victim);
    let reads = |instr: &Instr| instr.reads.iter().any(|access| access.buffer == victim);
    // The last read, and the last write before it.
    let end = timeline.iter().rposition(|instr| reads(instr))?;
    let begin = match stage.buffer(victim).role {
        BufferRole::Activation => timeline[..end].iter().rposition(|instr| writes(instr))?,
        _ => 0,
    };
    let during: Vec<BufferId> = timeline[(begin + 1).min(end)..end]
        .iter()
        .flat_map(|instr| &instr.writes)
        .map(|access| access.buffer)
        .filter(|id| *id != victim && stage.buffer(*id).role == BufferRole::Activation)
        .collect();
    let attacker = *dice.pick(&during)?;
    stage.buffers[attacker.0 as usize].offset = stage.buffer(victim).offset;
    let (over, of) = (&stage.buffer(attacker).name, &stage.buffer(victim).name);
    Some(format!("stage {index} {over} over {of}"))
}

fn misplace_buffer(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let index = dice.below(program.stages.len());
    let stage = &mut program.stages[index];
    let at = dice.below(stage.buffers.len());
    let arena = stage.arena.0;
    let way = dice.below(3);
    let buffer = &mut stage.buffers[at];
    match way {
        0 => buffer.offset += 128,
        1 => buffer.offset = arena,
        _ => stage.arena.0 = buffer.offset + buffer.extent.bytes().0 - 1,
    }
    Some(format!("stage {index} buffer {at} in way {way}"))
}

/// A result is written to another buffer, where nothing else leaves it in its own.
fn redirect_write(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let place = random_instruction(dice, program, |instr| !instr.writes.is_empty())?;
    let (index, phase, at) = place;
    let stage = &program.stages[index];
    let instr = &stage.instructions(phase)[at];
    let port = dice.below(instr.writes.len());
    let target = instr.writes[port].buffer;
    let in_place = instr.reads.iter().any(|access| access.buffer == target);
    let timeline: Vec<&Instr> =
        stage.forward.iter().chain(&stage.backward).chain(&stage.step).collect();
    let read = timeline.iter().any(|i| i.reads.iter().any(|access| access.buffer == target));
    let needed = in_place || (read && !is_written_twice(stage, target));
    let other = BufferId(dice.below(stage.buffers.len()) as u32);
    if !needed || other == target {
        return None;
    }
    let what = format!("{} to {}", describe(place, program), stage.buffer(other).name);
    instructions_mut(&mut program.stages[index], phase)[at].writes[port].buffer = other;
    Some(what)
}

fn unmatch_transfer(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let hops = |instr: &Instr| matches!(instr.action, Action::Send(_) | Action::Receive(_));
    let place = random_instruction(dice, program, hops)?;
    let what = describe(place, program);
    let removes = dice.coin();
    let list = instructions_mut(&mut program.stages[place.0], place.1);
    if removes {
        list.remove(place.2);
    } else if let Action::Send(hop) | Action::Receive(hop) = &mut list[place.2].action {
        hop.peer_stage += 1;
    }
    Some(what)
}

fn change_shard(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let devices = program.context.tensor_size();
    let index = dice.below(program.stages.len());
    let stage = &mut program.stages[index];
    let at = dice.below(stage.buffers.len());
    let shard = stage.buffers[at].shard.as_mut()?;
    let member = dice.below(shard.offset_stride.len());
    match dice.below(3) {
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

fn change_schedule(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let index = dice.below(program.stages.len());
    let turns = &mut program.stages[index].schedule;
    let at = dice.below(turns.len());
    let way = dice.below(4);
    match way {
        0 => drop(turns.remove(at)),
        1 => turns.insert(at, turns[at]),
        2 => {
            // Backward before forward of one microbatch.
            let other = turns.iter().rposition(|turn| turn.microbatch == turns[at].microbatch)?;
            if other == at {
                return None;
            }
            turns.swap(at, other);
        }
        _ => turns[at].microbatch += 1,
    }
    Some(format!("stage {index} turn {at} in way {way}"))
}

/// An operand is seen with another shape, or a product has other sizes than its operands.
fn change_extent(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let place = random_instruction(dice, program, |_| true)?;
    let what = describe(place, program);
    let way = dice.below(4);
    let instr = &mut instructions_mut(&mut program.stages[place.0], place.1)[place.2];
    let sides = instr.reads.len() + instr.writes.len();
    if let (0, Action::Gemm(product)) = (way, &mut instr.action) {
        *[&mut product.m, &mut product.n, &mut product.k][dice.below(3)] += 1;
        return Some(what);
    }
    let operand = instr.reads.iter_mut().chain(&mut instr.writes).nth(dice.below(sides))?;
    match way {
        1 => operand.extent.rows += 1,
        2 => operand.extent.columns *= 2,
        _ => operand.extent.rows *= 2,
    }
    Some(format!("{what} in way {way}"))
}

/// An operand is missing.
fn drop_operand(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let place = random_instruction(dice, program, |_| true)?;
    let what = describe(place, program);
    let instr = &mut instructions_mut(&mut program.stages[place.0], place.1)[place.2];
    let at = dice.below(instr.reads.len() + instr.writes.len());
    match at.checked_sub(instr.reads.len()) {
        None => instr.reads.remove(at),
        Some(at) => instr.writes.remove(at),
    };
    Some(format!("{what} without operand {at}"))
}

/// A pass computes another function than its counterpart: φ, the product, the heads, the dim.
fn change_function(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let place = random_instruction(dice, program, |instr| match &instr.action {
        Action::Fused(pass) => other_function(*pass).is_some(),
        _ => false,
    })?;
    let what = describe(place, program);
    let instr = &mut instructions_mut(&mut program.stages[place.0], place.1)[place.2];
    let Action::Fused(pass) = &mut instr.action else { return None };
    *pass = other_function(*pass)?;
    Some(what)
}

fn other_function(pass: FusedOp) -> Option<FusedOp> {
    use FusedOp::*;
    let phi = |activation| match activation {
        Activation::Identity => Activation::Silu,
        Activation::Silu => Activation::Identity,
    };
    let gated = |product| match product {
        Product::Plain => Product::SwiGlu,
        Product::SwiGlu => Product::Plain,
    };
    let along = |dim| match dim {
        Dim::Feature => Dim::Sequence,
        _ => Dim::Feature,
    };
    Some(match pass {
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
        Pack { dim } => Pack { dim: along(dim) },
        Unpack { dim } => Unpack { dim: along(dim) },
        Slice { dim } => Slice { dim: along(dim) },
        _ => return None,
    })
}

/// A buffer's tensors begin elsewhere than those of its operands.
fn change_sections(dice: &mut TestRng, program: &mut Program) -> Option<String> {
    let stage = dice.below(program.stages.len());
    let buffers = &mut program.stages[stage].buffers;
    let several: Vec<usize> = (0..buffers.len())
        .filter(|at| buffers[*at].sections.len() > 1 && buffers[*at].role == BufferRole::Activation)
        .collect();
    let buffer = &mut buffers[*dice.pick(&several)?];
    match dice.below(3) {
        0 => buffer.sections.clear(),
        1 => buffer.sections[0] += 1,
        _ => {
            buffer.sections[0] -= 1;
            buffer.sections[1] += 1;
        }
    }
    Some(format!("stage {stage} `{}` has sections {:?}", buffer.name, buffer.sections))
}
