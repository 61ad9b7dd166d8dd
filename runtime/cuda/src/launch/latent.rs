//! Activation φ of latents, with the deferred scaling of an online norm. Several latents lie side by side in
//! one operand, and each has a separate result.

use narrows_plan::model::Activation;

use super::grid::VectorFormat;
use super::norm::rms_constants;
use super::operand::{
    Argument, LaunchResult, MatrixOperand, expect_dtype, expect_shape, flag, row_and_column_counts,
    row_statistic, to_u32,
};
use super::site::{InstrSite, Launch, Launches};
use crate::kernel_source::KernelFamily;

/// Maximum number of latents that a kernel takes.
const SECTIONS_MAX: usize = 4;

/// Latents as separate operands, and as columns of one operand.
struct LatentSections {
    /// The separate operand of each latent.
    separate: Vec<MatrixOperand>,
    /// The columns of each latent in the joint operand.
    columns: Vec<MatrixOperand>,
}

impl LatentSections {
    fn new(separate: Vec<MatrixOperand>, joint: MatrixOperand) -> LaunchResult<LatentSections> {
        if separate.len() > SECTIONS_MAX {
            let count = separate.len();
            return Err(format!("{count} latents side by side: a kernel takes {SECTIONS_MAX}"));
        }
        let (mut columns, mut first) = (vec![], 0);
        for section in &separate {
            expect_dtype(joint.dtype, &[section])?;
            expect_shape((joint.rows, section.columns), &[section])?;
            columns.push(joint.column_range(first, section.columns)?);
            first += section.columns;
        }
        if first != joint.columns {
            return Err(format!(
                "latents have {first} features together, and their joint operand {}",
                joint.columns
            ));
        }
        Ok(LatentSections { separate, columns })
    }

    fn pointers(&self, argument: impl Fn(&MatrixOperand) -> Argument) -> Vec<Argument> {
        pointers(&self.separate, argument)
    }

    fn widths(&self) -> LaunchResult<Vec<Argument>> {
        let mut widths = vec![Argument::U32(0); SECTIONS_MAX];
        for (width, section) in widths.iter_mut().zip(&self.separate) {
            *width = Argument::U32(to_u32(section.columns)?);
        }
        Ok(widths)
    }

    fn widest(&self) -> u64 {
        self.separate.iter().map(|section| section.columns).max().unwrap_or(0)
    }

    fn all(&self) -> Vec<MatrixOperand> {
        [&self.separate[..], &self.columns].concat()
    }
}

/// Arguments for up to [`SECTIONS_MAX`] operands, the rest null.
fn pointers(
    operands: &[MatrixOperand],
    argument: impl Fn(&MatrixOperand) -> Argument,
) -> Vec<Argument> {
    let mut arguments = vec![Argument::Null; SECTIONS_MAX];
    arguments.iter_mut().zip(operands).for_each(|(slot, operand)| *slot = argument(operand));
    arguments
}

/// `LatentForward`; with `deferred_norm` `LatentRecover`, which reads the statistic after h.
pub(super) fn forward(
    site: &InstrSite,
    phi: Activation,
    deferred_norm: bool,
) -> LaunchResult<Launches> {
    let h = site.input(0)?;
    let writes = site.scheduled.instr.writes.len();
    let results = (0..writes).map(|port| site.output(port)).collect::<LaunchResult<_>>()?;
    let sections = LatentSections::new(results, h)?;
    let mut arguments = vec![h.read()];
    arguments.extend(sections.pointers(MatrixOperand::write));
    arguments.extend(sections.widths()?);
    if deferred_norm {
        arguments.push(row_statistic(site.input(1)?, h.rows)?.read());
    }
    arguments.extend(row_and_column_counts(&h)?);
    arguments.push(flag(phi == Activation::Silu));
    if deferred_norm {
        arguments.extend(rms_constants(site));
    }
    let format = VectorFormat::common(h.dtype, &sections.all())?;
    let kernel = format.kernel_name(if deferred_norm { "latent_recover" } else { "latent" });
    let launch = Launch::new(KernelFamily::Latent, kernel, arguments);
    Ok(launch.over_rows(h.rows, sections.widest(), format)?.into())
}

