//! Schedules: passes of segments and transfers, and segments of nodes.

use std::collections::BTreeMap;
use std::sync::Arc;

use narrows_plan::Bytes;
use narrows_plan::kernel::{Collective, CollectiveKind};
use narrows_plan::program::MicrobatchPass;
use narrows_runtime::{DeviceReport, PipelineDirection, TimeCategory};

use super::collective::NcclCollective;
use super::transfer::{P2pKind, P2pOp};
use crate::kernel_source::KernelFamily;
use crate::launch::{FusedAttention, Launch, RingShift};
use crate::matmul::Matmul;

/// The work of a device in one step.
#[derive(Debug)]
pub struct DeviceSchedule {
    /// Segments, to which passes refer by index.
    pub segments: Vec<GraphSegment>,
    /// Passes of a step in their order, the step phase last.
    pub passes: Vec<SchedulePass>,
    /// Scratch memory for the launches of any instruction, in bytes.
    pub scratch_bytes: u64,
    /// Bytes of the largest send in each [`PipelineDirection`].
    pub send_bytes_max: [u64; 2],
}

/// The items of a pass of a microbatch, or of the step phase.
#[derive(Debug)]
pub struct SchedulePass {
    /// The pass.
    pub pass: MicrobatchPass,
    /// Items in their order. A microbatch's tokens are copied before the first.
    pub items: Vec<ScheduleItem>,
}

/// A part of a pass.
#[derive(Clone, Debug)]
pub enum ScheduleItem {
    /// A segment, by its index in the schedule.
    Segment(usize),
    /// A segment of gradient reductions, by its index in the schedule. It begins when all items before have ended, and
    /// runs beside those after it; the step phase begins when it has ended.
    Reductions(usize),
    /// The segment of a gather bucket, by its index in the schedule. It begins when all items before have ended, and runs
    /// beside the next step.
    Gathers {
        /// Index of the bucket in its stage.
        bucket: usize,
        /// Index of the segment.
        segment: usize,
    },
    /// Items from here on begin after the gathers of this bucket of the step before, if there was one.
    AwaitGathers(usize),
    /// A transfer.
    Transfer(Arc<P2pOp>),
}

/// Instructions without a transfer among them.
#[derive(Debug, Default)]
pub struct GraphSegment {
    /// Nodes in an order in which executing them sequentially is correct.
    pub nodes: Vec<GraphNode>,
}

/// An instruction as a device executes it, or a part of one: ring attention has several nodes.
#[derive(Debug)]
pub struct GraphNode {
    /// Stream of the node.
    pub stream: StreamId,
    /// Work of the node.
    pub work: NodeWork,
    /// Indices of the nodes of other streams that must have ended before, at most one of each stream.
    pub waits_for: Vec<usize>,
    /// Whether a node of another stream waits for this one.
    pub is_awaited: bool,
    /// Category of its time.
    pub category: TimeCategory,
    /// Whether the node is the first of its instruction.
    pub begins_instr: bool,
    /// Name of the instruction.
    pub name: &'static str,
    /// Op that the instruction belongs to, for messages.
    pub origin: String,
    /// Whether it updates weights; such nodes are skipped where only gradients are computed.
    pub updates_weights: bool,
}

/// The work of a node.
#[derive(Debug)]
pub enum NodeWork {
    /// Kernel launches, one after the other.
    Launches(Vec<Launch>),
    /// Attention: by cuDNN where it has a plan for it, otherwise by launches.
    Attention(Box<FusedAttention>, Vec<Launch>),
    /// A matmul.
    Matmul(Box<Matmul>),
    /// A collective.
    Collective(NcclCollective),
    /// A shift of ring attention.
    Shift(RingShift),
}

/// The stream of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StreamId {
    /// Kernels and matmuls.
    Compute,
    /// Collectives of activations and of the step phase, and others that overlap with no collective.
    Collectives,
    /// Gathers of sharded weights and reductions of their gradients that overlap with passes.
    ShardedParameters,
    /// Gradient reductions during the last backward pass, and gathers of weights during the next forward pass.
    Buckets,
}

