//! Sums and copies of ring attention around its steps: the launches of `ring.cu`.

use std::ops::Range;

use narrows_plan::DType;
use narrows_plan::kernel::Attention;

use super::grid::VectorFormat;
use super::operand::{Argument, LaunchResult, MatrixOperand, u32_arguments};
use super::site::Launch;
use crate::kernel_source::KernelFamily;

/// Equal rows of each sequence.
pub(super) struct SequenceRows {
    /// Rows of the first sequence.
    pub rows: Range<u64>,
    /// Number of sequences.
    pub sequences: u64,
    /// Rows of all of a sequence.
    pub stride: u64,
}

impl SequenceRows {
    /// All rows of a matrix.
    fn all(operand: &MatrixOperand) -> SequenceRows {
        SequenceRows { rows: 0..operand.rows, sequences: 1, stride: operand.rows }
    }

    fn of_sequence(&self) -> u64 {
        self.rows.end - self.rows.start
    }

    fn count(&self) -> u64 {
        self.sequences * self.of_sequence()
    }

    /// The matrix from the first of these rows to the last.
    fn select(&self, operand: &MatrixOperand) -> MatrixOperand {
        let before_last = self.sequences.saturating_sub(1) * self.stride;
        operand.row_range(self.rows.start, before_last + self.of_sequence())
    }

    /// Their number, that of a sequence, and the rows from one sequence to the next.
    fn sizes(&self) -> [u64; 3] {
        [self.count(), self.of_sequence(), self.stride]
    }
}

/// A launch that merges outputs of a step into sums by their log-sum-exps, `[rows, heads]`. The latter become those of all keys so far.
pub(super) fn merge(
    op: &Attention,
    rows: &SequenceRows,
    matrices: [MatrixOperand; 3],
    statistics: [MatrixOperand; 2],
) -> LaunchResult<Launch> {
    let [sums, step, out] = matrices.map(|operand| rows.select(&operand));
    let [lse, step_lse] = statistics.map(|operand| rows.select(&operand));
    let (heads, width) = (op.heads, op.head_dim);
    let mut format = VectorFormat::common_quads(step.dtype, &[sums, step, out])?;
    format.require(width.is_multiple_of(format.vector));
    let to = out.write_or_update(out == sums);
    let mut arguments = vec![sums.read(), step.read(), to, lse.update(), step_lse.read()];
    arguments.extend(u32_arguments(&rows.sizes())?);
    arguments.extend(u32_arguments(&[heads, width, sums.stride, step.stride, out.stride])?);
    let kernel = kernel_name("merge", [step.dtype, sums.dtype, out.dtype], format.vector);
    Launch::new(KernelFamily::Ring, kernel, arguments).over_rows(rows.count(), out.columns, format)
}

/// A launch that adds the results of a step to sums.
pub(super) fn add(rows: &SequenceRows, matrices: [MatrixOperand; 3]) -> LaunchResult<Launch> {
    let [sums, step, out] = matrices;
    total(rows, step.dtype, [Some(sums), Some(step)], &out)
}

/// A launch that writes the results of a step, in the format of the target.
pub(super) fn copy(step: &MatrixOperand, out: &MatrixOperand) -> LaunchResult<Launch> {
    total(&SequenceRows::all(out), step.dtype, [None, Some(*step)], out)
}

/// A launch that writes sums, in the format of the target.
pub(super) fn round(sums: &MatrixOperand, out: &MatrixOperand) -> LaunchResult<Launch> {
    total(&SequenceRows::all(out), out.dtype, [Some(*sums), None], out)
}

/// A launch that writes zeros.
pub(super) fn zeros(out: &MatrixOperand) -> LaunchResult<Launch> {
    total(&SequenceRows::all(out), out.dtype, [None, None], out)
}

/// A launch that writes sums and the results of a step, which have this format, or of both the one that there is.
fn total(
    rows: &SequenceRows,
    step_dtype: DType,
    terms: [Option<MatrixOperand>; 2],
    out: &MatrixOperand,
) -> LaunchResult<Launch> {
    let [sums, step] = terms.map(|term| term.map(|operand| rows.select(&operand)));
    let out = rows.select(out);
    let operands: Vec<MatrixOperand> = [sums, step, Some(out)].into_iter().flatten().collect();
    let format = VectorFormat::common_quads(out.dtype, &operands)?;
    let read = |term: Option<MatrixOperand>| term.map_or(Argument::Null, |term| term.read());
    let stride = |term: Option<MatrixOperand>| term.map_or(0, |term| term.stride);
    let to = out.write_or_update(sums == Some(out));
    let mut arguments = vec![read(sums), read(step), to];
    arguments.extend(u32_arguments(&rows.sizes())?);
    arguments.extend(u32_arguments(&[out.columns, stride(sums), stride(step), out.stride])?);
    let sums_dtype = sums.map_or(step_dtype, |sums| sums.dtype);
    let kernel = kernel_name("add", [step_dtype, sums_dtype, out.dtype], format.vector);
    Launch::new(KernelFamily::Ring, kernel, arguments).over_rows(rows.count(), out.columns, format)
}

/// Name of a kernel for the formats of the step, the sums and the result.
fn kernel_name(kernel: &str, dtypes: [DType; 3], vector: u64) -> String {
    let [step, sums, out] = dtypes.map(DType::name);
    format!("ring_{kernel}_{step}_{sums}_{out}_v{vector}")
}