/// Inputs: the gradients of the latents, then h where there is an activation.
pub(super) fn backward(site: &InstrSite, phi: Activation) -> LaunchResult<Launches> {
    let silu = phi == Activation::Silu;
    let dh = site.output(0)?;
    let count = site.scheduled.instr.reads.len().saturating_sub(usize::from(silu));
    let (sections, mut all, mut arguments) = gradient_sections(site, count, dh)?;
    if silu {
        let h = saved_input(site, count, dh)?;
        all.extend(LatentSections::new(sections.separate.clone(), h)?.columns);
        arguments.push(h.read());
    } else {
        arguments.push(Argument::Null);
    }
    arguments.push(dh.write());
    arguments.extend(row_and_column_counts(&dh)?);
    arguments.push(flag(silu));
    let format = VectorFormat::common(dh.dtype, &all)?;
    let kernel = format.kernel_name("latent_backward");
    let launch = Launch::new(KernelFamily::Latent, kernel, arguments);
    Ok(launch.over_rows(dh.rows, sections.widest(), format)?.into())
}

/// The first `count` inputs, gradients of latents, as sections of dh; with all operands involved and the
/// arguments for them.
fn gradient_sections(
    site: &InstrSite,
    count: usize,
    dh: MatrixOperand,
) -> LaunchResult<(LatentSections, Vec<MatrixOperand>, Vec<Argument>)> {
    let gradients = (0..count).map(|port| site.input(port)).collect::<LaunchResult<_>>()?;
    let sections = LatentSections::new(gradients, dh)?;
    let all = sections.all();
    let mut arguments = sections.pointers(MatrixOperand::read);
    arguments.extend(sections.widths()?);
    Ok((sections, all, arguments))
}

/// The input h of a port, with the format and shape of dh.
fn saved_input(site: &InstrSite, port: usize, dh: MatrixOperand) -> LaunchResult<MatrixOperand> {
    let h = site.input(port)?;
    expect_dtype(dh.dtype, &[&h])?;
    expect_shape((dh.rows, dh.columns), &[&h])?;
    Ok(h)
}

/// Inputs: the gradients of the latents, h or every z, s, and the gradient of s where it is accumulated into.
pub(super) fn recover_backward(site: &InstrSite, phi: Activation) -> LaunchResult<Launches> {
    let silu = phi == Activation::Silu;
    let (reads, writes) = (&site.scheduled.instr.reads, &site.scheduled.instr.writes);
    let accumulate = reads.last() == writes.last();
    let statistic_port = reads.len().saturating_sub(1 + usize::from(accumulate));
    let count = if silu { statistic_port.saturating_sub(1) } else { statistic_port / 2 };
    let dh = site.output(0)?;
    let ds = row_statistic(site.output(1)?, dh.rows)?;
    let (sections, mut all, mut arguments) = gradient_sections(site, count, dh)?;
    if silu {
        let h = saved_input(site, count, dh)?;
        all.extend(LatentSections::new(sections.separate.clone(), h)?.columns);
        arguments.push(h.read());
        arguments.extend([Argument::Null; SECTIONS_MAX]);
    } else {
        let saved: Vec<MatrixOperand> =
            (count..2 * count).map(|port| site.input(port)).collect::<LaunchResult<_>>()?;
        for (z, dz) in saved.iter().zip(&sections.separate) {
            expect_dtype(dh.dtype, &[z])?;
            expect_shape((dz.rows, dz.columns), &[z])?;
        }
        arguments.push(Argument::Null);
        arguments.extend(pointers(&saved, MatrixOperand::read));
        all.extend(saved);
    }
    arguments.push(row_statistic(site.input(statistic_port)?, dh.rows)?.read());
    arguments.extend([dh.write(), ds.write_or_update(accumulate)]);
    arguments.extend(row_and_column_counts(&dh)?);
    arguments.push(flag(silu));
    arguments.extend(rms_constants(site));
    arguments.push(flag(accumulate));
    let format = VectorFormat::common(dh.dtype, &all)?;
    let kernel = format.kernel_name("latent_recover_backward");
    let launch = Launch::new(KernelFamily::Latent, kernel, arguments);
    Ok(launch.over_rows(dh.rows, sections.widest(), format)?.into())
}
