//! Construction of a device's schedule from its program.

use std::collections::HashMap;
use std::sync::Arc;

use narrows_plan::program::{Action, ChunkPhase, Instr, P2pTransfer};
use narrows_runtime::{
    PartOrder, PassPart, PipelineDirection, ScheduledInstruction, TimeCategory, operand_range,
    pass_parts,
};

use super::collective::NcclCollective;
use super::graph::{
    DeviceSchedule, GraphNode, GraphSegment, NodeWork, ScheduleItem, SchedulePass, StreamId,
};
use super::transfer::{P2pKind, P2pOp};
use super::waits;
use crate::launch::{self, RingAttention, RingStep, UnsupportedInstr};
use crate::matmul::{self, MatmulContext};

impl DeviceSchedule {
    /// The schedule of a device of a pipeline stage, counted from 0.
    ///
    /// # Errors
    /// The [`UnsupportedInstr`] of the first instruction that has no kernel.
    pub fn new(context: &MatmulContext, stage: u64) -> Result<DeviceSchedule, UnsupportedInstr> {
        let device = context.device;
        let mut builder = ScheduleBuilder { context, stage, scratch_bytes: 0, segments: vec![] };
        let mut known: HashMap<(ChunkPhase, u64), Vec<ScheduleItem>> = HashMap::new();
        let mut passes: Vec<SchedulePass> = vec![];
        for part in pass_parts(device.stage) {
            let scheduled = || part.scheduled(device.stage).collect::<Vec<ScheduledInstruction>>();
            let PassPart { pass, slot, ref instructions, order } = part;
            let at = pass.chunk_phase();
            let is_whole = instructions.len() == device.stage.instructions(at).len();
            let key = (at, slot);
            let mut items = match order {
                PartOrder::AfterGathers(bucket) => vec![ScheduleItem::AwaitGathers(bucket)],
                _ => vec![],
            };
            items.extend(match (order, known.get(&key).filter(|_| is_whole)) {
                (PartOrder::BesideLastPass, _) => {
                    vec![ScheduleItem::Reductions(builder.beside_passes(&scheduled())?)]
                }
                (PartOrder::BesideNextStep(bucket), _) => {
                    let segment = builder.beside_passes(&scheduled())?;
                    vec![ScheduleItem::Gathers { bucket, segment }]
                }
                (_, Some(items)) => items.clone(),
                (_, None) => {
                    let items = builder.pass_items(&scheduled())?;
                    if is_whole {
                        known.insert(key, items.clone());
                    }
                    items
                }
            });
            let in_last_pass = order == PartOrder::BesideLastPass;
            match passes.last_mut() {
                Some(last) if in_last_pass || last.pass == pass => last.items.extend(items),
                _ => passes.push(SchedulePass { pass, items }),
            }
        }
        let mut send_bytes_max = [0; 2];
        for item in passes.iter().flat_map(|pass| &pass.items) {
            if let ScheduleItem::Transfer(transfer) = item
                && transfer.kind == P2pKind::Send
            {
                let most = &mut send_bytes_max[transfer.direction.index()];
                *most = transfer.bytes().max(*most);
            }
        }
        let ScheduleBuilder { scratch_bytes, segments, .. } = builder;
        Ok(DeviceSchedule { segments, passes, scratch_bytes, send_bytes_max })
    }
}

/// The nodes of an instruction in their order, each with the number of these after it that may run beside it.
type InstrNodes = Vec<(GraphNode, usize)>;

/// Instructions of an open segment, each with the number of instructions after it that may run beside it.
type OpenSegment = Vec<(InstrNodes, usize)>;

struct ScheduleBuilder<'a> {
    context: &'a MatmulContext<'a>,
    stage: u64,
    scratch_bytes: u64,
    segments: Vec<GraphSegment>,
}

