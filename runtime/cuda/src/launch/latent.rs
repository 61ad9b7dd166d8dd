//! φ on latents, and the division that an online norm still owes. Several latents lie side by side
//! in one operand, and each has its own result.

use narrows_plan::model::Activation;

use super::norm::{rms, shape, statistic};
use super::operand::{MatrixOperand, small};
use super::shape::{AccessFormat, expect, expect_shape};
use super::{Argument, InstrSite, KernelFamily, Launch, LaunchResult, Launches};

/// The most latents that a kernel takes.
const SECTIONS: usize = 4;

/// Latents that lie side by side in a whole, or apart.
struct LatentSections {
    /// What each is where it stands alone.
    apart: Vec<MatrixOperand>,
    /// Where it is in the whole.
    within: Vec<MatrixOperand>,
}

impl LatentSections {
    fn new(apart: Vec<MatrixOperand>, whole: MatrixOperand) -> LaunchResult<LatentSections> {
        if apart.len() > SECTIONS {
            return Err(format!("{} latents side by side: a kernel takes {SECTIONS}", apart.len()));
        }
        let (mut within, mut first) = (vec![], 0);
        for section in &apart {
            expect(whole.dtype, &[section])?;
            expect_shape((whole.rows, section.columns), &[section])?;
            within.push(whole.column_range(first, section.columns)?);
            first += section.columns;
        }
        if first != whole.columns {
            return Err(format!("latents of {first} features together, in {}", whole.columns));
        }
        Ok(LatentSections { apart, within })
    }

    fn pointers(&self, argument: impl Fn(&MatrixOperand) -> Argument) -> Vec<Argument> {
        pointers(&self.apart, argument)
    }

    fn widths(&self) -> LaunchResult<Vec<Argument>> {
        let mut widths = vec![Argument::U32(0); SECTIONS];
        for (width, section) in widths.iter_mut().zip(&self.apart) {
            *width = Argument::U32(small(section.columns)?);
        }
        Ok(widths)
    }

    fn widest(&self) -> u64 {
        self.apart.iter().map(|section| section.columns).max().unwrap_or(0)
    }
}

fn pointers(of: &[MatrixOperand], argument: impl Fn(&MatrixOperand) -> Argument) -> Vec<Argument> {
    let mut made = vec![Argument::Absent; SECTIONS];
    made.iter_mut().zip(of).for_each(|(made, operand)| *made = argument(operand));
    made
}

fn flag(of: bool) -> Argument {
    Argument::U32(u32::from(of))
}

/// `LatentForward`, and `LatentRecover` with the statistic after h.
pub(super) fn forward(site: &InstrSite, phi: Activation, owed: bool) -> LaunchResult<Launches> {
    let h = site.read(0)?;
    let writes = site.moment.instr.writes.len();
    let results = (0..writes).map(|port| site.write(port)).collect::<LaunchResult<_>>()?;
    let sections = LatentSections::new(results, h)?;
    let mut arguments = vec![h.read()];
    arguments.extend(sections.pointers(MatrixOperand::write));
    arguments.extend(sections.widths()?);
    if owed {
        arguments.push(statistic(site.read(1)?, h.rows)?.read());
    }
    arguments.extend(shape(&h)?);
    arguments.push(flag(phi == Activation::Silu));
    if owed {
        arguments.extend(rms(site));
    }
    let format = AccessFormat::of(h.dtype, &[&sections.apart[..], &sections.within].concat())?;
    let launch = Launch::new(KernelFamily::Latent, format.name(site.op.describe().0), arguments);
    Ok(launch.over_rows(h.rows, sections.widest(), format)?.into())
}

/// The latents' gradients, then h where there is φ.
pub(super) fn backward(site: &InstrSite, phi: Activation) -> LaunchResult<Launches> {
    let silu = phi == Activation::Silu;
    let dh = site.write(0)?;
    let count = site.moment.instr.reads.len().saturating_sub(usize::from(silu));
    let (sections, mut all, mut arguments) = of_gradients(site, count, dh)?;
    if silu {
        let h = saved_whole(site, count, dh)?;
        all.extend(LatentSections::new(sections.apart.clone(), h)?.within);
        arguments.push(h.read());
    } else {
        arguments.push(Argument::Absent);
    }
    arguments.push(dh.write());
    arguments.extend(shape(&dh)?);
    arguments.push(flag(silu));
    let format = AccessFormat::of(dh.dtype, &all)?;
    let launch = Launch::new(KernelFamily::Latent, format.name(site.op.describe().0), arguments);
    Ok(launch.over_rows(dh.rows, sections.widest(), format)?.into())
}

/// The first `count` operands, the latents' gradients, as the sections of dh: with all operands that they
/// and dh are, and the arguments that say where they lie.
fn of_gradients(
    site: &InstrSite,
    count: usize,
    dh: MatrixOperand,
) -> LaunchResult<(LatentSections, Vec<MatrixOperand>, Vec<Argument>)> {
    let gradients = (0..count).map(|port| site.read(port)).collect::<LaunchResult<_>>()?;
    let sections = LatentSections::new(gradients, dh)?;
    let all = [&sections.apart[..], &sections.within].concat();
    let mut arguments = sections.pointers(MatrixOperand::read);
    arguments.extend(sections.widths()?);
    Ok((sections, all, arguments))
}

fn saved_whole(site: &InstrSite, port: usize, like: MatrixOperand) -> LaunchResult<MatrixOperand> {
    let h = site.read(port)?;
    expect(like.dtype, &[&h])?;
    expect_shape((like.rows, like.columns), &[&h])?;
    Ok(h)
}

/// The latents' gradients, h or every z, s, and the gradient of s when it is added to.
pub(super) fn recover_backward(site: &InstrSite, phi: Activation) -> LaunchResult<Launches> {
    let silu = phi == Activation::Silu;
    let (reads, writes) = (&site.moment.instr.reads, &site.moment.instr.writes);
    let add = reads.last() == writes.last();
    let before_s = reads.len().saturating_sub(1 + usize::from(add));
    let count = if silu { before_s.saturating_sub(1) } else { before_s / 2 };
    let (dh, ds) = (site.write(0)?, statistic(site.write(1)?, site.write(0)?.rows)?);
    let (sections, mut all, mut arguments) = of_gradients(site, count, dh)?;
    if silu {
        let h = saved_whole(site, count, dh)?;
        all.extend(LatentSections::new(sections.apart.clone(), h)?.within);
        arguments.push(h.read());
        arguments.extend([Argument::Absent; SECTIONS]);
    } else {
        let saved: Vec<MatrixOperand> =
            (count..2 * count).map(|port| site.read(port)).collect::<LaunchResult<_>>()?;
        for (z, dz) in saved.iter().zip(&sections.apart) {
            expect(dh.dtype, &[z])?;
            expect_shape((dz.rows, dz.columns), &[z])?;
        }
        arguments.push(Argument::Absent);
        arguments.extend(pointers(&saved, MatrixOperand::read));
        all.extend(saved);
    }
    arguments.push(statistic(site.read(before_s)?, dh.rows)?.read());
    arguments.extend([dh.write(), ds.made(add)]);
    arguments.extend(shape(&dh)?);
    arguments.push(flag(silu));
    arguments.extend(rms(site));
    arguments.push(flag(add));
    let format = AccessFormat::of(dh.dtype, &all)?;
    let launch = Launch::new(KernelFamily::Latent, format.name(site.op.describe().0), arguments);
    Ok(launch.over_rows(dh.rows, sections.widest(), format)?.into())
}
