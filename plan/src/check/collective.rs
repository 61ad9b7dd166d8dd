//! Collectives within a pass, all over the tensor axis. The layouts before must be those of the
//! operands, kind and layouts must fit each other, a sum is added and a maximum compared, and the
//! group is the mesh's. Reducing what is not owed would count it once for every device.

use crate::kernel::CollectiveKind;
use crate::mesh::Axis;
use crate::program::{CollectiveOp, Reduction};
use crate::{Bytes, Dim, Layout};

use super::error::{CheckResult, ensure, fault, fault_hint};
use super::lattice::{AbstractState, PendingSum, ShardedExtent};
use super::site::{InstrOperands, OperandWrite, WriteTarget};

pub(super) fn transfer(
    site: &mut InstrOperands,
    exchange: &CollectiveOp,
) -> CheckResult<Vec<OperandWrite>> {
    ensure(exchange.axis == Axis::Tensor, || {
        format!(
            "runs over the {} axis within a pass, where its members are not in step",
            exchange.axis.name()
        )
    })?;
    group_fits(exchange, site.check.context.mesh.group(Axis::Tensor))?;
    kind_fits(exchange)?;
    ensure(!site.reads.is_empty(), || "has no operand".into())?;
    site.operands(site.reads.len()..=site.reads.len(), site.reads.len())?;
    for port in 0..site.reads.len() {
        operand_fits(site, exchange, port)?;
    }
    volume_fits(site, exchange)?;
    if exchange.kind == CollectiveKind::AllReduce {
        let written = site.reads.iter().enumerate().map(|(port, state)| OperandWrite {
            state: state.owing(PendingSum::Done),
            place: WriteTarget::Over(port),
        });
        return Ok(written.collect());
    }
    ensure(site.reads.len() == 1, || "carries more than its tensor".into())?;
    let state = site.reads[0];
    let packs = |layout| packs(site, layout, exchange.kind);
    ensure(state.packed == packs(exchange.to), || {
        format!("finds {state}, which is not how cutting it as {} needs it packed", exchange.to)
    })?;
    let laid = lay(state, exchange.to);
    let state = AbstractState { packed: packs(exchange.from), ..laid };
    Ok(vec![OperandWrite { state, place: WriteTarget::Fresh }])
}

/// Shards that are not contiguous in memory are packed before and unpacked after.
fn packs(site: &InstrOperands, layout: Layout, kind: CollectiveKind) -> Option<Dim> {
    let Layout::Sharded(dim) = layout else { return None };
    let contiguous = dim != Dim::Feature && site.check.context.tokens_contiguous(dim);
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

pub(super) fn group_fits(exchange: &CollectiveOp, group: crate::mesh::DeviceGroup) -> CheckResult {
    let found = exchange.group;
    ensure(found.size > 1, || "has a group of one device".into())?;
    if found != group {
        return fault_hint(
            format!(
                "runs over {} devices {} apart on the {} axis, not the mesh's group of the {} axis",
                found.size,
                found.stride,
                found.axis.name(),
                group.axis.name()
            ),
            format!("{} devices {} apart", group.size, group.stride),
        );
    }
    Ok(())
}

pub(super) fn kind_fits(exchange: &CollectiveOp) -> CheckResult {
    use Layout::{Partial, Replicated, Sharded};
    let fits = match (exchange.from, exchange.to) {
        (Partial, Replicated) => exchange.kind == CollectiveKind::AllReduce,
        (Partial, Sharded(_)) => exchange.kind == CollectiveKind::ReduceScatter,
        (Sharded(_), Replicated) => exchange.kind == CollectiveKind::AllGather,
        (Sharded(one), Sharded(two)) => exchange.kind == CollectiveKind::AllToAll && one != two,
        _ => false,
    };
    ensure(fits, || format!("does not turn {} into {}", exchange.from, exchange.to))
}

/// What the operand is must be what the collective takes.
fn operand_fits(site: &InstrOperands, exchange: &CollectiveOp, port: usize) -> CheckResult {
    let state = &site.reads[port];
    let name = site.operand_name(port);
    let layout = state.layout();
    if layout != exchange.from {
        return match (exchange.from, layout) {
            (Layout::Partial, Layout::Replicated) => fault_hint(
                format!(
                    "sums {name}, which is whole already: every device would count it again, and \
                     it would be {} times too large",
                    exchange.group.size
                ),
                "remove this collective",
            ),
            (from, layout) => {
                fault(format!("takes {name} for {from}, but it is {layout} ({state})"))
            }
        };
    }
    let combines = match state.tensor {
        PendingSum::MaximumOwed => Reduction::Maximum,
        _ => Reduction::Sum,
    };
    ensure(exchange.reduction == combines, || match combines {
        Reduction::Sum => format!("takes the maximum of {name}, which is summands"),
        Reduction::Maximum => format!("adds {name}, of which the maximum is wanted"),
    })
}

/// Volumes count the unsharded tensor; statistics ride along, or go alone.
fn volume_fits(site: &InstrOperands, exchange: &CollectiveOp) -> CheckResult {
    let bytes = |state: &AbstractState| state.dtype.bytes(state.rows.size * state.columns.size);
    let all: Bytes = site.reads.iter().map(bytes).sum();
    let first = bytes(&site.reads[0]);
    let booked = (exchange.payload, exchange.statistic);
    let alone = booked == (Bytes(0), all);
    let beside = booked == (first, all - first);
    ensure(alone || beside, || {
        format!(
            "is booked as {} bytes and {} of statistics, but its tensors have {}",
            exchange.payload.0, exchange.statistic.0, all.0
        )
    })
}
