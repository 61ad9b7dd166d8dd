//! Cross-entropy over a shard of the vocabulary.

use narrows_plan::DType;

use super::embedding::{first_token, token_ids};
use super::grid::VectorFormat;
use super::operand::{
    Argument, LaunchResult, MatrixOperand, MemorySpace, expect_dtype, expect_elements,
    row_and_column_counts, row_statistic, to_u32,
};
use super::site::{InstrSite, Launch, Launches};
use crate::kernel_source::KernelFamily;

pub(super) fn maximum(site: &InstrSite) -> LaunchResult<Launches> {
    let logits = site.input(0)?;
    let mut arguments = vec![logits.read(), row_statistic(site.output(0)?, logits.rows)?.write()];
    arguments.extend(row_and_column_counts(&logits)?);
    Ok(row_launch("loss_maximum", logits, arguments)?.into())
}

pub(super) fn sum(site: &InstrSite) -> LaunchResult<Launches> {
    let logits = site.input(0)?;
    let maximum = row_statistic(site.input(1)?, logits.rows)?;
    let targets = token_ids(site.input(2)?, logits.rows)?;
    let packed = packed_statistics(site.output(0)?, logits.rows)?;
    let mut arguments = vec![logits.read(), maximum.read(), targets.read(), packed.write()];
    arguments.extend(row_and_column_counts(&logits)?);
    arguments.push(first_token(site, logits.columns)?);
    Ok(row_launch("loss_sum", logits, arguments)?.into())
}

/// Two launches: the gradient in place of the logits, and the sum of the losses.
pub(super) fn gradient(site: &InstrSite) -> LaunchResult<Launches> {
    let logits = site.input(0)?;
    let rows = logits.rows;
    let maximum = row_statistic(site.input(1)?, rows)?;
    let packed = packed_statistics(site.input(2)?, rows)?;
    let targets = token_ids(site.input(3)?, rows)?;
    if site.output(0)? != logits {
        return Err("its gradient is not in place of the logits".to_string());
    }
    let work = &site.device.context.workload;
    let factor = 1.0 / (work.global_batch * work.sequence_length) as f64;
    let factor = Argument::F32(factor as f32);
    let mut arguments = vec![logits.update(), maximum.read(), packed.read(), targets.read()];
    arguments.extend(row_and_column_counts(&logits)?);
    arguments.extend([first_token(site, logits.columns)?, factor]);
    let gradient = row_launch("loss_gradient", logits, arguments)?;

    let loss = row_statistic(site.output(1)?, 1)?;
    let step_loss = MatrixOperand::contiguous(MemorySpace::Loss, 0, (1, 2), DType::F32);
    let arguments = vec![
        maximum.read(),
        packed.read(),
        targets.read(),
        loss.write(),
        step_loss.update(),
        Argument::U32(to_u32(rows)?),
        factor,
    ];
    let total = Launch::new(KernelFamily::Loss, "loss_total", arguments).one_block();
    Ok(Launches { launches: vec![gradient, total], scratch_bytes: 0 })
}

fn row_launch(
    kernel: &str,
    logits: MatrixOperand,
    arguments: Vec<Argument>,
) -> LaunchResult<Launch> {
    let format = VectorFormat::common(logits.dtype, &[logits])?;
    let launch = Launch::new(KernelFamily::Loss, format.kernel_name(kernel), arguments);
    launch.over_rows(logits.rows, logits.columns, format)
}

/// Views an operand as two f32 per row: the sum of exponentials and the logit of the target.
fn packed_statistics(operand: MatrixOperand, rows: u64) -> LaunchResult<MatrixOperand> {
    expect_dtype(DType::F32, &[&operand])?;
    expect_elements(2 * rows, &[&operand])?;
    Ok(operand.flat())
}
