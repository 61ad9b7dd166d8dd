//! The exact step of LORO: the factor pairs of a stage, with the transfers of each block.

use crate::emit::OperandSlot;
use crate::graph::OpId;
use crate::mesh::{Axis, DeviceGroup};
use crate::model::{WeightId, WeightShape};
use crate::program::{BufferId, HostAction, HostInstr, OwnedPair};
use crate::strategy::OpParameters;

use super::stage_lowering::{BufferKey, SegmentSite, StageLowering};

/// Pairs of a device that its host decomposes at once, where it has as many threads.
const PAIRS_PER_DEVICE: u64 = 8;

/// Elements of such pairs, at most, beyond those of one block. A decomposition needs about 100 bytes for each.
const ELEMENTS_PER_DEVICE: u64 = 1 << 27;

/// The pairs of a block, with the buffers of their factors.
#[derive(Default)]
struct BlockPairs {
    pairs: Vec<OwnedPair>,
    read: Vec<BufferId>,
    written: Vec<BufferId>,
}

impl StageLowering<'_> {
    /// The instructions of the exact step, where the optimizer has exact steps.
    pub(super) fn exact_step(&mut self, sites: &[SegmentSite]) {
        let context = self.plan.context;
        if context.loro_every.is_none() {
            return;
        }
        let owners = context.mesh.devices_per_stage();
        let mut blocks: Vec<BlockPairs> = vec![];
        for site in sites {
            if let Some(block) = self.pairs_of_block(site) {
                blocks.push(block);
            }
            let pairs = || blocks.iter().flat_map(|block| &block.pairs);
            let elements: u64 = pairs().map(OwnedPair::elements).sum();
            if pairs().count() as u64 >= PAIRS_PER_DEVICE * owners
                || elements >= ELEMENTS_PER_DEVICE * owners
            {
                self.push_exact_step(std::mem::take(&mut blocks));
            }
        }
        self.push_exact_step(blocks);
        for (index, pair) in (0..).zip(&mut self.program.exact_step.pairs) {
            pair.owner = index % owners;
        }
    }

    /// The pairs of a block, which have no owner yet; `None` for a segment without pairs.
    fn pairs_of_block(&self, site: &SegmentSite) -> Option<BlockPairs> {
        let block = site.block?;
        let mut found = BlockPairs::default();
        let mut shapes: Vec<WeightShape> = vec![];
        for op in site.plan.segment.op_ids() {
            let Some(OpParameters { members, .. }) = self.parameters(*site, op) else { continue };
            let is_factor = |member: &WeightShape| {
                matches!(member.weight, WeightId::FactorA(_) | WeightId::FactorB(_))
            };
            if members.iter().any(is_factor) {
                shapes.extend(members);
                self.add_buffers(site, op, &mut found);
            }
        }
        for a in &shapes {
            let WeightId::FactorA(linear) = a.weight else { continue };
            let is_other = |shape: &&WeightShape| shape.weight == WeightId::FactorB(linear);
            let Some(b) = shapes.iter().find(is_other) else { continue };
            let WeightShape { rows: d_in, columns: rank, .. } = *a;
            let pair = OwnedPair { block, linear, d_in, rank, d_out: b.columns, owner: 0 };
            found.pairs.push(pair);
        }
        (!found.pairs.is_empty()).then_some(found)
    }

    /// Adds the buffers of the weights of an op: the moments and the fp32 weights, or their master copies, are read; weights
    /// and master copies are written.
    fn add_buffers(&self, site: &SegmentSite, op: OpId, block: &mut BlockPairs) {
        let buffer = |slot| self.buffers.get(&BufferKey::Parameter(site.instance, op, slot));
        let weight = buffer(OperandSlot::Weight(0));
        let master = buffer(OperandSlot::Master(0));
        let moments = [OperandSlot::FirstMoment(0), OperandSlot::SecondMoment(0)].map(buffer);
        block.read.extend(master.or(weight));
        block.read.extend(moments.into_iter().flatten());
        block.written.extend([weight, master].into_iter().flatten());
    }

    /// Decomposes the pairs of these blocks at once.
    fn push_exact_step(&mut self, blocks: Vec<BlockPairs>) {
        let context = &self.plan.context;
        let [tensor, data] = [Axis::Tensor, Axis::Data].map(|axis| context.mesh.group(axis));
        let divided = |groups: [DeviceGroup; 2]| groups.into_iter().filter(|group| group.size > 1);
        let update_groups: Vec<DeviceGroup> = divided([tensor, data]).collect();
        let exact_step = &mut self.program.exact_step;
        let first = exact_step.pairs.len();
        let mut writes = vec![];
        for BlockPairs { pairs: of_block, read, written } in blocks {
            let start = exact_step.pairs.len();
            exact_step.pairs.extend(of_block);
            let pairs = start..exact_step.pairs.len();
            let instr = |action| HostInstr { action, pairs: pairs.clone() };
            exact_step.instrs.push(instr(HostAction::Read(read)));
            let factor_groups = divided([tensor, context.shard_group()]);
            exact_step.instrs.extend(factor_groups.map(|g| instr(HostAction::SumFactors(g))));
            exact_step.instrs.push(instr(HostAction::Keep));
            writes.push(instr(HostAction::Place));
            writes.extend(update_groups.iter().map(|g| instr(HostAction::SumUpdates(*g))));
            writes.push(instr(HostAction::Write(written)));
        }
        let pairs = first..exact_step.pairs.len();
        if !pairs.is_empty() {
            exact_step.instrs.push(HostInstr { action: HostAction::Decompose, pairs });
            exact_step.instrs.extend(writes);
        }
    }
}
