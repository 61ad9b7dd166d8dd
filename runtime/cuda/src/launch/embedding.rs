//! The embedding: gather of table rows, and scatter-add of their gradients.

use narrows_plan::DType;

use super::grid::VectorFormat;
use super::operand::{
    Argument, LaunchResult, MatrixOperand, MemorySpace, expect_dtype, expect_elements,
    expect_shape, row_and_column_counts, to_u32,
};
use super::site::{InstrSite, Launch, Launches};
use crate::kernel_source::KernelFamily;

/// The first token id of this device's shard of the vocabulary, of which it holds `local` entries.
pub(super) fn first_token(site: &InstrSite, local: u64) -> LaunchResult<Argument> {
    let sharded = local < site.device.constants.vocab;
    Ok(Argument::U32(to_u32(if sharded { site.device.coordinates.tensor * local } else { 0 })?))
}

/// The token whose row gets no gradient; without one, an id that no token has.
fn padding_token(site: &InstrSite) -> LaunchResult<Argument> {
    Ok(Argument::U32(site.device.constants.padding_token.map_or(Ok(u32::MAX), to_u32)?))
}

/// Views an operand as one token id per row.
pub(super) fn token_ids(operand: MatrixOperand, rows: u64) -> LaunchResult<MatrixOperand> {
    expect_dtype(DType::U32, &[&operand])?;
    expect_elements(rows, &[&operand])?;
    Ok(operand.flat())
}

pub(super) fn gather(site: &InstrSite) -> LaunchResult<Launches> {
    let (table, out) = (site.input(1)?, site.output(0)?);
    let tokens = token_ids(site.input(0)?, out.rows)?;
    expect_dtype(table.dtype, &[&out])?;
    expect_shape((out.rows, table.columns), &[&out])?;
    let mut arguments = vec![tokens.read(), table.read(), out.write()];
    arguments.extend(row_and_column_counts(&out)?);
    arguments.extend([first_token(site, table.rows)?, Argument::U32(to_u32(table.rows)?)]);
    let format = VectorFormat::common(table.dtype, &[table, out])?;
    let launch = Launch::new(KernelFamily::Embedding, format.kernel_name("gather"), arguments);
    Ok(launch.over_rows(out.rows, out.columns, format)?.into())
}

/// Two launches: the first sorts the tokens; in the second, one row of blocks sums the gradients of each token
/// that occurs.
pub(super) fn scatter_add(site: &InstrSite) -> LaunchResult<Launches> {
    let (dy, table) = (site.input(2)?, site.output(0)?);
    let tokens = token_ids(site.input(0)?, dy.rows)?;
    expect_dtype(DType::F32, &[&table])?;
    expect_shape((table.rows, dy.columns), &[&table])?;
    let count = to_u32(dy.rows)?;
    let scratch = |index: u64| {
        let begin = index * 4 * dy.rows;
        MatrixOperand::contiguous(MemorySpace::Scratch, begin, (1, dy.rows), DType::U32)
    };
    let (order, runs) = (scratch(0), scratch(1));
    let sort = Launch::new(
        KernelFamily::Embedding,
        "scatter_order",
        vec![tokens.read(), order.write(), runs.write(), Argument::U32(count)],
    )
    .grid([to_u32(dy.rows.div_ceil(64))?, 1, 1])
    .block([64, 1, 1]);

    let format = VectorFormat::common(dy.dtype, &[dy, table])?;
    let mut arguments = vec![tokens.read(), order.read(), runs.read(), dy.read(), table.update()];
    arguments.extend([
        Argument::U32(to_u32(dy.columns)?),
        first_token(site, table.rows)?,
        Argument::U32(to_u32(table.rows)?),
        padding_token(site)?,
    ]);
    let add = Launch::new(KernelFamily::Embedding, format.kernel_name("scatter_add"), arguments)
        .over_columns(dy.rows, dy.columns, format)?;
    Ok(Launches { launches: vec![sort, add], scratch_bytes: 8 * dy.rows })
}
