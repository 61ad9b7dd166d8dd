//! Transfer function of collectives within a pass, all over the tensor axis. The source layout must be
//! the operands', kind and layouts must agree, partial sums are summed and partial maxima compared,
//! and the group is the mesh's. Reducing a whole tensor would count it once per device.

use crate::kernel::CollectiveKind;
use crate::mesh::Axis;
use crate::program::{CollectiveOp, Reduction};
use crate::{Bytes, Dim, Layout};

use super::error::{CheckResult, ensure, fault, fault_hint};
use super::lattice::{AbstractState, OperandWrite, PendingSum, ShardedExtent, WriteTarget};
use super::operands::InstrOperands;

pub(super) fn transfer(
    operands: &mut InstrOperands,
    collective: &CollectiveOp,
) -> CheckResult<Vec<OperandWrite>> {
    ensure(collective.axis == Axis::Tensor, || {
        format!(
            "runs over the {} axis within a pass: only devices of the tensor axis run passes in lockstep",
            collective.axis.name()
        )
    })?;
    group_fits(collective, operands.check.context.mesh.group(Axis::Tensor))?;
    kind_fits(collective)?;
    ensure(!operands.reads.is_empty(), || "has no operand".into())?;
    operands.check_arity(operands.reads.len()..=operands.reads.len(), operands.reads.len())?;
    for port in 0..operands.reads.len() {
        operand_fits(operands, collective, port)?;
    }
    volume_fits(operands, collective)?;
    if collective.kind == CollectiveKind::AllReduce {
        let written = operands.reads.iter().enumerate().map(|(port, state)| OperandWrite {
            state: state.owing(PendingSum::Done),
            target: WriteTarget::Over(port),
        });
        return Ok(written.collect());
    }
    ensure(operands.reads.len() == 1, || "moves more than one tensor".into())?;
    let state = operands.reads[0];
    let packs = |layout| packs(operands, layout, collective.kind);
    ensure(state.packed == packs(collective.to), || {
        format!("reads {state}, which is not packed as sharding it by {} requires", collective.to)
    })?;
    let laid = lay(state, collective.to);
    let state = AbstractState { packed: packs(collective.from), ..laid };
    Ok(vec![OperandWrite { state, target: WriteTarget::Fresh }])
}

/// The dimension to pack before or unpack after, for shards that are not contiguous in memory.
fn packs(operands: &InstrOperands, layout: Layout, kind: CollectiveKind) -> Option<Dim> {
    let Layout::Sharded(dim) = layout else { return None };
    let contiguous = dim != Dim::Feature && operands.check.context.tokens_contiguous(dim);
    (kind == CollectiveKind::AllToAll || !contiguous).then_some(dim)
}

fn lay(state: AbstractState, to: Layout) -> AbstractState {
    let cut = |wanted: bool| match to {
        Layout::Sharded(dim) if wanted == (dim == Dim::Feature) => Some(dim),
        _ => None,
    };
    AbstractState {
        rows: ShardedExtent { cut: cut(false), ..state.rows },
        columns: ShardedExtent { cut: cut(true), ..state.columns },
        tensor: PendingSum::Done,
        ..state
    }
}

pub(super) fn group_fits(
    collective: &CollectiveOp,
    group: crate::mesh::DeviceGroup,
) -> CheckResult {
    let found = collective.group;
    ensure(found.size > 1, || "has a group of one device".into())?;
    if found != group {
        return fault_hint(
            format!(
                "uses a group of {} devices with stride {} on the {} axis, which is not the mesh's group of the {} axis",
                found.size,
                found.stride,
                found.axis.name(),
                group.axis.name()
            ),
            format!("{} devices with stride {}", group.size, group.stride),
        );
    }
    Ok(())
}

pub(super) fn kind_fits(collective: &CollectiveOp) -> CheckResult {
    use Layout::{Partial, Replicated, Sharded};
    let fits = match (collective.from, collective.to) {
        (Partial, Replicated) => collective.kind == CollectiveKind::AllReduce,
        (Partial, Sharded(_)) => collective.kind == CollectiveKind::ReduceScatter,
        (Sharded(_), Replicated) => collective.kind == CollectiveKind::AllGather,
        (Sharded(one), Sharded(two)) => collective.kind == CollectiveKind::AllToAll && one != two,
        _ => false,
    };
    ensure(fits, || format!("cannot turn {} into {}", collective.from, collective.to))
}

/// Checks that an operand has the source layout and needs the collective's reduction.
fn operand_fits(operands: &InstrOperands, collective: &CollectiveOp, port: usize) -> CheckResult {
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
    let combines = match state.tensor {
        PendingSum::MaximumOwed => Reduction::Maximum,
        _ => Reduction::Sum,
    };
    ensure(collective.reduction == combines, || match combines {
        Reduction::Sum => format!("takes the maximum of {name}, which is a partial sum"),
        Reduction::Maximum => format!("sums {name}, which needs a maximum"),
    })
}

/// Checks the declared volumes: bytes of the unsharded tensor, with statistics beside it or alone.
fn volume_fits(operands: &InstrOperands, collective: &CollectiveOp) -> CheckResult {
    let bytes = |state: &AbstractState| state.dtype.bytes(state.rows.size * state.columns.size);
    let all: Bytes = operands.reads.iter().map(bytes).sum();
    let first = bytes(&operands.reads[0]);
    let booked = (collective.payload, collective.statistic);
    let alone = booked == (Bytes(0), all);
    let beside = booked == (first, all - first);
    ensure(alone || beside, || {
        format!(
            "declares {} bytes of payload and {} of statistics, but its tensors have {}",
            collective.payload.0, collective.statistic.0, all.0
        )
    })
}
