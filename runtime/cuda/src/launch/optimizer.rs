//! The optimizer: the sum of squared gradients, and AdamW.

use narrows_plan::program::{Access, BufferRole, ParameterUpdate};
use narrows_plan::{DType, WeightSplit};

use super::operand::{
    Argument, LaunchResult, MatrixOperand, MemorySpace, expect_dtype, expect_elements, to_u32,
};
use super::site::{InstrSite, Launch, Launches};
use crate::kernel_source::KernelFamily;
use narrows_runtime::session::OptimizerUpdate;
use narrows_runtime::{UpdateGroup, operand_range};

/// Elements of a gradient whose squares one block sums: four vectors a thread, whose loads wait for memory at the same time;
/// and elements of a parameter that one block updates.
const ELEMENTS_PER_BLOCK: u64 = 4096;
/// Parameters of one launch. With 80 bytes each, the parameters of a kernel fit in 4 KB.
const TENSORS_MAX: usize = 48;
/// Words of a gradient whose squares are summed: its elements, their number, and that of parts up to its last.
const SQUARED_WORDS: usize = 3;
/// Words of a parameter that is updated.
const UPDATED_WORDS: usize = 10;

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

/// Adds the squares of gradients to the total, in two launches for every [`TENSORS_MAX`] gradients: the sum of each part, then
/// that of all parts in order. Of gradients that all devices of the tensor axis hold in full, only the first device's are
/// counted.
pub(super) fn square_sum(site: &InstrSite) -> LaunchResult<Launches> {
    let (_, gradients) = site.scheduled.instr.reads.split_last().ok_or("it reads nothing")?;
    let is_counted = |gradient: &&Access| {
        let shard = &site.device.stage.buffer(gradient.buffer).shard;
        let is_whole = shard.as_ref().is_some_and(|shard| shard.split == WeightSplit::Whole);
        site.device.coordinates.tensor == 0 || !is_whole
    };
    let counted: Vec<&Access> = gradients.iter().filter(is_counted).collect();
    let total = site.output(0)?.flat();
    expect_elements(1, &[&total])?;
    let mut all = Launches::default();
    for gradients in counted.chunks(TENSORS_MAX) {
        let (mut table, mut count) = (vec![], 0);
        for gradient in gradients {
            let gradient = site.operand(gradient).flat();
            expect_dtype(DType::F32, &[&gradient, &total])?;
            count += gradient.elements().div_ceil(ELEMENTS_PER_BLOCK);
            let counts = [gradient.elements(), count].map(Argument::U64);
            table.extend([gradient.read()].into_iter().chain(counts));
        }
        if count == 0 {
            continue;
        }
        table.resize(TENSORS_MAX * SQUARED_WORDS, Argument::U64(0));
        let parts = MatrixOperand::contiguous(MemorySpace::Scratch, 0, (1, count), DType::F32);
        let squares = Launch::new(KernelFamily::Optimizer, "square_sum", vec![parts.write()]);
        let arguments = vec![parts.read(), total.update(), Argument::U32(to_u32(count)?)];
        let sum = Launch::new(KernelFamily::Optimizer, "square_total", arguments).one_block();
        let squares = squares.table(table).one_block().grid([to_u32(count)?, 1, 1]);
        all.launches.extend([squares, sum]);
        all.scratch_bytes = all.scratch_bytes.max(4 * count);
    }
    Ok(all)
}

/// Updates parameters, in one launch for every [`TENSORS_MAX`] of them.
pub(super) fn adamw(site: &InstrSite) -> LaunchResult<Launches> {
    let updates: Option<Vec<ParameterUpdate>> = site.scheduled.instr.parameter_updates().collect();
    let updates = updates.ok_or("its operands are not those of updates")?;
    let coefficients = MatrixOperand::contiguous(
        MemorySpace::Coefficients,
        0,
        (1, OPTIMIZER_COEFFICIENTS),
        DType::F32,
    );
    let launch = |updates: &[ParameterUpdate]| {
        let dtype = updates[0].weight.extent.dtype;
        let (mut table, mut blocks) = (vec![], 0);
        for update in updates {
            let (words, elements) = updated_parameter(site, update, dtype)?;
            table.extend(words);
            blocks += elements.div_ceil(ELEMENTS_PER_BLOCK);
        }
        table.resize(TENSORS_MAX * UPDATED_WORDS, Argument::U64(0));
        let arguments = vec![square_sum_operand(site)?.read(), coefficients.read()];
        let kernel = format!("adamw_{}", dtype.name());
        let launch = Launch::new(KernelFamily::Optimizer, kernel, arguments).table(table);
        Ok(launch.one_block().grid([to_u32(blocks)?, 1, 1]))
    };
    let launches: LaunchResult<Vec<Launch>> = updates.chunks(TENSORS_MAX).map(launch).collect();
    Ok(Launches { launches: launches?, scratch_bytes: 0 })
}

/// The words of a parameter with weights in this format, and the elements that the blocks of the kernel share.
fn updated_parameter(
    site: &InstrSite,
    update: &ParameterUpdate,
    dtype: DType,
) -> LaunchResult<([Argument; UPDATED_WORDS], u64)> {
    let ParameterUpdate { weight: weight_access, zeroed, states, .. } = update;
    let weight = site.operand(weight_access).flat();
    let count = weight.elements();
    let gradient = site.operand(zeroed.as_ref().unwrap_or(&update.gradient)).flat();
    let states: Vec<MatrixOperand> =
        states.iter().map(|state| site.operand(state).flat()).collect();
    expect_dtype(dtype, &[&weight])?;
    expect_dtype(DType::F32, &[&gradient])?;
    for state in &states {
        expect_dtype(DType::F32, &[state])?;
        expect_elements(count, &[state])?;
    }
    let whole = gradient.elements();
    let position = site.device.context.shard_position(site.device.coordinates.replica);
    let begin = if whole > count { position * count } else { 0 };
    if begin + count > whole {
        return Err(format!(
            "weights {begin} to {} have a gradient of {whole} elements",
            begin + count
        ));
    }
    if count == 0 {
        return Err("a weight has no elements".into());
    }
    let is_narrow = dtype == DType::Bf16;
    let (first, second, master) = match (&states[..], is_narrow) {
        ([first, second], false) => (first, second, Argument::Null),
        ([first, second, master], true) => (first, second, master.update()),
        _ => return Err(format!("a weight in {} has {} states", dtype.name(), states.len())),
    };
    let Some(group) = site.device.update_groups.get(&weight_access.buffer) else {
        return Err("the group of its weight is not known".into());
    };
    let (group, rank_ratio) = match group {
        UpdateGroup::Vector => (0, 0.0),
        UpdateGroup::Matrix => (1, 0.0),
        UpdateGroup::Factor { rank_ratio } => (2, *rank_ratio),
    };
    let words = [
        weight.write_or_update(!is_narrow),
        gradient.read_or_update(zeroed.is_some()),
        first.update(),
        second.update(),
        master,
        Argument::U64(begin),
        Argument::U64(count),
        Argument::U64(if zeroed.is_some() { whole } else { 0 }),
        Argument::U32(group),
        Argument::F32(rank_ratio as f32),
    ];
    Ok((words, whole))
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
