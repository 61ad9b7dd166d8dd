//! RMSNorm in its variants. ε and the full width are those of the model; a device may hold a shard of the
//! features.

use narrows_plan::program::FusedOp;

use super::grid::{PartialSumGrid, VectorFormat, shared_bytes};
use super::operand::{
    Argument, LaunchResult, MatrixOperand, expect_dtype, expect_elements, expect_shape, flag,
    row_and_column_counts, row_statistic,
};
use super::site::{InstrSite, Launch, Launches};
use crate::kernel_source::KernelFamily;

/// The full width of a row and ε, as arguments.
pub(super) fn rms_constants(site: &InstrSite) -> [Argument; 2] {
    let constants = site.device.constants;
    [Argument::F32(constants.hidden as f32), Argument::F32(constants.norm_epsilon as f32)]
}

fn kernel(site: &InstrSite) -> LaunchResult<&'static str> {
    Ok(match site.op {
        FusedOp::NormForward => "norm",
        FusedOp::NormStatistic => "norm_statistic",
        FusedOp::NormApply => "norm_apply",
        FusedOp::NormOnline => "norm_online",
        FusedOp::NormScale => "norm_scale",
        FusedOp::NormBackward => "norm_backward",
        FusedOp::NormBackwardStatistic => "norm_backward_statistic",
        FusedOp::NormBackwardApply => "norm_backward_apply",
        FusedOp::NormOnlineBackward => "norm_online_backward",
        _ => return Err("it is not a norm".into()),
    })
}

pub(super) fn forward(site: &InstrSite) -> LaunchResult<Launches> {
    let x = site.input(0)?;
    let mut arguments = vec![x.read()];
    let mut vectors = vec![x];
    if site.op != FusedOp::NormStatistic {
        let (scale, y) = (site.input(1)?.flat(), site.output(0)?);
        expect_dtype(x.dtype, &[&scale, &y])?;
        expect_elements(x.columns, &[&scale])?;
        expect_shape((x.rows, x.columns), &[&y])?;
        vectors.extend([scale, y]);
        arguments.push(scale.read());
        if site.op == FusedOp::NormApply {
            arguments.push(row_statistic(site.input(2)?, x.rows)?.read());
        }
        arguments.push(y.write());
    }
    let statistic_port = match site.op {
        FusedOp::NormStatistic => Some(0),
        FusedOp::NormForward | FusedOp::NormOnline => Some(1),
        _ => None,
    };
    if let Some(port) = statistic_port {
        arguments.push(row_statistic(site.output(port)?, x.rows)?.write());
    }
    arguments.extend(row_and_column_counts(&x)?);
    if matches!(site.op, FusedOp::NormForward | FusedOp::NormApply) {
        arguments.extend(rms_constants(site));
    }
    let format = VectorFormat::common(x.dtype, &vectors)?;
    let launch = Launch::new(KernelFamily::Norm, format.kernel_name(kernel(site)?), arguments);
    Ok(launch.over_rows(x.rows, x.columns, format)?.into())
}

/// dy, x and γ, which every backward kernel reads.
fn saved_inputs(site: &InstrSite) -> LaunchResult<[MatrixOperand; 3]> {
    let (dy, x, scale) = (site.input(0)?, site.input(1)?, site.input(2)?.flat());
    expect_dtype(x.dtype, &[&dy, &scale])?;
    expect_shape((x.rows, x.columns), &[&dy])?;
    expect_elements(x.columns, &[&scale])?;
    Ok([dy, x, scale])
}

pub(super) fn backward_statistic(site: &InstrSite) -> LaunchResult<Launches> {
    let saved = saved_inputs(site)?;
    let x = saved[1];
    let mut arguments = saved.map(|operand| operand.read()).to_vec();
    arguments.push(row_statistic(site.output(0)?, x.rows)?.write());
    arguments.extend(row_and_column_counts(&x)?);
    let format = VectorFormat::common(x.dtype, &saved)?;
    let launch = Launch::new(KernelFamily::Norm, format.kernel_name(kernel(site)?), arguments);
    Ok(launch.over_rows(x.rows, x.columns, format)?.into())
}

/// Inputs: dy, x and γ, then one or two statistics per row, then the gradients that are accumulated into.
pub(super) fn backward(site: &InstrSite) -> LaunchResult<Launches> {
    let saved = saved_inputs(site)?;
    let x = saved[1];
    let statistics = if site.op == FusedOp::NormBackwardApply { 2 } else { 1 };
    let accumulate = site.scheduled.instr.reads.len() > 3 + statistics + 1;
    let (dx, dscale) = (site.output(0)?, site.output(1)?);
    expect_dtype(x.dtype, &[&dx])?;
    expect_shape((x.rows, x.columns), &[&dx])?;

    let mut arguments = saved.map(|operand| operand.read()).to_vec();
    for port in 3..3 + statistics {
        arguments.push(row_statistic(site.input(port)?, x.rows)?.read());
    }
    let parts = PartialSumGrid::over_rows(site.device, x.rows, x.columns);
    arguments.extend([dx.write_or_update(accumulate), parts.scratch().write()]);
    arguments.extend(row_and_column_counts(&x)?);
    if site.op != FusedOp::NormOnlineBackward {
        arguments.extend(rms_constants(site));
    }
    arguments.push(flag(accumulate));

    let [dy, _, scale] = saved;
    let format = VectorFormat::common(x.dtype, &[dy, x, scale, dx])?;
    let launch = Launch::new(KernelFamily::Norm, format.kernel_name(kernel(site)?), arguments)
        .shared(shared_bytes(x.columns)?);
    parts.then_reduce(parts.one_block_per_part(launch, x.columns, format)?, dscale)
}
