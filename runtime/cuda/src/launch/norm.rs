//! RMSNorm in its variants. ε and the whole width are the model's; a device may hold a shard.

use narrows_plan::DType;
use narrows_plan::program::FusedOp;

use super::operand::{MatrixOperand, small};
use super::shape::{AccessFormat, SplitSum, expect, expect_count, expect_shape, shared_bytes};
use super::{Argument, InstrSite, KernelFamily, Launch, LaunchResult, Launches};

/// The whole width and ε, as kernels take them.
pub(super) fn rms(site: &InstrSite) -> [Argument; 2] {
    let constants = site.device.constants;
    [Argument::F32(constants.hidden as f32), Argument::F32(constants.norm_epsilon as f32)]
}

/// Rows and columns, as kernels take them.
pub(super) fn shape(of: &MatrixOperand) -> LaunchResult<[Argument; 2]> {
    Ok([Argument::U32(small(of.rows)?), Argument::U32(small(of.columns)?)])
}

pub(super) fn forward(site: &InstrSite) -> LaunchResult<Launches> {
    let x = site.read(0)?;
    let mut arguments = vec![x.read()];
    let mut rows = vec![x];
    if site.op != FusedOp::NormStatistic {
        let (scale, y) = (site.read(1)?.flat(), site.write(0)?);
        expect(x.dtype, &[&scale, &y])?;
        expect_count(x.columns, &[&scale])?;
        expect_shape((x.rows, x.columns), &[&y])?;
        rows.extend([scale, y]);
        arguments.push(scale.read());
        if site.op == FusedOp::NormApply {
            arguments.push(statistic(site.read(2)?, x.rows)?.read());
        }
        arguments.push(y.write());
    }
    let made = match site.op {
        FusedOp::NormStatistic => Some(0),
        FusedOp::NormForward | FusedOp::NormOnline => Some(1),
        _ => None,
    };
    if let Some(port) = made {
        arguments.push(statistic(site.write(port)?, x.rows)?.write());
    }
    arguments.extend(shape(&x)?);
    if matches!(site.op, FusedOp::NormForward | FusedOp::NormApply) {
        arguments.extend(rms(site));
    }
    let format = AccessFormat::of(x.dtype, &rows)?;
    let kernel = format.name(site.op.describe().0);
    let launch = Launch::new(KernelFamily::Norm, kernel, arguments);
    Ok(launch.over_rows(x.rows, x.columns, format)?.into())
}

/// One f32 number a row.
pub(super) fn statistic(of: MatrixOperand, rows: u64) -> LaunchResult<MatrixOperand> {
    expect(DType::F32, &[&of])?;
    expect_count(rows, &[&of])?;
    Ok(of.flat())
}

/// dy, x and γ: what every backward pass reads.
fn saved(site: &InstrSite) -> LaunchResult<[MatrixOperand; 3]> {
    let (dy, x, scale) = (site.read(0)?, site.read(1)?, site.read(2)?.flat());
    expect(x.dtype, &[&dy, &scale])?;
    expect_shape((x.rows, x.columns), &[&dy])?;
    expect_count(x.columns, &[&scale])?;
    Ok([dy, x, scale])
}

pub(super) fn backward_statistic(site: &InstrSite) -> LaunchResult<Launches> {
    let saved = saved(site)?;
    let x = saved[1];
    let mut arguments = saved.map(|operand| operand.read()).to_vec();
    arguments.push(statistic(site.write(0)?, x.rows)?.write());
    arguments.extend(shape(&x)?);
    let format = AccessFormat::of(x.dtype, &saved)?;
    let launch = Launch::new(KernelFamily::Norm, format.name(site.op.describe().0), arguments);
    Ok(launch.over_rows(x.rows, x.columns, format)?.into())
}

/// After dy, x and γ come one or two numbers a row, then the gradients that are added to.
pub(super) fn backward(site: &InstrSite) -> LaunchResult<Launches> {
    let saved = saved(site)?;
    let x = saved[1];
    let statistics = if site.op == FusedOp::NormBackwardApply { 2 } else { 1 };
    let add = site.moment.instr.reads.len() > 3 + statistics + 1;
    let (dx, dscale) = (site.write(0)?, site.write(1)?);
    expect(x.dtype, &[&dx])?;
    expect_shape((x.rows, x.columns), &[&dx])?;

    let mut arguments = saved.map(|operand| operand.read()).to_vec();
    for port in 3..3 + statistics {
        arguments.push(statistic(site.read(port)?, x.rows)?.read());
    }
    let parts = SplitSum::of(x.rows, x.columns);
    arguments.extend([dx.made(add), parts.scratch().write()]);
    arguments.extend(shape(&x)?);
    if site.op != FusedOp::NormOnlineBackward {
        arguments.extend(rms(site));
    }
    arguments.push(Argument::U32(u32::from(add)));

    let [dy, _, scale] = saved;
    let format = AccessFormat::of(x.dtype, &[dy, x, scale, dx])?;
    let launch = Launch::new(KernelFamily::Norm, format.name(site.op.describe().0), arguments)
        .shared(shared_bytes(x.columns)?);
    parts.then_add(parts.over_parts(launch, x.columns, format)?, dscale)
}
