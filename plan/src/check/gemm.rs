//! Transfer functions of GEMMs. Contracted sides must have equal size and sharding; where they are
//! sharded, the result is partial. The other sides keep their sharding. A partial operand gives a partial
//! result where no side is sharded.

use crate::Dim;
use crate::program::{BufferRole, Extent, GemmOp, GemmRole};

use super::error::{CheckResult, ensure, fault};
use super::lattice::{
    AbstractState, AbstractValue, OperandWrite, PendingReduction, ShardedExtent, WriteTarget,
};
use super::operands::InstrOperands;
use super::values::ForwardOpKind;

/// Largest size of a side of a GEMM, and of its batch: kernels index them with 32-bit signed numbers.
pub const GEMM_SIZE_MAX: u64 = (1 << 31) - 1;

pub(super) fn transfer(
    operands: &mut InstrOperands,
    gemm: &GemmOp,
) -> CheckResult<Vec<OperandWrite>> {
    let sizes = [gemm.m, gemm.n, gemm.k, gemm.batch];
    ensure(sizes.iter().all(|size| (1..=GEMM_SIZE_MAX).contains(size)), || {
        format!("has an invalid shape: {}×{}×{}, batch {}", gemm.m, gemm.n, gemm.k, gemm.batch)
    })?;
    match gemm.role {
        GemmRole::Forward => forward(operands, gemm),
        GemmRole::InputGradient => input_gradient(operands, gemm),
        GemmRole::WeightGradient => weight_gradient(operands, gemm),
    }
}

fn forward(operands: &mut InstrOperands, gemm: &GemmOp) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=3, 1)?;
    ensure(gemm.accumulate == (operands.reads.len() == 3), || accumulate_mismatch(gemm))?;
    let (x, w) = (operands.reads[0], operands.reads[1]);
    check_sizes(operands, gemm)?;
    let pending = contraction_is_sharded(x.columns, w.rows.times(gemm.batch))?;
    let pending = result_pending(operands, pending, &[x.rows, w.columns])?;
    check_no_pending_norm(operands, 1)?;
    operands.check_gemm_sections(gemm.batch)?;
    let inputs = vec![operands.value(0)?, operands.value(1)?];
    let value = operands.apply(ForwardOpKind::Gemm { batch: gemm.batch }, inputs)?[0];
    let state = AbstractState {
        pending_norm: x.pending_norm,
        ..AbstractState::new(AbstractValue::Value(value), x.rows, w.columns, x.dtype)
    };
    let product = state.with_pending(pending);
    if !gemm.accumulate {
        return fresh(product);
    }
    let residual = operands.reads[2];
    ensure(pending == PendingReduction::None && product.pending_norm.is_none(), || {
        "adds a residual to a product that is still to be reduced or divided".into()
    })?;
    ensure(residual.same_layout(&product), || {
        format!("adds {product} to {}, which is {residual}", operands.operand_name(2))
    })?;
    let inputs = vec![operands.value(2)?, value];
    let sum = operands.apply(ForwardOpKind::Add, inputs)?[0];
    fresh(residual.with_value(AbstractValue::Value(sum)))
}

fn input_gradient(operands: &mut InstrOperands, gemm: &GemmOp) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=3, 1)?;
    let (dy, w) = (operands.reads[0], operands.reads[1]);
    check_sizes(operands, gemm)?;
    let pending = contraction_is_sharded(dy.columns, w.columns)?;
    let pending = result_pending(operands, pending, &[dy.rows, w.rows])?;
    check_no_pending_norm(operands, 0)?;
    let weight = operands.value(1)?;
    let kind = ForwardOpKind::Gemm { batch: gemm.batch };
    let node = operands.checker.graph.differentiated_op(weight, 1, dy.value, |k| k == kind)?;
    let gradient = operands.checker.graph.contribution(node, 0);
    let state = AbstractState::new(gradient, dy.rows, w.rows.times(gemm.batch), dy.dtype)
        .with_pending(pending);
    ensure(gemm.accumulate == (operands.reads.len() == 3), || accumulate_mismatch(gemm))?;
    Ok(vec![operands.accumulate(gemm.accumulate.then_some(2), state)?])
}

