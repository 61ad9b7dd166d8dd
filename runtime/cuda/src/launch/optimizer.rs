//! The optimizer: the sum of squared gradients, and AdamW.

use narrows_plan::program::{Access, BufferRole};
use narrows_plan::{DType, WeightSplit};

use super::grid::VectorFormat;
use super::operand::{
    Argument, LaunchResult, MatrixOperand, MemorySpace, expect_dtype, expect_elements, flag, to_u32,
};
use super::site::{InstrSite, Launch, Launches};
use crate::kernel_source::KernelFamily;
use narrows_runtime::session::OptimizerUpdate;
use narrows_runtime::{UpdateGroup, operand_range};

/// Elements whose squares one block sums: four vectors a thread, whose loads wait for memory at the same time.
const SQUARES_PER_BLOCK: u64 = 4096;

/// Number of f32 values in [`MemorySpace::Coefficients`].
pub const OPTIMIZER_COEFFICIENTS: u64 = 13;

/// Contents of [`MemorySpace::Coefficients`] in a step: clip norm, norm of unscaled gradients from which on they are
/// clipped, scale of gradients that are not, η/(1 − β₁ᵗ), (1 − β₂ᵗ)^-½, ε, β₁, β₂, the factors 1 − ηλ of vectors, of other
/// matrices and of factors of pairs, and the learning rate of these over η: a constant, and a multiple of the rank over
/// the width of the hidden state. The memory is written before every step, so that captured graphs can be replayed.
pub fn optimizer_coefficients(update: &OptimizerUpdate) -> [f32; OPTIMIZER_COEFFICIENTS as usize] {
    let OptimizerUpdate { optimizer, coefficients: step_coefficients, gradient_scale, .. } =
        *update;
    let scale = |rank_ratio| step_coefficients.rate_scale(UpdateGroup::Factor { rank_ratio });
    let (constant, per_rank_ratio) = (scale(0.0), scale(1.0) - scale(0.0));
    [
        optimizer.clip_norm,
        optimizer.clip_norm / gradient_scale,
        gradient_scale,
        step_coefficients.learning_rate / step_coefficients.bias_correction1,
        1.0 / step_coefficients.bias_correction2.sqrt(),
        step_coefficients.epsilon,
        optimizer.beta1,
        optimizer.beta2,
        step_coefficients.decay_factor(UpdateGroup::Vector),
        step_coefficients.decay_factor(UpdateGroup::Matrix),
        step_coefficients.decay_factor(UpdateGroup::Factor { rank_ratio: 0.0 }),
        constant,
        per_rank_ratio,
    ]
    .map(|coefficient| coefficient as f32)
}

/// Adds the squares of a gradient to the total. Of gradients that all devices of the tensor axis hold in full,
/// only the first device's are counted.
pub(super) fn square_sum(site: &InstrSite) -> LaunchResult<Launches> {
    let access = site.scheduled.instr.reads.first().ok_or("it reads nothing")?;
    let shard = &site.device.stage.buffer(access.buffer).shard;
    if site.device.coordinates.tensor > 0
        && shard.as_ref().is_some_and(|s| s.split == WeightSplit::Whole)
    {
        return Ok(Launches::default());
    }
    let (gradient, total) = (site.input(0)?.flat(), site.output(0)?.flat());
    expect_dtype(DType::F32, &[&gradient, &total])?;
    expect_elements(1, &[&total])?;
    let count = gradient.elements().div_ceil(SQUARES_PER_BLOCK);
    let parts = MatrixOperand::contiguous(MemorySpace::Scratch, 0, (1, count), DType::F32);
    let format = VectorFormat::common(DType::F32, &[gradient])?;
    let arguments = vec![
        gradient.read(),
        parts.write(),
        Argument::U64(gradient.elements()),
        Argument::U32(to_u32(SQUARES_PER_BLOCK)?),
    ];
    let squares = Launch::new(KernelFamily::Optimizer, format.kernel_name("square_sum"), arguments)
        .one_block()
        .grid([to_u32(count.max(1))?, 1, 1]);
    let arguments = vec![parts.read(), total.update(), Argument::U32(to_u32(count)?)];
    let sum = Launch::new(KernelFamily::Optimizer, "square_total", arguments).one_block();
    Ok(Launches { launches: vec![squares, sum], scratch_bytes: 4 * count })
}

/// Outputs: the weight, the whole gradient unless the next step overwrites it, both moments and, for bf16 weights, the master
/// copy.
pub(super) fn adamw(site: &InstrSite) -> LaunchResult<Launches> {
    let zeroes = site.scheduled.instr.zeroed_gradient().is_some();
    let state =
        |index: usize| site.output(1 + usize::from(zeroes) + index).map(MatrixOperand::flat);
    let (weight, first, second) = (site.output(0)?.flat(), state(0)?, state(1)?);
    let gradient = if zeroes { site.output(1)? } else { site.input(0)? }.flat();
    let count = weight.elements();
    expect_dtype(DType::F32, &[&gradient, &first, &second])?;
    expect_elements(count, &[&first, &second])?;
    let whole = gradient.elements();
    let position = site.device.context.shard_position(site.device.coordinates.replica);
    let begin = if whole > count { position * count } else { 0 };
    if begin + count > whole {
        return Err(format!(
            "weights {begin} to {} have a gradient of {whole} elements",
            begin + count
        ));
    }
    let local_gradient = gradient.column_range(begin, count)?;
    let mut operands = vec![weight, local_gradient, first, second];
    let master = match weight.dtype {
        DType::Bf16 => {
            let master = state(2)?;
            expect_dtype(DType::F32, &[&master])?;
            expect_elements(count, &[&master])?;
            operands.push(master);
            master.update()
        }
        _ => Argument::Null,
    };
    let weight_argument = weight.write_or_update(weight.dtype != DType::Bf16);
    let format = VectorFormat::common_quads(weight.dtype, &operands)?;
    let buffer = site.scheduled.instr.writes[0].buffer;
    let Some(group) = site.device.update_groups.get(&buffer) else {
        return Err("the group of its weight is not known".into());
    };
    let (group, rank_ratio) = match group {
        UpdateGroup::Vector => (0, 0.0),
        UpdateGroup::Matrix => (1, 0.0),
        UpdateGroup::Factor { rank_ratio } => (2, *rank_ratio),
    };
    let coefficients = MatrixOperand::contiguous(
        MemorySpace::Coefficients,
        0,
        (1, OPTIMIZER_COEFFICIENTS),
        DType::F32,
    );
    let arguments = vec![
        weight_argument,
        gradient.read_or_update(zeroes),
        first.update(),
        second.update(),
        master,
        square_sum_operand(site)?.read(),
        coefficients.read(),
        Argument::U64(begin),
        Argument::U64(count),
        Argument::U64(whole),
        Argument::U32(group),
        Argument::F32(rank_ratio as f32),
        flag(zeroes),
    ];
    let launch = Launch::new(KernelFamily::Optimizer, format.kernel_name("adamw"), arguments);
    Ok(launch.over_elements(whole, format.vector)?.into())
}

/// The reduced sum of all squared gradients.
fn square_sum_operand(site: &InstrSite) -> LaunchResult<MatrixOperand> {
    let stage = site.device.stage;
    let buffer = stage
        .buffer_with_role(BufferRole::SquareSum)
        .ok_or("the stage has no sum of squared gradients")?;
    let access = Access { buffer, extent: stage.buffer(buffer).extent };
    let begin = operand_range(stage, &access, site.scheduled.slot).start;
    Ok(MatrixOperand::contiguous(MemorySpace::Arena, begin, (1, 1), DType::F32))
}
