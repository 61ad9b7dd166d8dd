//! Transfer function of collectives within a pass, which run over the tensor axis or, around attention, over the context
//! axis. Source layout and reduction must be those of the operands, the kind must match the layouts, and the group must be
//! that of the mesh. The reduction of a replicated tensor is refused: it would add the tensor once per device.

use crate::kernel::CollectiveKind;
use crate::mesh::{Axis, DeviceGroup};
use crate::program::{CollectiveOp, Reduction};
use crate::{Bytes, Dim, Layout};

use super::error::{CheckResult, ensure, fault, fault_hint};
use super::lattice::{
    AbstractState, ContextPart, OperandWrite, PackedParts, PendingReduction, ShardedExtent,
    WriteTarget,
};
use super::operands::InstrOperands;

pub(super) fn transfer(
    operands: &mut InstrOperands,
    collective: &CollectiveOp,
) -> CheckResult<Vec<OperandWrite>> {
    ensure(collective.axis.shards_activations(), || {
        format!(
            "runs over the {} axis within a pass: only devices of the tensor and context axes run passes in lockstep",
            collective.axis.name()
        )
    })?;
    check_group(collective, operands.checker.context.mesh.group(collective.axis))?;
    check_kind(collective)?;
    ensure(!operands.reads.is_empty(), || "has no operand".into())?;
    operands.check_arity(operands.reads.len()..=operands.reads.len(), operands.reads.len())?;
    if collective.axis == Axis::Context {
        return over_context(operands, collective);
    }
    for port in 0..operands.reads.len() {
        check_operand(operands, collective, port)?;
    }
    check_volume(operands, collective)?;
    if collective.kind() == CollectiveKind::AllReduce {
        let writes = operands.reads.iter().enumerate().map(|(port, state)| OperandWrite {
            state: state.with_pending(PendingReduction::None),
            target: WriteTarget::InPlace(port),
        });
        return Ok(writes.collect());
    }
    ensure(operands.reads.len() == 1, || "moves more than one tensor".into())?;
    let state = operands.reads[0];
    check_packed(operands, collective)?;
    let state = AbstractState {
        packed: packed_parts(operands, collective.axis, collective.from),
        ..resharded(state, collective.to)
    };
    Ok(vec![OperandWrite { state, target: WriteTarget::Fresh }])
}

/// A collective around attention over the context axis: an all-to-all of the features of each position for all
/// positions of a part of the features, or back; an all-gather of all positions; or a reduce-scatter of their
/// gradients.
fn over_context(
    operands: &mut InstrOperands,
    collective: &CollectiveOp,
) -> CheckResult<Vec<OperandWrite>> {
    use ContextPart::{Features, Positions, Summand, Whole};
    let context = operands.checker.context;
    ensure(operands.reads.len() == 1, || "moves more than one tensor".into())?;
    operands.check_all_reduced()?;
    operands.check_no_pending_norm()?;
    let state = operands.reads[0];
    let part = |layout| match layout {
        Layout::Sharded(Dim::Position) => Some(Positions),
        Layout::Sharded(Dim::Feature) => Some(Features),
        Layout::Replicated => Some(Whole),
        Layout::Partial => Some(Summand),
        _ => None,
    };
    let to = match (part(collective.from), part(collective.to)) {
        (Some(Positions), Some(to @ (Features | Whole))) if state.over_context == Positions => to,
        (Some(Features), Some(Positions)) if state.over_context == Features => Positions,
        (Some(Summand), Some(Positions)) if state.over_context == Summand => Positions,
        _ => {
            return fault(format!(
                "turns {} from {} into {} over the context axis, but it is {state}",
                operands.operand_name(0),
                collective.from,
                collective.to
            ));
        }
    };
    ensure(state.rows.sharded.is_none(), || {
        format!("reads tokens that the tensor axis shards too ({state})")
    })?;
    check_packed(operands, collective)?;
    let whole = AbstractState { over_context: Whole, ..state };
    let bytes = whole.extent(context).bytes();
    ensure((collective.payload, collective.statistic) == (bytes, Bytes(0)), || {
        format!(
            "declares {} bytes of payload and {} of statistics, but its tensors have {}",
            collective.payload.0, collective.statistic.0, bytes.0
        )
    })?;
    let packed = packed_parts(operands, Axis::Context, collective.from);
    let state = AbstractState { packed, over_context: to, ..state };
    Ok(vec![OperandWrite { state, target: WriteTarget::Fresh }])
}