fn weight_gradient(operands: &mut InstrOperands, gemm: &GemmOp) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=3, 1)?;
    let (x, dy) = (operands.reads[0], operands.reads[1]);
    check_sizes(operands, gemm)?;
    let pending = contraction_is_sharded(x.rows, dy.rows)?;
    let pending = result_pending(operands, pending, &[x.columns, dy.columns])?;
    ensure(gemm.accumulate == (operands.reads.len() == 3), || accumulate_mismatch(gemm))?;
    let of_microbatch = operands.checker.stage.buffer(operands.instr.writes[0].buffer).role
        == BufferRole::MicrobatchGradient;
    let context = operands.checker.context;
    let is_only_microbatch = context.workload.microbatches(&context.mesh) == 1;
    ensure(gemm.accumulate || of_microbatch || is_only_microbatch, || {
        "overwrites the weight gradient of earlier microbatches instead of accumulating".into()
    })?;
    if !gemm.accumulate {
        operands.checker.overwritten_gradients.insert(operands.instr.writes[0].buffer);
    }
    ensure(x.columns.size.is_multiple_of(gemm.batch), || {
        "has a batch that does not divide the columns of its input".into()
    })?;
    let kind = ForwardOpKind::Gemm { batch: gemm.batch };
    let input = operands.value(0)?;
    let node = operands.checker.graph.differentiated_op(input, 0, dy.value, |k| k == kind)?;
    let gradient = operands.checker.graph.contribution(node, 1);
    let rows = ShardedExtent { size: x.columns.size / gemm.batch, ..x.columns };
    let dtype = operands.instr.writes[0].extent.dtype;
    let state = AbstractState::new(gradient, rows, dy.columns, dtype).with_pending(pending);
    Ok(vec![operands.accumulate(gemm.accumulate.then_some(2), state)?])
}

fn accumulate_mismatch(gemm: &GemmOp) -> String {
    match gemm.accumulate {
        true => "accumulates but reads no sum".into(),
        false => "reads a sum but does not accumulate".into(),
    }
}

fn fresh(state: AbstractState) -> CheckResult<Vec<OperandWrite>> {
    Ok(vec![OperandWrite { state, target: WriteTarget::Fresh }])
}

/// Checks the shapes and formats of the operands and the result. The weight of an input gradient is read
/// transposed, and so is the input of a weight gradient.
fn check_sizes(operands: &InstrOperands, gemm: &GemmOp) -> CheckResult {
    let GemmOp { m, n, k, batch, .. } = *gemm;
    let [first, second] = match gemm.role {
        GemmRole::Forward => [(m, k * batch), (k, n * batch)],
        GemmRole::InputGradient => [(m, k * batch), (n, k * batch)],
        GemmRole::WeightGradient => [(k, m * batch), (k, n * batch)],
    };
    let expected = [first, second, (m, n * batch)];
    let accesses = [&operands.instr.reads[0], &operands.instr.reads[1], &operands.instr.writes[0]];
    for (access, (rows, columns)) in accesses.into_iter().zip(expected) {
        let Extent { rows: r, columns: c, .. } = access.extent;
        ensure((r, c) == (rows, columns), || {
            let name = &operands.checker.stage.buffer(access.buffer).name;
            format!("expects `{name}` as {rows}×{columns}, but accesses {}", access.extent)
        })?;
    }
    let inputs = (operands.reads[0].dtype, operands.reads[1].dtype);
    ensure(inputs.0 == inputs.1, || {
        format!(
            "multiplies {} by {}: operands must have one format",
            inputs.0.name(),
            inputs.1.name()
        )
    })
}

/// Whether two contracted sides are sharded, so that the result is partial.
fn contraction_is_sharded(one: ShardedExtent, two: ShardedExtent) -> CheckResult<bool> {
    ensure(one.size == two.size, || format!("contracts {} elements with {}", one.size, two.size))?;
    let name = |sharded: Option<Dim>| match sharded {
        None => "whole".to_string(),
        Some(dim) => format!("sharded by {}", crate::Layout::Sharded(dim)),
    };
    ensure(one.sharded == two.sharded, || {
        format!(
            "contracts a side that is {} with one that is {}: devices would multiply shards that do not match",
            name(one.sharded),
            name(two.sharded)
        )
    })?;
    Ok(one.sharded.is_some())
}

/// The pending reduction of the result. `contracted` is whether the contracted sides are sharded; `sides`
/// are the other ones.
fn result_pending(
    operands: &InstrOperands,
    contracted: bool,
    sides: &[ShardedExtent],
) -> CheckResult<PendingReduction> {
    let partial: Vec<usize> =
        (0..2).filter(|port| operands.reads[*port].pending != PendingReduction::None).collect();
    let any_sharded = contracted || sides.iter().any(|side| side.sharded.is_some());
    match partial[..] {
        [] => Ok(if contracted { PendingReduction::Sum } else { PendingReduction::None }),
        [_, _] => {
            fault("multiplies two partial sums: a product of sums is not the sum of products")
        }
        [port] if any_sharded || operands.reads[port].pending != PendingReduction::Sum => {
            fault(format!(
                "reads the partial sum {} while another operand is sharded over the same devices",
                operands.operand_name(port)
            ))
        }
        _ => Ok(PendingReduction::Sum),
    }
}

fn check_no_pending_norm(operands: &InstrOperands, port: usize) -> CheckResult {
    ensure(operands.reads[port].pending_norm.is_none(), || {
        format!(
            "reads {} before the division by its norm's root mean square",
            operands.operand_name(port)
        )
    })
}
