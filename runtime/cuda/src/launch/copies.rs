//! The copies around a reshard: `Pack`, `Unpack`, `Slice`; and the rotary embedding, which must know
//! as well which tokens a device's rows are.

use narrows_plan::Dim;
use narrows_plan::program::Access;

use super::operand::{MatrixOperand, small};
use super::shape::{AccessFormat, expect, expect_count};
use super::{Argument, InstrSite, KernelFamily, Launch, LaunchResult, Launches, MemorySpace};

/// The most tensors side by side that a kernel takes.
const SECTIONS: usize = 8;
/// Numbers of a share that one block copies.
const CHUNK: u64 = 8192;

/// Which tokens of the microbatch a device's rows are.
struct TokenRows {
    sequences: u64,
    positions: u64,
    first_position: u64,
}

impl InstrSite<'_> {
    fn tokens(&self, rows: u64) -> TokenRows {
        let context = self.device.context;
        let work = &context.workload;
        let (sequences, positions) = (work.micro_batch, work.sequence_length);
        let whole = TokenRows { sequences, positions, first_position: 0 };
        if rows == context.tokens() {
            return whole;
        }
        let devices = context.tensor_size();
        match context.token_dim() {
            Some(Dim::Position) => {
                let positions = positions / devices;
                TokenRows { positions, first_position: positions * self.device.tensor, ..whole }
            }
            _ => TokenRows { sequences: sequences / devices, ..whole },
        }
    }

    /// The widths of what lies side by side in an operand on this device.
    fn sections(&self, access: &Access) -> LaunchResult<Vec<u64>> {
        let buffer = self.device.stage.buffer(access.buffer);
        let columns = access.extent.columns;
        let whole: u64 = buffer.sections.iter().sum();
        match buffer.sections.len() {
            0 => Ok(vec![columns]),
            count if count > SECTIONS => {
                Err(format!("{count} tensors side by side: a kernel takes {SECTIONS}"))
            }
            _ => Ok(buffer.sections.iter().map(|width| width * columns / whole).collect()),
        }
    }
}

/// Which copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyKind {
    Pack,
    Unpack,
    Slice,
}

/// The form is that of the value that is cut, or put together: rows of which each part has an equal
/// share of every section.
pub(super) fn copy(site: &InstrSite, dim: Dim, way: CopyKind) -> LaunchResult<Launches> {
    let (from, to) = (site.read(0)?, site.write(0)?);
    let instr = site.moment.instr;
    let (whole, access) = match way {
        CopyKind::Pack | CopyKind::Slice => (from, &instr.reads[0]),
        CopyKind::Unpack => (to, &instr.writes[0]),
    };
    let parts = site.device.context.tensor_size();
    let copied = if way == CopyKind::Slice { 1 } else { parts };
    expect(whole.dtype, &[&from, &to])?;
    expect_count(
        whole.elements() / parts * copied,
        &[if way == CopyKind::Unpack { &from } else { &to }],
    )?;

    let tokens = site.tokens(whole.rows);
    let rows = match dim {
        Dim::Sequence => 1,
        Dim::Position => tokens.sequences,
        Dim::Feature => tokens.sequences * tokens.positions,
    };
    let whole_row = whole.elements() / rows.max(1);
    let sections = match dim {
        Dim::Feature => site.sections(access)?,
        _ => vec![whole_row],
    };
    let divides = match dim {
        Dim::Sequence => tokens.sequences.is_multiple_of(parts),
        Dim::Position => tokens.positions.is_multiple_of(parts),
        Dim::Feature => sections.iter().all(|width| width.is_multiple_of(parts)),
    };
    if !divides || sections.iter().sum::<u64>() != whole_row {
        return Err(format!("{parts} equal parts of rows of {sections:?} of {whole_row}"));
    }
    let shares: Vec<u64> = sections.iter().map(|width| width / parts).collect();
    let longest = shares.iter().copied().max().unwrap_or(0);
    let (part_row, part_elements) = (whole_row / parts, whole.elements() / parts);

    let mut format = AccessFormat::of(whole.dtype, &[from.flat(), to.flat()])?;
    let steps = shares.iter().copied().chain([whole_row, part_row, part_elements]);
    format.narrow_unless(steps.into_iter().all(|step| step.is_multiple_of(format.vector)));
    let chunks = small(longest.div_ceil(CHUNK).max(1))?;
    if chunks > 65_535 || copied > 65_535 {
        return Err(format!("{copied} parts of {longest} numbers exceed a grid"));
    }
    let mut arguments = vec![from.flat().read(), to.flat().write()];
    for section in 0..SECTIONS {
        arguments.push(Argument::U32(small(shares.get(section).copied().unwrap_or(0))?));
    }
    let first = if way == CopyKind::Slice { site.device.tensor } else { 0 };
    for size in [rows, parts, first, CHUNK] {
        arguments.push(Argument::U32(small(size)?));
    }
    arguments.extend([whole_row, part_row, part_elements].map(Argument::U64));
    let kernel = if way == CopyKind::Unpack { "unpack" } else { "pack" };
    let launch = Launch::new(KernelFamily::Layout, format.name(kernel), arguments).over_rows(
        rows,
        longest.min(CHUNK),
        format,
    )?;
    let [blocks, ..] = launch.grid;
    Ok(launch.grid([blocks, small(copied)?, chunks]).into())
}

/// The rotated features are the first of each row of their buffer.
pub(super) fn rope(site: &InstrSite, head_dim: u64, sign: f32) -> LaunchResult<Launches> {
    let access = site.moment.instr.writes.first().ok_or("it writes nothing")?;
    let buffer = site.device.stage.buffer(access.buffer).extent;
    let x = MatrixOperand { stride: buffer.columns, ..site.write(0)? };
    let heads = head_dim > 0 && head_dim.is_multiple_of(2) && x.columns.is_multiple_of(head_dim);
    if !heads || x.columns > x.stride {
        return Err(format!("{} features of {} are no heads of {head_dim}", x.columns, x.stride));
    }
    let tokens = site.tokens(x.rows);
    let positions = site.device.context.workload.sequence_length;
    let table = MatrixOperand::contiguous(
        MemorySpace::Rotary,
        0,
        (positions, head_dim),
        narrows_plan::DType::F32,
    );
    let mut format = AccessFormat::of(x.dtype, &[x])?;
    format.narrow_unless((head_dim / 2).is_multiple_of(format.vector));
    let mut arguments = vec![x.update(), table.read()];
    let sizes = [x.rows, x.columns, x.stride, head_dim, tokens.first_position, tokens.positions];
    for size in sizes {
        arguments.push(Argument::U32(small(size)?));
    }
    arguments.push(Argument::F32(sign));
    let launch = Launch::new(KernelFamily::Rotary, format.name("rope"), arguments);
    Ok(launch.over_rows(x.rows, x.columns / 2, format)?.into())
}

/// What the rotary kernels read: for every position of a sequence, the cosines of a head's pairs,
/// then their sines. Computed in f64 and rounded once.
pub fn rotary_table(positions: u64, head_dim: u64, theta: f64) -> Vec<f32> {
    let pairs = head_dim / 2;
    let turn = |position: u64, pair: u64| {
        position as f64 * theta.powf(-2.0 * pair as f64 / head_dim as f64)
    };
    let row = |position: u64| {
        let cosines = (0..pairs).map(move |pair| turn(position, pair).cos() as f32);
        cosines.chain((0..pairs).map(move |pair| turn(position, pair).sin() as f32))
    };
    (0..positions).flat_map(row).collect()
}