/// Checks that an operand is packed as its result's layout requires.
fn check_packed(operands: &InstrOperands, collective: &CollectiveOp) -> CheckResult {
    let state = operands.reads[0];
    ensure(state.packed == packed_parts(operands, collective.axis, collective.to), || {
        format!("reads {state}, which is not packed as sharding it by {} requires", collective.to)
    })
}

/// The parts to pack before the collective, or to unpack after it, for shards that are not contiguous in memory.
fn packed_parts(operands: &InstrOperands, axis: Axis, layout: Layout) -> Option<PackedParts> {
    let Layout::Sharded(dim) = layout else { return None };
    let contiguous = dim != Dim::Feature && operands.checker.context.tokens_contiguous(dim, axis);
    (!contiguous).then_some(PackedParts { dim, axis })
}

fn resharded(state: AbstractState, to: Layout) -> AbstractState {
    let sharded = |features: bool| match to {
        Layout::Sharded(dim) if features == (dim == Dim::Feature) => Some(dim),
        _ => None,
    };
    AbstractState {
        rows: ShardedExtent { sharded: sharded(false), ..state.rows },
        columns: ShardedExtent { sharded: sharded(true), ..state.columns },
        pending: PendingReduction::None,
        ..state
    }
}

pub(super) fn check_group(collective: &CollectiveOp, group: DeviceGroup) -> CheckResult {
    let DeviceGroup { axis, size, stride } = collective.group;
    ensure(size > 1, || "has a group of one device".into())?;
    if collective.group != group {
        return fault_hint(
            format!(
                "uses a group of {size} devices with stride {stride} on the {} axis, which is not the mesh's group of the {} axis",
                axis.name(),
                group.axis.name()
            ),
            format!("{} devices with stride {}", group.size, group.stride),
        );
    }
    Ok(())
}

pub(super) fn check_kind(collective: &CollectiveOp) -> CheckResult {
    use Layout::{Partial, Replicated, Sharded};
    let fits = match (collective.from, collective.to) {
        (Partial, Replicated) => collective.kind() == CollectiveKind::AllReduce,
        (Partial, Sharded(_)) => collective.kind() == CollectiveKind::ReduceScatter,
        (Sharded(_), Replicated) => collective.kind() == CollectiveKind::AllGather,
        (Sharded(one), Sharded(two)) => collective.kind() == CollectiveKind::AllToAll && one != two,
        _ => false,
    };
    ensure(fits, || format!("cannot turn {} into {}", collective.from, collective.to))
}

/// Checks that an operand has the source layout and the pending reduction of the collective.
fn check_operand(operands: &InstrOperands, collective: &CollectiveOp, port: usize) -> CheckResult {
    let state = &operands.reads[port];
    let name = operands.operand_name(port);
    let layout = state.layout();
    if layout != collective.from {
        return match (collective.from, layout) {
            (Layout::Partial, Layout::Replicated) => fault_hint(
                format!(
                    "sums {name}, which is whole already: the result would be {} times too large",
                    collective.group.size
                ),
                "remove this collective",
            ),
            (from, layout) => {
                fault(format!("expects {name} to be {from}, but it is {layout} ({state})"))
            }
        };
    }
    let reduction = match state.pending {
        PendingReduction::Maximum => Reduction::Maximum,
        _ => Reduction::Sum,
    };
    ensure(collective.function.reduction() == reduction, || match reduction {
        Reduction::Sum => format!("takes the maximum of {name}, which is a partial sum"),
        Reduction::Maximum => format!("sums {name}, which needs a maximum"),
    })
}

/// Checks the declared bytes of the unsharded tensors: a payload with statistics, or statistics alone.
fn check_volume(operands: &InstrOperands, collective: &CollectiveOp) -> CheckResult {
    let bytes = |state: &AbstractState| state.dtype.bytes(state.rows.size * state.columns.size);
    let all: Bytes = operands.reads.iter().map(bytes).sum();
    let first = bytes(&operands.reads[0]);
    let declared = (collective.payload, collective.statistic);
    let alone = declared == (Bytes(0), all);
    let beside = declared == (first, all - first);
    ensure(alone || beside, || {
        format!(
            "declares {} bytes of payload and {} of statistics, but its tensors have {}",
            collective.payload.0, collective.statistic.0, all.0
        )
    })
}
