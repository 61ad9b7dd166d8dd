//! The work of a device in one step, built once: every instruction as launches, a matmul or a collective, with
//! its stream and its dependencies.
//!
//! A pass of the pipeline schedule is split at its transfers. The instructions between two transfers are a
//! [`GraphSegment`], which is captured as one CUDA graph. Passes of one phase whose microbatches use the same
//! buffer slots share their segments, so there are at most two per microbatch in flight, plus those of the step
//! phase, of a last backward pass with gradient reductions beside it, and of a first forward pass that awaits weights.
//! Transfers stay outside of graphs, on streams of their own: a graph ends when everything in it has ended, and a stage
//! that waited for its send before receiving would deadlock with a neighbour that does the same.
//!
//! Gradient reductions that may run during the last backward pass divide that pass further: each is a
//! [`ScheduleItem::Reductions`] on a stream of its own. Gathers of updated weights follow on that stream at the end of the
//! step ([`ScheduleItem::Gathers`]); the first pass of the next step is divided where it awaits them.
//!
//! Within a segment, collectives run on streams beside that of the computation ([`StreamId`]): those of sharded parameters,
//! which overlap with collectives of activations, have one of their own. `waits` derives the dependencies between the streams
//! from what the program overlaps. Ring attention is several nodes: the shift of each step runs on the stream of collectives,
//! beside the launches of the step.
//!
//! Nothing here needs a GPU.

mod builder;
mod collective;
mod graph;
mod transfer;
mod waits;

pub use collective::{CollectiveBuffer, NcclCollective};
pub use graph::{
    DeviceSchedule, GraphNode, GraphSegment, NodeWork, ScheduleItem, SchedulePass, StreamId,
};
pub use transfer::{P2pKind, P2pOp};
