//! Element-wise sums, casts and fills of flat arrays.

use narrows_plan::DType;

use super::grid::VectorFormat;
use super::operand::{Argument, LaunchResult, expect_dtype, expect_elements};
use super::site::{InstrSite, Launch, Launches};
use crate::kernel_source::KernelFamily;

/// Launches a kernel whose last argument is the number of elements.
fn launch(
    kernel: &str,
    format: VectorFormat,
    elements: u64,
    mut arguments: Vec<Argument>,
) -> LaunchResult<Launches> {
    arguments.push(Argument::U64(elements));
    let launch = Launch::new(KernelFamily::Elementwise, format.kernel_name(kernel), arguments);
    Ok(launch.over_elements(elements, format.vector)?.into())
}

pub(super) fn add(site: &InstrSite) -> LaunchResult<Launches> {
    let (x, y, sum) = (site.input(0)?.flat(), site.input(1)?.flat(), site.output(0)?.flat());
    expect_dtype(x.dtype, &[&y, &sum])?;
    expect_elements(x.elements(), &[&y, &sum])?;
    let (elements, arguments) = (x.elements(), vec![x.read(), y.read(), sum.write()]);
    launch("add", VectorFormat::common(x.dtype, &[x, y, sum])?, elements, arguments)
}

pub(super) fn add_into(site: &InstrSite) -> LaunchResult<Launches> {
    let (x, sum) = (site.input(0)?.flat(), site.output(0)?.flat());
    expect_elements(x.elements(), &[&sum])?;
    let (elements, arguments) = (x.elements(), vec![x.read(), sum.update()]);
    if (x.dtype, sum.dtype) == (DType::Bf16, DType::F32) {
        let format = VectorFormat::common_quads(sum.dtype, &[sum, x])?;
        return launch("add_bf16_into", format, elements, arguments);
    }
    expect_dtype(x.dtype, &[&sum])?;
    launch("add_into", VectorFormat::common(x.dtype, &[x, sum])?, elements, arguments)
}

pub(super) fn cast(site: &InstrSite) -> LaunchResult<Launches> {
    let (from, to) = (site.input(0)?.flat(), site.output(0)?.flat());
    expect_elements(from.elements(), &[&to])?;
    if !matches!((from.dtype, to.dtype), (DType::F32, DType::Bf16) | (DType::Bf16, DType::F32)) {
        return Err(format!("it casts {} to {}", from.dtype.name(), to.dtype.name()));
    }
    let (elements, arguments) = (from.elements(), vec![from.read(), to.write()]);
    launch("cast_to", VectorFormat::common_quads(to.dtype, &[to, from])?, elements, arguments)
}

pub(super) fn fill(site: &InstrSite) -> LaunchResult<Launches> {
    let to = site.output(0)?.flat();
    launch("fill", VectorFormat::common(to.dtype, &[to])?, to.elements(), vec![to.write()])
}
