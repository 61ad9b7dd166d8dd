//! The embedding and the loss.

use narrows_plan::DType;
use narrows_plan::program::FusedOp;

use super::norm::{shape, statistic};
use super::operand::{MatrixOperand, small};
use super::shape::{AccessFormat, expect, expect_count, expect_shape};
use super::{Argument, InstrSite, KernelFamily, Launch, LaunchResult, Launches, MemorySpace};

/// The first token id of this device's part of a vocabulary.
fn first(site: &InstrSite, held: u64) -> LaunchResult<Argument> {
    let part = held < site.device.constants.vocab;
    Ok(Argument::U32(small(if part { site.device.tensor * held } else { 0 })?))
}

/// One token id a row.
fn ids(of: MatrixOperand, rows: u64) -> LaunchResult<MatrixOperand> {
    expect(DType::U32, &[&of])?;
    expect_count(rows, &[&of])?;
    Ok(of.flat())
}

pub(super) fn gather(site: &InstrSite) -> LaunchResult<Launches> {
    let (table, out) = (site.read(1)?, site.write(0)?);
    let tokens = ids(site.read(0)?, out.rows)?;
    expect(table.dtype, &[&out])?;
    expect_shape((out.rows, table.columns), &[&out])?;
    let mut arguments = vec![tokens.read(), table.read(), out.write()];
    arguments.extend(shape(&out)?);
    arguments.extend([first(site, table.rows)?, Argument::U32(small(table.rows)?)]);
    let format = AccessFormat::of(table.dtype, &[table, out])?;
    let launch = Launch::new(KernelFamily::Embedding, format.name("gather"), arguments);
    Ok(launch.over_rows(out.rows, out.columns, format)?.into())
}

/// First the tokens are sorted, then one row of blocks sums the gradients of each that occurs.
pub(super) fn scatter_add(site: &InstrSite) -> LaunchResult<Launches> {
    let (dy, table) = (site.read(2)?, site.write(0)?);
    let tokens = ids(site.read(0)?, dy.rows)?;
    expect(DType::F32, &[&table])?;
    expect_shape((table.rows, dy.columns), &[&table])?;
    let count = small(dy.rows)?;
    let sorted = |at: u64| {
        MatrixOperand::contiguous(MemorySpace::Scratch, at * 4 * dy.rows, (1, dy.rows), DType::U32)
    };
    let (order, runs) = (sorted(0), sorted(1));
    let sort = Launch::new(
        KernelFamily::Embedding,
        "scatter_order",
        vec![tokens.read(), order.write(), runs.write(), Argument::U32(count)],
    )
    .grid([small(dy.rows.div_ceil(64))?, 1, 1])
    .block([64, 1, 1]);

    let format = AccessFormat::of(dy.dtype, &[dy, table])?;
    let mut arguments = vec![tokens.read(), order.read(), runs.read(), dy.read(), table.update()];
    arguments.extend([
        Argument::U32(small(dy.columns)?),
        first(site, table.rows)?,
        Argument::U32(small(table.rows)?),
    ]);
    let add = Launch::new(KernelFamily::Embedding, format.name("scatter_add"), arguments)
        .over_columns(dy.rows, dy.columns, format)?;
    Ok(Launches { launches: vec![sort, add], scratch_bytes: 8 * dy.rows })
}

pub(super) fn loss(site: &InstrSite) -> LaunchResult<Launches> {
    let logits = site.read(0)?;
    let rows = logits.rows;
    let format = AccessFormat::of(logits.dtype, &[logits])?;
    let pass = |arguments| {
        Launch::new(KernelFamily::Loss, format.name(site.op.describe().0), arguments).over_rows(
            rows,
            logits.columns,
            format,
        )
    };
    if site.op == FusedOp::LossMaximum {
        let mut arguments = vec![logits.read(), statistic(site.write(0)?, rows)?.write()];
        arguments.extend(shape(&logits)?);
        return Ok(pass(arguments)?.into());
    }
    let maximum = statistic(site.read(1)?, rows)?;
    if site.op == FusedOp::LossSum {
        let targets = ids(site.read(2)?, rows)?;
        let packed = packed(site.write(0)?, rows)?;
        let mut arguments = vec![logits.read(), maximum.read(), targets.read(), packed.write()];
        arguments.extend(shape(&logits)?);
        arguments.push(first(site, logits.columns)?);
        return Ok(pass(arguments)?.into());
    }
    let (packed, targets) = (packed(site.read(2)?, rows)?, ids(site.read(3)?, rows)?);
    if site.write(0)? != logits {
        return Err("its gradient is not in place of the logits".to_string());
    }
    let work = &site.device.context.workload;
    let factor = 1.0 / (work.global_batch * work.sequence_length) as f64;
    let factor = Argument::F32(factor as f32);
    let mut arguments = vec![logits.update(), maximum.read(), packed.read(), targets.read()];
    arguments.extend(shape(&logits)?);
    arguments.extend([first(site, logits.columns)?, factor]);

    let loss = statistic(site.write(1)?, 1)?;
    let step = MatrixOperand::contiguous(MemorySpace::Loss, 0, (1, 2), DType::F32);
    let sums = vec![
        maximum.read(),
        packed.read(),
        loss.write(),
        step.update(),
        Argument::U32(small(rows)?),
        factor,
    ];
    let total = Launch::new(KernelFamily::Loss, "loss_total", sums).one_block();
    Ok(Launches { launches: vec![pass(arguments)?, total], scratch_bytes: 0 })
}

/// Two f32 numbers a row.
fn packed(of: MatrixOperand, rows: u64) -> LaunchResult<MatrixOperand> {
    expect(DType::F32, &[&of])?;
    expect_count(2 * rows, &[&of])?;
    Ok(of.flat())
}
