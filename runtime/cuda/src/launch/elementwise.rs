//! Element-wise sums, casts and fills of flat arrays.

use narrows_plan::DType;

use super::grid::VectorFormat;
use super::operand::{Argument, LaunchResult, MatrixOperand, expect_dtype, expect_elements};
use super::site::{InstrSite, Launch, Launches};
use crate::kernel_source::KernelFamily;

fn launch(
    kernel: &str,
    operands: &[MatrixOperand],
    arguments: Vec<Argument>,
) -> LaunchResult<Launches> {
    let format = VectorFormat::common(operands[0].dtype, operands)?;
    let launch = Launch::new(KernelFamily::Elementwise, format.kernel_name(kernel), arguments);
    Ok(launch.over_elements(operands[0].elements(), format.vector)?.into())
}

/// Launches a kernel on operands of different formats, named after that of the first.
fn launch_mixed(
    kernel: &str,
    operands: &[MatrixOperand],
    arguments: Vec<Argument>,
) -> LaunchResult<Launches> {
    let format = VectorFormat::common_quads(operands[0].dtype, operands)?;
    let launch = Launch::new(KernelFamily::Elementwise, format.kernel_name(kernel), arguments);
    Ok(launch.over_elements(operands[0].elements(), format.vector)?.into())
}

pub(super) fn add(site: &InstrSite) -> LaunchResult<Launches> {
    let (x, y, sum) = (site.input(0)?.flat(), site.input(1)?.flat(), site.output(0)?.flat());
    expect_dtype(x.dtype, &[&y, &sum])?;
    expect_elements(x.elements(), &[&y, &sum])?;
    let arguments = vec![x.read(), y.read(), sum.write(), Argument::U64(x.elements())];
    launch("add", &[x, y, sum], arguments)
}

pub(super) fn add_into(site: &InstrSite) -> LaunchResult<Launches> {
    let (x, sum) = (site.input(0)?.flat(), site.output(0)?.flat());
    expect_elements(x.elements(), &[&sum])?;
    let arguments = vec![x.read(), sum.update(), Argument::U64(x.elements())];
    if (x.dtype, sum.dtype) == (DType::Bf16, DType::F32) {
        return launch_mixed("add_bf16_into", &[sum, x], arguments);
    }
    expect_dtype(x.dtype, &[&sum])?;
    launch("add_into", &[x, sum], arguments)
}

pub(super) fn cast(site: &InstrSite) -> LaunchResult<Launches> {
    let (from, to) = (site.input(0)?.flat(), site.output(0)?.flat());
    expect_elements(from.elements(), &[&to])?;
    let arguments = vec![from.read(), to.write(), Argument::U64(from.elements())];
    match (from.dtype, to.dtype) {
        (DType::F32, DType::Bf16) | (DType::Bf16, DType::F32) => {
            launch_mixed("cast_to", &[to, from], arguments)
        }
        (from, to) => Err(format!("it casts {} to {}", from.name(), to.name())),
    }
}

pub(super) fn fill(site: &InstrSite) -> LaunchResult<Launches> {
    let to = site.output(0)?.flat();
    launch("fill", &[to], vec![to.write(), Argument::U64(to.elements())])
}
