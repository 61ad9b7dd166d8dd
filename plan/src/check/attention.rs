//! Transfer functions of attention. Tokens may be sharded by whole sequences only. Features may be
//! sharded by whole heads: all heads, or the query heads alone when there are fewer KV heads than
//! devices; then every device uses one KV head, and the gradients of keys and values are partial sums.

use crate::kernel::{Attention, Direction};
use crate::{DType, Dim};

use super::error::{CheckResult, ensure};
use super::lattice::{
    AbstractState, AbstractValue, OperandWrite, PendingSum, ShardedExtent, WriteTarget,
};
use super::operands::InstrOperands;
use super::values::ForwardOpKind;

pub(super) fn transfer(
    operands: &mut InstrOperands,
    attention: &Attention,
) -> CheckResult<Vec<OperandWrite>> {
    operands.all_summed()?;
    operands.none_owes_norm()?;
    let sizes = [attention.heads, attention.kv_heads, attention.head_dim];
    ensure(sizes.iter().all(|size| (1..1 << 24).contains(size)), || {
        format!(
            "has invalid sizes: {} query heads, {} KV heads, {} features per head",
            sizes[0], sizes[1], sizes[2]
        )
    })?;
    match attention.direction {
        Direction::Forward => {
            let inputs = operands.reads.len();
            operands.check_arity(1..=3, 2)?;
            forward(operands, attention, inputs)
        }
        Direction::Backward => {
            let inputs = operands.instr.writes.len();
            ensure((1..=3).contains(&inputs), || "needs one to three inputs".into())?;
            operands.check_arity(inputs + 3..=inputs + 3, inputs)?;
            backward(operands, attention, inputs)
        }
    }
}

/// Output and log-sum-exp for these inputs.
fn results(
    operands: &InstrOperands,
    attention: &Attention,
    inputs: usize,
) -> CheckResult<(AbstractState, AbstractState)> {
    let devices = operands.devices();
    let q = operands.reads[0];
    tokens(operands, attention, &q)?;
    let hd = attention.head_dim;
    let heads = ShardedExtent { size: attention.heads, cut: None };
    let heads = match q.columns.cut {
        None => heads,
        Some(_) => ShardedExtent { size: attention.heads * devices, cut: Some(Dim::Feature) },
    };
    let widths: u64 = operands.reads[..inputs].iter().map(|s| s.columns.local(devices)).sum();
    if shares_keys(operands, inputs) {
        let keys = widths - q.columns.local(devices);
        let whole = keys / (2 * hd);
        let fits = q.columns.local(devices) == attention.heads * hd
            && whole * 2 * hd == keys
            && attention.kv_heads == 1
            && whole > 0
            && devices.is_multiple_of(whole);
        ensure(fits, || {
            format!(
                "computes {} query heads and {} KV heads per device, but reads {q} and {whole} replicated KV heads over {devices} devices",
                attention.heads, attention.kv_heads
            )
        })?;
    } else {
        for state in &operands.reads[1..inputs] {
            ensure(state.columns.cut == q.columns.cut, || {
                format!("reads queries {q} and keys or values {state}: their heads do not match")
            })?;
        }
        ensure(widths == (attention.heads + 2 * attention.kv_heads) * hd, || {
            format!(
                "computes {} query heads and {} KV heads of {hd} features, but its inputs have {widths} features",
                attention.heads, attention.kv_heads
            )
        })?;
    }
    for state in &operands.reads[1..inputs] {
        ensure(state.rows == q.rows, || {
            format!("reads queries {q} and keys or values {state}: their tokens do not match")
        })?;
    }
    // Fewer key heads than devices: all devices hold all of them.
    let keys = match (q.columns.cut, shares_keys(operands, inputs)) {
        (_, true) => (widths - q.columns.local(devices)) / 2,
        (None, _) => attention.kv_heads * hd,
        (Some(_), _) => attention.kv_heads * hd * devices,
    };
    operands.operands_are(0..inputs, &[heads.times(hd).size, keys, keys])?;
    let output = AbstractState { columns: heads.times(hd), ..q };
    let sums = AbstractState { columns: heads, dtype: DType::F32, ..q };
    Ok((output, sums))
}

fn tokens(operands: &InstrOperands, attention: &Attention, q: &AbstractState) -> CheckResult {
    let workload = &operands.check.context.workload;
    ensure(q.rows.cut != Some(Dim::Position), || {
        "reads tokens sharded by position, but every position attends to all before it".into()
    })?;
    let sequences =
        workload.micro_batch / if q.rows.cut.is_some() { operands.devices() } else { 1 };
    let fits = (attention.sequences, attention.length) == (sequences, workload.sequence_length);
    ensure(fits && attention.input == q.dtype, || {
        format!(
            "attends within {} sequences of {} tokens, but a device has {sequences} of {}",
            attention.sequences, attention.length, workload.sequence_length
        )
    })
}

fn shares_keys(operands: &InstrOperands, inputs: usize) -> bool {
    operands.reads[0].columns.cut.is_some()
        && inputs > 1
        && operands.reads[1..inputs].iter().all(|state| state.columns.cut.is_none())
}

fn forward(
    operands: &mut InstrOperands,
    attention: &Attention,
    inputs: usize,
) -> CheckResult<Vec<OperandWrite>> {
    let (output, sums) = results(operands, attention, inputs)?;
    let values = (0..inputs).map(|port| operands.value(port)).collect::<CheckResult<_>>()?;
    let made = operands.apply(ForwardOpKind::Attention, values)?;
    let fresh = |state, target| OperandWrite { state, target };
    Ok(vec![
        fresh(output.with(AbstractValue::Value(made[0])), WriteTarget::Fresh),
        fresh(sums.with(AbstractValue::Value(made[1])), WriteTarget::Fresh),
    ])
}

fn backward(
    operands: &mut InstrOperands,
    attention: &Attention,
    inputs: usize,
) -> CheckResult<Vec<OperandWrite>> {
    let (output, sums) = results(operands, attention, inputs)?;
    let first = operands.value(0)?;
    let (out, lse, dout) =
        (operands.reads[inputs], operands.reads[inputs + 1], operands.reads[inputs + 2]);
    let values = &operands.check.values;
    let node = values.user(first, 0, dout.meaning, |kind| kind == ForwardOpKind::Attention)?;
    for (port, input) in values.inputs(node).iter().enumerate() {
        ensure(port < inputs && operands.value(port)? == *input, || {
            format!(
                "reads an input other than {}, the input of its forward pass",
                values.name(*input)
            )
        })?;
    }
    let made: Vec<AbstractValue> =
        values.outputs(node).iter().map(|v| AbstractValue::Value(*v)).collect();
    ensure([out.meaning, lse.meaning] == made[..], || {
        "reads an output and log-sum-exp that do not belong to its inputs".into()
    })?;
    for (state, wanted) in [(out, output), (lse, sums), (dout, output)] {
        ensure(state.lies_as(&wanted), || format!("reads {state} where it needs {wanted}"))?;
    }
    let shared = shares_keys(operands, inputs);
    let written = (0..inputs).map(|port| {
        let owed = if shared && port > 0 { PendingSum::Owed } else { PendingSum::Done };
        let state = operands.reads[port].with(values.contribution(node, port)).owing(owed);
        OperandWrite { state, target: WriteTarget::Fresh }
    });
    Ok(written.collect())
}
