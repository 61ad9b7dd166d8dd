//! Transfer functions of attention. Tokens may be sharded by whole sequences. Features may be sharded by whole heads:
//! all heads or, with fewer KV heads than devices, the query heads alone. Then every device reads one KV head, and the
//! gradients of keys and values are partial. With a context axis, its devices have all positions of a part of the
//! heads, or the queries of their own positions with all keys and values, whose gradients are then partial over this
//! axis, or keys and values of their own positions that rotate.
//!
//! All devices of a stage run one list of instructions, so that the members of a ring start it in one order, as any
//! collective. Ring attention counts as communication: no collective of its pass overlaps with it (`overlap.rs`).

use crate::context::Context;
use crate::extent::Extent;
use crate::kernel::{Attention, Direction};
use crate::ring::{RING_SCRATCH_OPERANDS, RingScratch};
use crate::{Axis, DType, Dim};

use super::error::{CheckResult, ensure};
use super::lattice::{
    AbstractState, AbstractValue, ContextPart, OperandWrite, PendingReduction, ShardedExtent,
    WriteTarget,
};
use super::operands::InstrOperands;
use super::values::ForwardOpKind;

pub(super) fn transfer(
    operands: &mut InstrOperands,
    attention: &Attention,
) -> CheckResult<Vec<OperandWrite>> {
    operands.check_all_reduced()?;
    operands.check_no_pending_norm()?;
    let sizes = [attention.heads, attention.kv_heads, attention.head_dim];
    ensure(sizes.iter().all(|size| (1..1 << 24).contains(size)), || {
        format!(
            "has invalid sizes: {} query heads, {} KV heads, {} features per head",
            sizes[0], sizes[1], sizes[2]
        )
    })?;
    let hides_keys = |window| (1..attention.length).contains(&window);
    ensure(attention.window.is_none_or(hides_keys), || {
        format!("has a window that hides no key of {} tokens, or all", attention.length)
    })?;
    check_ring(operands.checker.context, attention)?;
    let rotates = attention.rotation().is_some();
    let scratch_count = if rotates { RING_SCRATCH_OPERANDS } else { 0 };
    let mut writes = match attention.direction {
        Direction::Forward => {
            let inputs = operands.reads.len();
            operands.check_arity(1..=3, 2 + scratch_count)?;
            forward(operands, attention, inputs)?
        }
        Direction::Backward => {
            let inputs = operands.instr.writes.len().saturating_sub(scratch_count);
            ensure((1..=3).contains(&inputs), || "needs one to three inputs".into())?;
            operands.check_arity(inputs + 3..=inputs + 3, inputs + scratch_count)?;
            backward(operands, attention, inputs)?
        }
    };
    // The sizes of the attention are those of its operands, as the transfer functions above have checked.
    let scratch = attention.ring_scratch().map(|RingScratch { parts, sums }| [parts, sums]);
    let tokens = operands.reads[0].with_value(AbstractValue::Zero);
    writes.extend(scratch.into_iter().flatten().map(|Extent { columns, dtype, .. }| {
        OperandWrite {
            state: AbstractState { columns: ShardedExtent::whole(columns), dtype, ..tokens },
            target: WriteTarget::Scratch,
        }
    }));
    Ok(writes)
}

/// Checks that keys and values rotate over the context axis if and only if the context says so.
fn check_ring(context: &Context, attention: &Attention) -> CheckResult {
    let expected = context.rotates_keys().then(|| context.mesh.group(Axis::Context));
    ensure(attention.ring == expected, || {
        format!(
            "rotates keys and values over {:?}, but the context says {expected:?}",
            attention.ring
        )
    })?;
    ensure(expected.is_none() || attention.window.is_none(), || {
        "rotates keys and values within a sliding window".into()
    })?;
    ensure(expected.is_none() || !context.overlap_microbatch_pairs, || {
        "rotates keys and values in a pass of two microbatches, where collectives overlap".into()
    })
}