impl ScheduleBuilder<'_> {
    /// Splits a pass at its transfers.
    fn pass_items(
        &mut self,
        pass: &[ScheduledInstruction],
    ) -> Result<Vec<ScheduleItem>, UnsupportedInstr> {
        let mut items = vec![];
        let mut segment = vec![];
        for scheduled in pass {
            let transfer = match &scheduled.instr.action {
                Action::Send(transfer) => self.transfer(scheduled, transfer, P2pKind::Send)?,
                Action::Receive(transfer) => self.transfer(scheduled, transfer, P2pKind::Recv)?,
                _ => {
                    segment.push((self.nodes(scheduled)?, scheduled.instr.overlapped_instrs));
                    continue;
                }
            };
            self.close_segment(&mut segment, &mut items);
            items.push(ScheduleItem::Transfer(Arc::new(transfer)));
        }
        self.close_segment(&mut segment, &mut items);
        Ok(items)
    }

    /// A segment of the collectives of a gradient bucket or a gather bucket, by its index.
    fn beside_passes(
        &mut self,
        bucket: &[ScheduledInstruction],
    ) -> Result<usize, UnsupportedInstr> {
        let nodes = bucket
            .iter()
            .map(|scheduled| Ok(GraphNode { stream: StreamId::Buckets, ..self.node(scheduled)? }));
        let nodes = nodes.collect::<Result<_, UnsupportedInstr>>()?;
        self.segments.push(GraphSegment { nodes });
        Ok(self.segments.len() - 1)
    }

    fn close_segment(&mut self, segment: &mut OpenSegment, items: &mut Vec<ScheduleItem>) {
        if segment.is_empty() {
            return;
        }
        items.push(ScheduleItem::Segment(self.segments.len()));
        let counts: Vec<usize> = segment.iter().map(|(nodes, _)| nodes.len()).collect();
        let mut all = vec![];
        for (index, (mut nodes, overlapped)) in std::mem::take(segment).into_iter().enumerate() {
            if let Some((_, beside)) = nodes.last_mut() {
                *beside += counts[index + 1..].iter().take(overlapped).sum::<usize>();
            }
            all.extend(nodes);
        }
        self.segments.push(GraphSegment { nodes: waits::add_waits(all) });
    }

    fn nodes(&mut self, scheduled: &ScheduledInstruction) -> Result<InstrNodes, UnsupportedInstr> {
        match launch::ring_attention(self.context.device, scheduled)? {
            Some(ring) => Ok(self.ring_nodes(scheduled, ring)),
            None => Ok(vec![(self.node(scheduled)?, 0)]),
        }
    }

    /// The nodes of ring attention: of each step, its shift runs beside the node after it.
    fn ring_nodes(&mut self, scheduled: &ScheduledInstruction, ring: RingAttention) -> InstrNodes {
        self.scratch_bytes = self.scratch_bytes.max(ring.scratch_bytes);
        let instr = scheduled.instr;
        let mut nodes: InstrNodes = vec![];
        for RingStep { before, shift, beside, after } in ring.steps {
            let overlapped = usize::from(!beside.is_empty());
            let launches = |launches| (NodeWork::Launches(launches), 0);
            let works = [launches(before)].into_iter();
            let works = works.chain(shift.map(|shift| (NodeWork::Shift(shift), overlapped)));
            for (work, overlapped) in works.chain([launches(beside), launches(after)]) {
                let (stream, category) = match &work {
                    NodeWork::Launches(launches) if launches.is_empty() => continue,
                    NodeWork::Shift(_) => (StreamId::Collectives, TimeCategory::CollectiveExposed),
                    _ => (StreamId::Compute, TimeCategory::of_instruction(instr)),
                };
                let begins_instr = nodes.is_empty();
                nodes.push((
                    GraphNode { begins_instr, ..graph_node(instr, work, stream, category) },
                    overlapped,
                ));
            }
        }
        nodes
    }

    fn node(&mut self, scheduled: &ScheduledInstruction) -> Result<GraphNode, UnsupportedInstr> {
        let instr = scheduled.instr;
        let device = self.context.device;
        let work = match &instr.action {
            Action::Gemm(_) => {
                let matmul = matmul::lower_gemm(self.context, scheduled)?;
                NodeWork::Matmul(Box::new(matmul))
            }
            Action::Collective(op) => {
                NodeWork::Collective(NcclCollective::new(device, scheduled, op)?)
            }
            _ => {
                let launches = launch::kernel_launches(device, scheduled)?;
                self.scratch_bytes = self.scratch_bytes.max(launches.scratch_bytes);
                match launch::fused_attention(device, scheduled)? {
                    Some(fused) => NodeWork::Attention(Box::new(fused), launches.launches),
                    None => NodeWork::Launches(launches.launches),
                }
            }
        };
        let stream = match &work {
            NodeWork::Collective(_) if instr.overlaps_collectives() => StreamId::ShardedParameters,
            NodeWork::Collective(_) => StreamId::Collectives,
            _ => StreamId::Compute,
        };
        Ok(graph_node(instr, work, stream, TimeCategory::of_instruction(instr)))
    }

    fn transfer(
        &self,
        scheduled: &ScheduledInstruction,
        transfer: &P2pTransfer,
        kind: P2pKind,
    ) -> Result<P2pOp, UnsupportedInstr> {
        let device = self.context.device;
        let instr = scheduled.instr;
        let sends = kind == P2pKind::Send;
        let direction = PipelineDirection::of_phase(scheduled.pass.phase);
        let stages = device.context.mesh.pipeline;
        let (stage, peer) = (self.stage, u64::from(transfer.peer_stage));
        if kind.peer(direction, stage, stages) != peer {
            let reason = format!("stage {peer} is not a neighbour of stage {stage}");
            return Err(UnsupportedInstr::new(scheduled, reason));
        }
        let accesses = if sends { &instr.reads } else { &instr.writes };
        let operands = accesses
            .iter()
            .map(|access| operand_range(device.stage, access, scheduled.slot))
            .collect();
        Ok(P2pOp {
            direction,
            kind,
            operands,
            origin: instr.origin.to_string(),
            category: TimeCategory::of_instruction(instr),
        })
    }
}

/// The first node of an instruction, without waits.
fn graph_node(
    instr: &Instr,
    work: NodeWork,
    stream: StreamId,
    category: TimeCategory,
) -> GraphNode {
    GraphNode {
        stream,
        work,
        waits_for: vec![],
        is_awaited: false,
        category,
        begins_instr: true,
        name: instr.action.name(),
        origin: instr.origin.to_string(),
        updates_weights: matches!(&instr.action, Action::Fused(op) if op.updates_parameters()),
    }
}
