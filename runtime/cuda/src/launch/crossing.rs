//! Latent crossings: LayerNorm with an activation, and the tensor gate. All parameters of an op are one row.

use narrows_plan::DType;
use narrows_plan::model::Activation;

use super::grid::{PartialSumGrid, VectorFormat, shared_bytes};
use super::operand::{
    Argument, LaunchResult, MatrixOperand, expect_dtype, expect_elements, expect_shape, flag,
    row_and_column_counts, to_u32,
};
use super::site::{InstrSite, Launch, Launches};
use crate::kernel_source::KernelFamily;

/// Tokens that a block of the tensor gate processes at a time.
const TOKENS_PER_BLOCK: u64 = 4;

/// γ and β, which are adjacent.
fn scale_and_bias(weight: MatrixOperand, width: u64) -> LaunchResult<[MatrixOperand; 2]> {
    expect_elements(2 * width, &[&weight])?;
    Ok([weight.column_range(0, width)?, weight.column_range(width, width)?])
}

fn norm_constants(site: &InstrSite, phi: Activation) -> [Argument; 2] {
    let epsilon = site.device.constants.latent_norm_epsilon as f32;
    [Argument::F32(epsilon), flag(phi == Activation::Silu)]
}

pub(super) fn layer_norm(site: &InstrSite, phi: Activation) -> LaunchResult<Launches> {
    let (v, weight, z) = (site.input(0)?, site.input(1)?.flat(), site.output(0)?);
    expect_dtype(v.dtype, &[&weight, &z])?;
    expect_shape((v.rows, v.columns), &[&z])?;
    let [scale, bias] = scale_and_bias(weight, v.columns)?;
    let mut arguments = vec![v.read(), weight.read(), z.write()];
    arguments.extend(row_and_column_counts(&v)?);
    arguments.extend(norm_constants(site, phi));
    let format = VectorFormat::common(v.dtype, &[v, z, scale, bias])?;
    let launch = Launch::new(KernelFamily::Crossing, format.kernel_name("latent_norm"), arguments);
    Ok(launch.over_rows(v.rows, v.columns, format)?.into())
}

pub(super) fn layer_norm_backward(site: &InstrSite, phi: Activation) -> LaunchResult<Launches> {
    if site.scheduled.instr.reads.len() > 4 {
        return Err("adds to a gradient that nothing else contributes to".to_string());
    }
    let (dz, v, weight) = (site.input(0)?, site.input(1)?, site.input(2)?.flat());
    let (dv, dweight) = (site.output(0)?, site.output(1)?);
    expect_dtype(v.dtype, &[&dz, &weight, &dv])?;
    expect_shape((v.rows, v.columns), &[&dz, &dv])?;
    let [scale, bias] = scale_and_bias(weight, v.columns)?;
    let parts = PartialSumGrid::over_rows(site.device, v.rows, 2 * v.columns);
    let mut arguments =
        vec![dz.read(), v.read(), weight.read(), dv.write(), parts.scratch().write()];
    arguments.extend(row_and_column_counts(&v)?);
    arguments.extend(norm_constants(site, phi));
    let format = VectorFormat::common(v.dtype, &[dz, v, dv, scale, bias])?;
    let launch =
        Launch::new(KernelFamily::Crossing, format.kernel_name("latent_norm_backward"), arguments)
            .shared(shared_bytes(2 * v.columns)?);
    parts.then_reduce(parts.one_block_per_part(launch, v.columns, format)?, dweight)
}

/// The number of tokens, a and b as arguments, and the number of elements of U and V together.
fn gate_sizes(
    h: &MatrixOperand,
    weight: &MatrixOperand,
    (a, b): (u64, u64),
) -> LaunchResult<(Vec<Argument>, u64)> {
    let parameters = a * a + b * b;
    expect_dtype(h.dtype, &[weight])?;
    expect_shape((h.rows, a * b), &[h])?;
    expect_elements(parameters, &[weight])?;
    let sizes = [h.rows, a, b].map(to_u32);
    Ok((
        sizes.into_iter().map(|size| size.map(Argument::U32)).collect::<LaunchResult<_>>()?,
        parameters,
    ))
}

fn scalar_kernel(name: &str, dtype: DType) -> String {
    format!("{name}_{}_v1", dtype.name())
}

pub(super) fn tensor_gate(site: &InstrSite, (a, b): (u64, u64)) -> LaunchResult<Launches> {
    let (h, weight, g) = (site.input(0)?, site.input(1)?.flat(), site.output(0)?);
    let (sizes, parameters) = gate_sizes(&h, &weight, (a, b))?;
    expect_dtype(h.dtype, &[&g])?;
    expect_shape((h.rows, h.columns), &[&g])?;
    let mut arguments = vec![h.read(), weight.read(), g.write()];
    arguments.extend(sizes);
    let blocks = PartialSumGrid::over_rows(site.device, h.rows, parameters).parts;
    let launch =
        Launch::new(KernelFamily::Crossing, scalar_kernel("tensor_gate", h.dtype), arguments)
            .shared(shared_bytes(2 * TOKENS_PER_BLOCK * a * b + parameters)?)
            .one_block()
            .grid([to_u32(blocks)?, 1, 1]);
    Ok(launch.into())
}

pub(super) fn tensor_gate_backward(site: &InstrSite, (a, b): (u64, u64)) -> LaunchResult<Launches> {
    let (dg, h, weight) = (site.input(0)?, site.input(1)?, site.input(2)?.flat());
    let (dh, dweight) = (site.output(0)?, site.output(1)?);
    let accumulate = site.scheduled.instr.reads.len() > 4;
    let (sizes, parameters) = gate_sizes(&h, &weight, (a, b))?;
    expect_dtype(h.dtype, &[&dg, &dh])?;
    expect_shape((h.rows, h.columns), &[&dg, &dh])?;
    let parts = PartialSumGrid::over_rows(site.device, h.rows, parameters);
    let mut arguments = vec![
        dg.read(),
        h.read(),
        weight.read(),
        dh.write_or_update(accumulate),
        parts.scratch().write(),
    ];
    arguments.extend(sizes);
    arguments.push(flag(accumulate));
    let name = scalar_kernel("tensor_gate_backward", h.dtype);
    let launch = Launch::new(KernelFamily::Crossing, name, arguments)
        .shared(shared_bytes(3 * TOKENS_PER_BLOCK * a * b + 2 * parameters)?)
        .one_block()
        .grid([to_u32(parts.parts)?, 1, 1]);
    parts.then_reduce(launch, dweight)
}
