//! Packing, unpacking and slicing around reshards.

use narrows_plan::program::Access;
use narrows_plan::{Axis, Dim};

use super::grid::VectorFormat;
use super::operand::{Argument, LaunchResult, expect_dtype, expect_elements, to_u32};
use super::site::{InstrSite, Launch, Launches};
use crate::kernel_source::KernelFamily;

/// Maximum number of sections that the kernel takes.
const SECTIONS_MAX: usize = 8;
/// Elements of a share that one block copies.
const CHUNK_ELEMENTS: u64 = 8192;

/// Direction of a copy between a whole tensor and its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyKind {
    /// From the whole tensor to all parts, one after the other.
    Pack,
    /// From all parts to the whole tensor.
    Unpack,
    /// From the whole tensor to this device's part.
    Slice,
}

/// Widths of the sections side by side in an operand on this device.
fn section_widths(site: &InstrSite, access: &Access) -> LaunchResult<Vec<u64>> {
    let buffer = site.device.stage.buffer(access.buffer);
    let columns = access.extent.columns;
    let whole: u64 = buffer.sections.iter().sum();
    match buffer.sections.len() {
        0 => Ok(vec![columns]),
        count if count > SECTIONS_MAX => {
            Err(format!("{count} tensors side by side: a kernel takes {SECTIONS_MAX}"))
        }
        _ => Ok(buffer.sections.iter().map(|width| width * columns / whole).collect()),
    }
}

/// A copy between a whole tensor and its parts along `dim`. The whole is seen as rows, in which each part has
/// an equal share of every section.
pub(super) fn copy(
    site: &InstrSite,
    (dim, axis): (Dim, Axis),
    kind: CopyKind,
) -> LaunchResult<Launches> {
    let (from, to) = (site.input(0)?, site.output(0)?);
    let instr = site.scheduled.instr;
    let (whole, access) = match kind {
        CopyKind::Pack | CopyKind::Slice => (from, &instr.reads[0]),
        CopyKind::Unpack => (to, &instr.writes[0]),
    };
    let parts = site.device.context.axis_size(axis);
    let copied = if kind == CopyKind::Slice { 1 } else { parts };
    expect_dtype(whole.dtype, &[&from, &to])?;
    expect_elements(
        whole.elements() / parts * copied,
        &[if kind == CopyKind::Unpack { &from } else { &to }],
    )?;

    let tokens = site.token_rows(whole.rows);
    let [sequences, positions] = [tokens.sequences, tokens.positions.count].map(|size| size as u64);
    let rows = match dim {
        Dim::Sequence => 1,
        Dim::Position => sequences,
        Dim::Feature => sequences * positions,
    };
    let whole_row = whole.elements() / rows.max(1);
    // In zigzag order, a part has a chunk of positions from either end.
    let is_zigzag =
        dim == Dim::Position && axis == Axis::Context && site.device.context.has_zigzag_positions();
    let sections = match dim {
        Dim::Feature => section_widths(site, access)?,
        _ if is_zigzag => vec![whole_row / 2; 2],
        _ => vec![whole_row],
    };
    let divides = match dim {
        Dim::Sequence => sequences.is_multiple_of(parts),
        Dim::Position => positions.is_multiple_of(if is_zigzag { 2 * parts } else { parts }),
        Dim::Feature => sections.iter().all(|width| width.is_multiple_of(parts)),
    };
    if !divides || sections.iter().sum::<u64>() != whole_row {
        return Err(format!(
            "rows of {whole_row} elements with sections of {sections:?} do not divide into {parts} equal parts"
        ));
    }
    let shares: Vec<u64> = sections.iter().map(|width| width / parts).collect();
    let longest = shares.iter().copied().max().unwrap_or(0);
    let (part_row, part_elements) = (whole_row / parts, whole.elements() / parts);

    let mut format = VectorFormat::common(whole.dtype, &[from.flat(), to.flat()])?;
    let steps = shares.iter().copied().chain([whole_row, part_row, part_elements]);
    format.require(steps.into_iter().all(|step| step.is_multiple_of(format.vector)));
    let chunks = to_u32(longest.div_ceil(CHUNK_ELEMENTS).max(1))?;
    if chunks > 65_535 || copied > 65_535 {
        return Err(format!("{copied} parts of {longest} elements exceed a grid"));
    }
    let mut arguments = vec![from.flat().read(), to.flat().write()];
    for section in 0..SECTIONS_MAX {
        arguments.push(Argument::U32(to_u32(shares.get(section).copied().unwrap_or(0))?));
    }
    let first = if kind == CopyKind::Slice { site.device.coordinates.tensor } else { 0 };
    for size in [rows, parts, first, u64::from(is_zigzag), CHUNK_ELEMENTS] {
        arguments.push(Argument::U32(to_u32(size)?));
    }
    arguments.extend([whole_row, part_row, part_elements].map(Argument::U64));
    let kernel = if kind == CopyKind::Unpack { "unpack" } else { "pack" };
    let launch = Launch::new(KernelFamily::Layout, format.kernel_name(kernel), arguments)
        .over_rows(rows, longest.min(CHUNK_ELEMENTS), format)?;
    let [blocks, ..] = launch.grid;
    Ok(launch.grid([blocks, to_u32(copied)?, chunks]).into())
}