/// States of output and log-sum-exp.
fn result_states(
    operands: &InstrOperands,
    attention: &Attention,
    inputs: usize,
) -> CheckResult<(AbstractState, AbstractState)> {
    let devices = operands.devices();
    let q = operands.reads[0];
    check_tokens(operands, attention, &q)?;
    let hd = attention.head_dim;
    let exchanged = q.exchanged_parts(operands.checker.context);
    // Parts of the heads over both axes.
    let parts = exchanged * q.columns.sharded.map_or(1, |_| devices);
    let heads = ShardedExtent { size: attention.heads * parts, sharded: q.columns.sharded };
    let local_widths = operands.reads[..inputs].iter().map(|s| s.columns.local(devices));
    let widths = local_widths.sum::<u64>() / exchanged;
    if has_replicated_kv(operands, inputs) {
        ensure(exchanged == 1, || {
            "reads replicated keys and values, whose heads the context axis cannot divide".into()
        })?;
        let kv_width = widths - q.columns.local(devices);
        let kv_heads = kv_width / (2 * hd);
        let fits = q.columns.local(devices) == attention.heads * hd
            && kv_heads * 2 * hd == kv_width
            && attention.kv_heads == 1
            && kv_heads > 0
            && devices.is_multiple_of(kv_heads);
        ensure(fits, || {
            format!(
                "computes {} query heads and {} KV heads per device, but reads {q} and {kv_heads} replicated KV heads over {devices} devices",
                attention.heads, attention.kv_heads
            )
        })?;
    } else {
        for state in &operands.reads[1..inputs] {
            ensure(state.columns.sharded == q.columns.sharded, || {
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
    let gathered = attention.query_parts > 1 && attention.ring.is_none();
    let keys_over_context = if gathered { ContextPart::Whole } else { q.over_context };
    for state in &operands.reads[1..inputs] {
        ensure(state.rows == q.rows && state.over_context == keys_over_context, || {
            format!("reads queries {q} and keys or values {state}: their tokens do not match")
        })?;
    }
    ensure(!gathered || q.columns.local(devices) == attention.heads * hd, || {
        format!("reads queries {q} of some positions together with keys of all positions")
    })?;
    // Whole width of keys and of values.
    let kv_width = match has_replicated_kv(operands, inputs) {
        true => (widths - q.columns.local(devices)) / 2,
        false => attention.kv_heads * hd * parts,
    };
    operands.check_sections(0..inputs, &[heads.times(hd).size, kv_width, kv_width])?;
    let output = AbstractState { columns: heads.times(hd), ..q };
    let log_sum_exp = AbstractState { columns: heads, dtype: DType::F32, ..q };
    Ok((output, log_sum_exp))
}

fn check_tokens(operands: &InstrOperands, attention: &Attention, q: &AbstractState) -> CheckResult {
    let context = operands.checker.context;
    let workload = &context.workload;
    let query_parts = match q.over_context {
        ContextPart::Positions => context.mesh.context,
        _ => 1,
    };
    let has_all_keys = query_parts == 1 || context.context_attention.is_zigzag();
    ensure(q.rows.sharded != Some(Dim::Position) && has_all_keys, || {
        "reads tokens sharded by position, but every position attends to all before it".into()
    })?;
    ensure(attention.query_parts == query_parts, || {
        format!(
            "has the queries of one of {} devices, but reads those of one of {query_parts}",
            attention.query_parts
        )
    })?;
    let sequences =
        workload.micro_batch / if q.rows.sharded.is_some() { operands.devices() } else { 1 };
    let fits = (attention.sequences, attention.length) == (sequences, workload.sequence_length);
    ensure(fits && attention.input == q.dtype, || {
        format!(
            "attends within {} sequences of {} tokens, but a device has {sequences} of {}",
            attention.sequences, attention.length, workload.sequence_length
        )
    })
}

fn has_replicated_kv(operands: &InstrOperands, inputs: usize) -> bool {
    operands.reads[0].columns.sharded.is_some()
        && inputs > 1
        && operands.reads[1..inputs].iter().all(|state| state.columns.sharded.is_none())
}

fn forward(
    operands: &mut InstrOperands,
    attention: &Attention,
    inputs: usize,
) -> CheckResult<Vec<OperandWrite>> {
    let (output, log_sum_exp) = result_states(operands, attention, inputs)?;
    let values = (0..inputs).map(|port| operands.value(port)).collect::<CheckResult<_>>()?;
    let kind = ForwardOpKind::Attention { window: attention.window };
    let outputs = operands.apply_to(kind, values, 0..2)?;
    let fresh = |state, target| OperandWrite { state, target };
    Ok(vec![
        fresh(output.with_value(AbstractValue::Value(outputs[0])), WriteTarget::Fresh),
        fresh(log_sum_exp.with_value(AbstractValue::Value(outputs[1])), WriteTarget::Fresh),
    ])
}

fn backward(
    operands: &mut InstrOperands,
    attention: &Attention,
    inputs: usize,
) -> CheckResult<Vec<OperandWrite>> {
    let (output, log_sum_exp) = result_states(operands, attention, inputs)?;
    let first = operands.value(0)?;
    let (out, lse, dout) =
        (operands.reads[inputs], operands.reads[inputs + 1], operands.reads[inputs + 2]);
    let graph = &operands.checker.graph;
    let expected = ForwardOpKind::Attention { window: attention.window };
    let node = graph.differentiated_op(first, 0, dout.value, |kind| kind == expected)?;
    for (port, input) in graph.inputs(node).iter().enumerate() {
        ensure(port < inputs && operands.value(port)? == *input, || {
            format!(
                "reads an input other than {}, the input of its forward pass",
                graph.name(*input)
            )
        })?;
    }
    let outputs: Vec<AbstractValue> =
        graph.outputs(node).iter().map(|v| AbstractValue::Value(*v)).collect();
    ensure([out.value, lse.value] == outputs[..], || {
        "reads an output and log-sum-exp that do not belong to its inputs".into()
    })?;
    for (state, expected) in [(out, output), (lse, log_sum_exp), (dout, output)] {
        ensure(state.same_layout(&expected), || {
            format!("reads {state} where it needs {expected}")
        })?;
    }
    let shared_kv = has_replicated_kv(operands, inputs);
    let writes = (0..inputs).map(|port| {
        let pending =
            if shared_kv && port > 0 { PendingReduction::Sum } else { PendingReduction::None };
        let read = operands.reads[port];
        let over_context = match read.over_context {
            ContextPart::Whole => ContextPart::Summand,
            part => part,
        };
        let state = AbstractState { over_context, ..read }
            .with_value(graph.contribution(node, port))
            .with_pending(pending);
        OperandWrite { state, target: WriteTarget::Fresh }
    });
    Ok(writes.collect())
}