impl StreamId {
    /// All streams.
    pub const ALL: [StreamId; 4] =
        [StreamId::Compute, StreamId::Collectives, StreamId::ShardedParameters, StreamId::Buckets];

    /// The streams of collectives.
    pub const OF_COLLECTIVES: [StreamId; 3] =
        [StreamId::Collectives, StreamId::ShardedParameters, StreamId::Buckets];
}

impl ScheduleItem {
    /// Whether the item is the collectives of a bucket, which have a stream of their own.
    pub fn is_bucket(&self) -> bool {
        matches!(self, ScheduleItem::Reductions(_) | ScheduleItem::Gathers { .. })
    }

    /// The segment of the item, by its index in the schedule.
    pub fn segment(&self) -> Option<usize> {
        match self {
            ScheduleItem::Segment(segment)
            | ScheduleItem::Reductions(segment)
            | ScheduleItem::Gathers { segment, .. } => Some(*segment),
            ScheduleItem::AwaitGathers(_) | ScheduleItem::Transfer(_) => None,
        }
    }
}

impl NodeWork {
    /// The collective of the node; a shift is one.
    pub fn collective(&self) -> Option<Collective> {
        let (kind, payload, group) = match self {
            NodeWork::Collective(nccl) => (nccl.function.kind(), nccl.payload_bytes(), nccl.group),
            NodeWork::Shift(shift) => (CollectiveKind::Shift, shift.payload_bytes(), shift.group),
            _ => return None,
        };
        Some(Collective { kind, payload: Bytes(payload), group })
    }
}

impl DeviceSchedule {
    /// All kernel launches.
    pub fn launches(&self) -> impl Iterator<Item = &Launch> {
        self.node_works().flat_map(|work| match work {
            NodeWork::Launches(launches) | NodeWork::Attention(_, launches) => launches.as_slice(),
            _ => &[],
        })
    }

    /// All attentions that have a fused form.
    pub fn fused_attentions(&self) -> impl Iterator<Item = &FusedAttention> {
        self.node_works().filter_map(|work| match work {
            NodeWork::Attention(fused, _) => Some(&**fused),
            _ => None,
        })
    }

    /// All matmuls.
    pub fn matmuls(&self) -> impl Iterator<Item = &Matmul> {
        self.node_works().filter_map(|work| match work {
            NodeWork::Matmul(matmul) => Some(&**matmul),
            _ => None,
        })
    }

    /// All kernels, each with the maximum of its dynamic shared memory, in bytes.
    pub fn kernels(&self) -> BTreeMap<(KernelFamily, String), u32> {
        let mut kernels = BTreeMap::new();
        for launch in self.launches() {
            let most = kernels.entry((launch.family, launch.kernel.clone())).or_insert(0);
            *most = launch.shared_bytes.max(*most);
        }
        kernels
    }

    /// Whether the device has transfers of this kind in this direction.
    pub fn has_transfers(&self, direction: PipelineDirection, kind: P2pKind) -> bool {
        let items = self.passes.iter().flat_map(|pass| &pass.items);
        items.into_iter().any(|item| {
            matches!(item, ScheduleItem::Transfer(t) if t.direction == direction && t.kind == kind)
        })
    }

    fn node_works(&self) -> impl Iterator<Item = &NodeWork> {
        self.segments.iter().flat_map(|segment| &segment.nodes).map(|node| &node.work)
    }
}

impl GraphSegment {
    /// Adds its instructions and collectives to a report.
    pub fn count(&self, report: &mut DeviceReport) {
        for node in &self.nodes {
            if node.begins_instr {
                report.count_instruction(node.name);
            }
            if let Some(collective) = node.work.collective() {
                report.count_collective(collective.group.axis, &collective);
            }
        }
    }

    /// Number of its instructions.
    pub fn instructions(&self) -> usize {
        self.nodes.iter().filter(|node| node.begins_instr).count()
    }

    /// The streams of its nodes besides that of the computation.
    pub fn collective_streams(&self) -> impl Iterator<Item = StreamId> {
        let streams = StreamId::OF_COLLECTIVES.into_iter();
        streams.filter(|stream| self.nodes.iter().any(|node| node.stream == *stream))
    }
}
