//! Sums, zeros and changes of format: memory without rows.

use narrows_plan::DType;

use super::operand::MatrixOperand;
use super::shape::{AccessFormat, expect, expect_count};
use super::{Argument, InstrSite, KernelFamily, Launch, LaunchResult, Launches, MemorySpace};

fn launch(
    kernel: &str,
    operands: &[MatrixOperand],
    arguments: Vec<Argument>,
) -> LaunchResult<Launches> {
    let format = AccessFormat::of(operands[0].dtype, operands)?;
    let launch = Launch::new(KernelFamily::Elementwise, format.name(kernel), arguments);
    Ok(launch.over_all(operands[0].elements(), format.vector)?.into())
}

pub(super) fn add(site: &InstrSite) -> LaunchResult<Launches> {
    let (x, y, sum) = (site.read(0)?.flat(), site.read(1)?.flat(), site.write(0)?.flat());
    expect(x.dtype, &[&y, &sum])?;
    expect_count(x.elements(), &[&y, &sum])?;
    let arguments = vec![x.read(), y.read(), sum.write(), Argument::U64(x.elements())];
    launch("add", &[x, y, sum], arguments)
}

pub(super) fn add_into(site: &InstrSite) -> LaunchResult<Launches> {
    let (x, sum) = (site.read(0)?.flat(), site.write(0)?.flat());
    expect(x.dtype, &[&sum])?;
    expect_count(x.elements(), &[&sum])?;
    let arguments = vec![x.read(), sum.update(), Argument::U64(x.elements())];
    launch("add_into", &[x, sum], arguments)
}

pub(super) fn fill(site: &InstrSite) -> LaunchResult<Launches> {
    let to = site.write(0)?.flat();
    launch("fill", &[to], vec![to.write(), Argument::U64(to.elements())])
}

/// Which way numbers change their format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cast {
    /// Rounded to nearest, ties to even.
    F32ToBf16,
    /// Exact.
    Bf16ToF32,
}

/// A change of format of so many numbers, from and to a byte of the arena. No program has such an
/// instruction: the optimizer rounds weights as it makes them, and those that are set come rounded.
///
/// # Errors
/// Too many numbers for a grid.
pub fn cast(cast: Cast, elements: u64, from: u64, to: u64) -> Result<Launch, String> {
    let (name, formats) = match cast {
        Cast::F32ToBf16 => ("cast_f32_to_bf16", (DType::F32, DType::Bf16)),
        Cast::Bf16ToF32 => ("cast_bf16_to_f32", (DType::Bf16, DType::F32)),
    };
    let operand =
        |begin, dtype| MatrixOperand::contiguous(MemorySpace::Arena, begin, (1, elements), dtype);
    let (from, to) = (operand(from, formats.0), operand(to, formats.1));
    let vector = if from.aligned(8) && to.aligned(8) { 8 } else { 1 };
    let arguments = vec![from.read(), to.write(), Argument::U64(elements)];
    Launch::new(KernelFamily::Elementwise, format!("{name}_v{vector}"), arguments)
        .over_all(elements, vector)
}
