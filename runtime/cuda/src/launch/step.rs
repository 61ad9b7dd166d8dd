//! The optimizer.

use narrows_plan::DType;
use narrows_plan::emit::WeightSplit;
use narrows_plan::program::Region;
use narrows_plan::strategy::Zero;

use super::operand::{MatrixOperand, small};
use super::shape::{AccessFormat, expect, expect_count};
use super::{Argument, InstrSite, KernelFamily, Launch, LaunchResult, Launches, MemorySpace};
use narrows_runtime::Optimizer;
use narrows_runtime::operand_range;

/// Numbers whose squares one block sums.
const SQUARES: u64 = 16_384;

/// f32 numbers of [`MemorySpace::Coefficients`].
pub const COEFFICIENTS: u64 = 8;

/// What [`MemorySpace::Coefficients`] holds in a step, counted from 1: clip norm, η/(1 − β₁ᵗ),
/// (1 − β₂ᵗ)^-½, ε, β₁, β₂, 1 − ηλ, and a zero. It is written before the step begins, so that a
/// captured graph need not be made anew for each.
pub fn coefficients(optimizer: &Optimizer, step: u64) -> [f32; COEFFICIENTS as usize] {
    let of_step = optimizer.coefficients(step);
    [
        optimizer.clip_norm,
        of_step.learning_rate / of_step.bias_correction1,
        1.0 / of_step.bias_correction2.sqrt(),
        optimizer.epsilon,
        optimizer.beta1,
        optimizer.beta2,
        of_step.decay_factor,
        0.0,
    ]
    .map(|number| number as f32)
}

/// Adds the squares of a gradient, unless another device of the tensor axis counts them too.
pub(super) fn square_sum(site: &InstrSite) -> LaunchResult<Launches> {
    let access = site.moment.instr.reads.first().ok_or("it reads nothing")?;
    let shard = &site.device.stage.buffer(access.buffer).shard;
    if site.device.tensor > 0 && shard.as_ref().is_some_and(|s| s.split == WeightSplit::Whole) {
        return Ok(Launches::default());
    }
    let (gradient, total) = (site.read(0)?.flat(), site.write(0)?.flat());
    expect(DType::F32, &[&gradient, &total])?;
    expect_count(1, &[&total])?;
    let count = gradient.elements().div_ceil(SQUARES);
    let parts = MatrixOperand::contiguous(MemorySpace::Scratch, 0, (1, count), DType::F32);
    let format = AccessFormat::of(DType::F32, &[gradient])?;
    let arguments = vec![
        gradient.read(),
        parts.write(),
        Argument::U64(gradient.elements()),
        Argument::U32(small(SQUARES)?),
    ];
    let squares = Launch::new(KernelFamily::Optimizer, format.name("square_sum"), arguments)
        .one_block()
        .grid([small(count.max(1))?, 1, 1]);
    let arguments = vec![parts.read(), total.update(), Argument::U32(small(count)?)];
    let sum = Launch::new(KernelFamily::Optimizer, "square_total", arguments).one_block();
    Ok(Launches { launches: vec![squares, sum], scratch_bytes: 4 * count })
}

/// Writes weight, the whole gradient, the moments and, where weights are bf16, the master copy.
pub(super) fn adamw(site: &InstrSite) -> LaunchResult<Launches> {
    let [weight, gradient, first, second] =
        [0, 1, 2, 3].map(|port| site.write(port).map(MatrixOperand::flat));
    let (weight, gradient, first, second) = (weight?, gradient?, first?, second?);
    let count = weight.elements();
    expect(DType::F32, &[&gradient, &first, &second])?;
    expect_count(count, &[&first, &second])?;
    let parted = site.device.context.zero == Zero::One;
    let begin = if parted { site.device.data * count } else { 0 };
    let whole = gradient.elements();
    if begin + count > whole {
        return Err(format!("{count} weights from {begin} have a gradient of {whole}"));
    }
    let mine = gradient.column_range(begin, count)?;
    let mut operands = vec![weight, mine, first, second];
    let master = match weight.dtype {
        DType::Bf16 => {
            let master = site.write(4)?.flat();
            expect(DType::F32, &[&master])?;
            expect_count(count, &[&master])?;
            operands.push(master);
            master.update()
        }
        _ => Argument::Absent,
    };
    let made = if weight.dtype == DType::Bf16 { weight.write() } else { weight.update() };
    let format = AccessFormat::of_four(weight.dtype, &operands)?;
    let buffer = site.moment.instr.writes[0].buffer;
    let decays = site.device.decays.get(&buffer).copied().unwrap_or(false);
    let coefficients =
        MatrixOperand::contiguous(MemorySpace::Coefficients, 0, (1, COEFFICIENTS), DType::F32);
    let arguments = vec![
        made,
        gradient.update(),
        first.update(),
        second.update(),
        master,
        square_sum_of(site)?.read(),
        coefficients.read(),
        Argument::U64(begin),
        Argument::U64(count),
        Argument::U64(whole),
        Argument::U32(u32::from(decays)),
    ];
    let launch = Launch::new(KernelFamily::Optimizer, format.name("adamw"), arguments);
    Ok(launch.over_all(whole, format.vector)?.into())
}

/// The sum of all squared gradients, once it is reduced.
fn square_sum_of(site: &InstrSite) -> LaunchResult<MatrixOperand> {
    let stage = site.device.stage;
    let at = stage
        .buffers
        .iter()
        .position(|buffer| buffer.region == Region::Input && buffer.name == "square sum")
        .ok_or("the stage has no sum of squared gradients")?;
    let buffer = narrows_plan::program::BufferId(small(at as u64)?);
    let access = narrows_plan::program::Access { buffer, extent: stage.buffer(buffer).extent };
    let begin = operand_range(stage, &access, site.moment.slot).start;
    Ok(MatrixOperand::contiguous(MemorySpace::Arena, begin, (1, 1), DType::F32))
}
