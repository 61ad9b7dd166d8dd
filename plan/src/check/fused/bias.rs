//! Transfer functions of biases, which are added to every row.

use crate::DType;

use super::super::error::{CheckResult, ensure, fault};
use super::super::lattice::{AbstractState, OperandWrite, PendingReduction, ShardedExtent};
use super::super::operands::InstrOperands;
use super::super::values::ForwardOpKind;
use super::row_parameters;

pub(super) fn forward(operands: &mut InstrOperands) -> CheckResult<Vec<OperandWrite>> {
    row_parameters::forward(operands, |operands, _| {
        let (x, bias) = (operands.reads[0], operands.reads[1]);
        ensure(bias.rows == ShardedExtent::whole(1) && bias.columns == x.columns, || {
            format!("adds {bias} to every row of {x}: their features differ")
        })?;
        Ok(ForwardOpKind::Bias)
    })
}

pub(super) fn backward(operands: &mut InstrOperands) -> CheckResult<Vec<OperandWrite>> {
    operands.check_arity(2..=2, 1)?;
    operands.check_reduced(0)?;
    operands.check_no_pending_norm()?;
    let dy = operands.reads[0];
    let graph = &operands.checker.graph;
    let node = graph.op_of_output_gradient(dy.value, |kind| kind == ForwardOpKind::Bias);
    let Some(node) = node else {
        return fault(format!(
            "sums the rows of {}, which is not the complete gradient of a value with a bias",
            graph.describe(dy.value)
        ));
    };
    let pending =
        if dy.rows.sharded.is_some() { PendingReduction::Sum } else { PendingReduction::None };
    let db = AbstractState { rows: ShardedExtent::whole(1), dtype: DType::F32, ..dy };
    let db = db.with_value(graph.contribution(node, 1)).with_pending(pending);
    Ok(vec![operands.accumulate(Some(1), db)?])
}
