//! What a latent that crosses between blocks passes through. All parameters of an op are one row.

use narrows_plan::DType;
use narrows_plan::model::Activation;

use super::norm::shape;
use super::operand::{MatrixOperand, small};
use super::shape::{AccessFormat, SplitSum, expect, expect_count, expect_shape, shared_bytes};
use super::{Argument, InstrSite, KernelFamily, Launch, LaunchResult, Launches};

/// ε of the LayerNorm over a crossed latent: PyTorch's default, with which LaX is published.
const EPSILON: f32 = 1e-5;

/// Tokens that a block of the tensor gate takes at a time.
const TOKENS: u64 = 4;

/// γ and β, which lie one after the other.
fn halves(weight: MatrixOperand, width: u64) -> LaunchResult<[MatrixOperand; 2]> {
    expect_count(2 * width, &[&weight])?;
    Ok([weight.column_range(0, width)?, weight.column_range(width, width)?])
}

fn numbers(phi: Activation) -> [Argument; 2] {
    [Argument::F32(EPSILON), Argument::U32(u32::from(phi == Activation::Silu))]
}

pub(super) fn norm(site: &InstrSite, phi: Activation) -> LaunchResult<Launches> {
    let (v, weight, z) = (site.read(0)?, site.read(1)?.flat(), site.write(0)?);
    expect(v.dtype, &[&weight, &z])?;
    expect_shape((v.rows, v.columns), &[&z])?;
    let [scale, bias] = halves(weight, v.columns)?;
    let mut arguments = vec![v.read(), weight.read(), z.write()];
    arguments.extend(shape(&v)?);
    arguments.extend(numbers(phi));
    let format = AccessFormat::of(v.dtype, &[v, z, scale, bias])?;
    let launch = Launch::new(KernelFamily::Crossing, format.name("latent_norm"), arguments);
    Ok(launch.over_rows(v.rows, v.columns, format)?.into())
}

pub(super) fn norm_backward(site: &InstrSite, phi: Activation) -> LaunchResult<Launches> {
    if site.moment.instr.reads.len() > 4 {
        return Err("adds to a gradient that nothing else contributes to".to_string());
    }
    let (dz, v, weight) = (site.read(0)?, site.read(1)?, site.read(2)?.flat());
    let (dv, dweight) = (site.write(0)?, site.write(1)?);
    expect(v.dtype, &[&dz, &weight, &dv])?;
    expect_shape((v.rows, v.columns), &[&dz, &dv])?;
    let [scale, bias] = halves(weight, v.columns)?;
    let parts = SplitSum::of(v.rows, 2 * v.columns);
    let mut arguments =
        vec![dz.read(), v.read(), weight.read(), dv.write(), parts.scratch().write()];
    arguments.extend(shape(&v)?);
    arguments.extend(numbers(phi));
    let format = AccessFormat::of(v.dtype, &[dz, v, dv, scale, bias])?;
    let launch =
        Launch::new(KernelFamily::Crossing, format.name("latent_norm_backward"), arguments)
            .shared(shared_bytes(2 * v.columns)?);
    parts.then_add(parts.over_parts(launch, v.columns, format)?, dweight)
}

/// Tokens, a and b as kernels take them, and what U and V have together.
fn gate(
    h: &MatrixOperand,
    weight: &MatrixOperand,
    (a, b): (u64, u64),
) -> LaunchResult<(Vec<Argument>, u64)> {
    let parameters = a * a + b * b;
    expect(h.dtype, &[weight])?;
    expect_shape((h.rows, a * b), &[h])?;
    expect_count(parameters, &[weight])?;
    let sizes = [h.rows, a, b].map(small);
    Ok((
        sizes.into_iter().map(|size| size.map(Argument::U32)).collect::<LaunchResult<_>>()?,
        parameters,
    ))
}

fn kernel(name: &str, dtype: DType) -> String {
    format!("{name}_{}_v1", dtype.name())
}

pub(super) fn tensor_gate(site: &InstrSite, (a, b): (u64, u64)) -> LaunchResult<Launches> {
    let (h, weight, g) = (site.read(0)?, site.read(1)?.flat(), site.write(0)?);
    let (sizes, parameters) = gate(&h, &weight, (a, b))?;
    expect(h.dtype, &[&g])?;
    expect_shape((h.rows, h.columns), &[&g])?;
    let mut arguments = vec![h.read(), weight.read(), g.write()];
    arguments.extend(sizes);
    let blocks = SplitSum::of(h.rows, parameters).count;
    let launch = Launch::new(KernelFamily::Crossing, kernel("tensor_gate", h.dtype), arguments)
        .shared(shared_bytes(2 * TOKENS * a * b + parameters)?)
        .one_block()
        .grid([small(blocks)?, 1, 1]);
    Ok(launch.into())
}

pub(super) fn tensor_gate_backward(site: &InstrSite, (a, b): (u64, u64)) -> LaunchResult<Launches> {
    let (dg, h, weight) = (site.read(0)?, site.read(1)?, site.read(2)?.flat());
    let (dh, dweight) = (site.write(0)?, site.write(1)?);
    let add = site.moment.instr.reads.len() > 4;
    let (sizes, parameters) = gate(&h, &weight, (a, b))?;
    expect(h.dtype, &[&dg, &dh])?;
    expect_shape((h.rows, h.columns), &[&dg, &dh])?;
    let parts = SplitSum::of(h.rows, parameters);
    let mut arguments =
        vec![dg.read(), h.read(), weight.read(), dh.made(add), parts.scratch().write()];
    arguments.extend(sizes);
    arguments.push(Argument::U32(u32::from(add)));
    let name = kernel("tensor_gate_backward", h.dtype);
    let launch = Launch::new(KernelFamily::Crossing, name, arguments)
        .shared(shared_bytes(3 * TOKENS * a * b + 2 * parameters)?)
        .one_block()
        .grid([small(parts.count)?, 1, 1]);
    parts.then_add(launch, dweight)
}
