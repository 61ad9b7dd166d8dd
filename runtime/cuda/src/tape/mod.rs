//! What a device does in a step, made once: every instruction as launches, a product, or a
//! collective, on which stream, and after what.
//!
//! A turn of the schedule is cut at its transfers: what lies between two is a [`GraphSegment`], which is
//! captured as one graph. Turns of one phase whose microbatches use the same copies of buffers have the
//! same pieces, so there are at most two for each microbatch in flight, and those of the step phase.
//! Transfers stay outside, on streams of their own: a graph ends when all that is in it has, and a
//! stage that waited for its send to end before it received would wait for a neighbour that does the
//! same.
//!
//! Within a piece, collectives have a stream beside that of the computation ([`StreamId`]). `waits.rs` says what
//! of one must wait for what of the other, from the bytes that they touch and from nothing else.
//!
//! Nothing here needs a GPU.

mod collective;
mod waits;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use narrows_plan::Bytes;
use narrows_plan::kernel::Collective;
use narrows_plan::program::{Action, FusedOp, P2pTransfer, Phase};

use super::launch::{
    self, Argument, KernelFamily, Launch, MemoryAccess, MemorySpace, UnsupportedInstr,
};
use super::products::{self, Matmul, MatmulSetting};
use narrows_runtime::DeviceReport;
use narrows_runtime::TimeCategory;
use narrows_runtime::operand_range;
use narrows_runtime::{ScheduledInstruction, scheduled_instructions};

pub use collective::{CollectiveBuffer, GroupKey, NcclCollective};
pub use waits::StreamId;

/// Everything that a device does in a step.
#[derive(Debug)]
pub struct DeviceSchedule {
    /// What is done between transfers.
    pub pieces: Vec<GraphSegment>,
    /// The turns of a step in their order, the step phase last.
    pub turns: Vec<SchedulePass>,
    /// Scratch memory that the launches of any instruction need, in bytes.
    pub scratch_bytes: u64,
    /// Bytes of the largest transfer that is sent either way.
    pub sent_bytes: [u64; 2],
}

/// A turn: its tokens are loaded, then its legs follow each other.
#[derive(Debug)]
pub struct SchedulePass {
    /// Its pass.
    pub phase: Phase,
    /// Its microbatch; 0 in the step phase.
    pub microbatch: u64,
    /// What it does.
    pub legs: Vec<ScheduleItem>,
}

/// A part of a turn.
#[derive(Clone, Debug)]
pub enum ScheduleItem {
    /// A piece, by its number.
    Piece(usize),
    /// A transfer.
    Transfer(Arc<P2pOp>),
}

/// Instructions without a transfer among them.
#[derive(Debug, Default)]
pub struct GraphSegment {
    /// What is done, in an order in which it could be done one after the other.
    pub entries: Vec<GraphNode>,
}

/// An instruction as a device does it.
#[derive(Debug)]
pub struct GraphNode {
    /// The stream.
    pub lane: StreamId,
    /// What is done.
    pub work: NodeWork,
    /// The entry of the other lane, by its number in the piece, that must be over before.
    pub waits: Option<usize>,
    /// Whether an entry of the other lane waits for this one.
    pub awaited: bool,
    /// What its time counts as.
    pub part: TimeCategory,
    /// The instruction's name.
    pub name: &'static str,
    /// Where it comes from, for messages.
    pub origin: String,
    /// Whether it changes weights: it is left out where gradients alone are wanted.
    pub updates: bool,
}

/// What an instruction is to a device.
#[derive(Debug)]
pub enum NodeWork {
    /// Kernels, one after the other.
    Launches(Vec<Launch>),
    /// A product.
    Product(Box<Matmul>),
    /// A collective.
    Joint(NcclCollective),
}

/// A transfer to or from a neighbouring stage.
#[derive(Clone, Debug, PartialEq)]
pub struct P2pOp {
    /// Whether it goes towards later stages.
    pub onward: bool,
    /// Whether this device sends it.
    pub sends: bool,
    /// The operands in the arena.
    pub operands: Vec<Range<u64>>,
    /// Where it comes from, for messages.
    pub origin: String,
    /// What its time counts as.
    pub part: TimeCategory,
}

impl P2pOp {
    /// Bytes of all operands.
    pub fn bytes(&self) -> u64 {
        self.operands.iter().map(|range| range.end - range.start).sum()
    }

    /// The instruction's name.
    pub fn name(&self) -> &'static str {
        if self.sends { "send" } else { "receive" }
    }

    /// Which of the two ways it goes: 0 for onward, 1 for back.
    pub fn way(&self) -> usize {
        usize::from(!self.onward)
    }
}

impl DeviceSchedule {
    /// The tape of a device of a stage, counted from 0. `setting` holds the device and what products depend
    /// on besides.
    ///
    /// # Errors
    /// A [`UnsupportedInstr`] of the first instruction that no kernel does.
    pub fn new(setting: &MatmulSetting, stage: u64) -> Result<DeviceSchedule, UnsupportedInstr> {
        let device = setting.device;
        let mut maker = ScheduleBuilder { setting, stage, scratch_bytes: 0, pieces: vec![] };
        let mut known: HashMap<(Phase, u64), Vec<ScheduleItem>> = HashMap::new();
        let mut turns = vec![];
        let mut moments = scheduled_instructions(device.stage).peekable();
        while let Some(first) = moments.peek().copied() {
            let (phase, microbatch) = (first.phase, first.microbatch);
            let same = |moment: &ScheduledInstruction| {
                (moment.phase, moment.microbatch) == (phase, microbatch)
            };
            let turn: Vec<ScheduledInstruction> =
                std::iter::from_fn(|| moments.next_if(same)).collect();
            let legs = match known.get(&(phase, first.slot)) {
                Some(legs) => legs.clone(),
                None => {
                    let legs = maker.legs(&turn)?;
                    known.insert((phase, first.slot), legs.clone());
                    legs
                }
            };
            turns.push(SchedulePass { phase, microbatch, legs });
        }
        let mut sent_bytes = [0; 2];
        for leg in known.values().flatten() {
            if let ScheduleItem::Transfer(transfer) = leg
                && transfer.sends
            {
                let most = &mut sent_bytes[transfer.way()];
                *most = transfer.bytes().max(*most);
            }
        }
        let ScheduleBuilder { scratch_bytes, pieces, .. } = maker;
        Ok(DeviceSchedule { pieces, turns, scratch_bytes, sent_bytes })
    }

    /// All that is launched.
    pub fn launches(&self) -> impl Iterator<Item = &Launch> {
        self.works().flat_map(|work| match work {
            NodeWork::Launches(launches) => launches.as_slice(),
            _ => &[],
        })
    }

    /// All products.
    pub fn products(&self) -> impl Iterator<Item = &Matmul> {
        self.works().filter_map(|work| match work {
            NodeWork::Product(matmul) => Some(&**matmul),
            _ => None,
        })
    }

    /// The kernels it needs, with the shared memory that each must be allowed.
    pub fn kernels(&self) -> BTreeMap<(KernelFamily, String), u32> {
        let mut all = BTreeMap::new();
        for launch in self.launches() {
            let most = all.entry((launch.family, launch.kernel.clone())).or_insert(0);
            *most = launch.shared_bytes.max(*most);
        }
        all
    }

    /// Whether it has transfers of this kind.
    pub fn transfers(&self, onward: bool, sends: bool) -> bool {
        let legs = self.turns.iter().flat_map(|turn| &turn.legs);
        legs.into_iter()
            .any(|leg| matches!(leg, ScheduleItem::Transfer(t) if t.onward == onward && t.sends == sends))
    }

    fn works(&self) -> impl Iterator<Item = &NodeWork> {
        self.pieces.iter().flat_map(|piece| &piece.entries).map(|entry| &entry.work)
    }
}

impl GraphSegment {
    /// Counts what is done in it.
    pub fn count(&self, report: &mut DeviceReport) {
        for entry in &self.entries {
            report.count_instruction(entry.name);
            if let NodeWork::Joint(joint) = &entry.work {
                let collective = Collective {
                    kind: joint.kind,
                    payload: Bytes(joint.whole_bytes()),
                    group: joint.group,
                };
                report.count_collective(joint.sharing.axis, &collective);
            }
        }
    }

    /// Whether it has collectives.
    pub fn is_joint(&self) -> bool {
        self.entries.iter().any(|entry| entry.lane == StreamId::Collectives)
    }
}

/// Makes pieces.
struct ScheduleBuilder<'a> {
    setting: &'a MatmulSetting<'a>,
    stage: u64,
    scratch_bytes: u64,
    pieces: Vec<GraphSegment>,
}

impl ScheduleBuilder<'_> {
    /// What a turn does, cut at its transfers.
    fn legs(
        &mut self,
        turn: &[ScheduledInstruction],
    ) -> Result<Vec<ScheduleItem>, UnsupportedInstr> {
        let mut legs = vec![];
        let mut piece = vec![];
        for moment in turn {
            let transfer = match &moment.instr.action {
                Action::Send(hop) => self.transfer(moment, hop, true)?,
                Action::Receive(hop) => self.transfer(moment, hop, false)?,
                _ => {
                    piece.push(self.entry(moment)?);
                    continue;
                }
            };
            self.close(&mut piece, &mut legs);
            legs.push(ScheduleItem::Transfer(Arc::new(transfer)));
        }
        self.close(&mut piece, &mut legs);
        Ok(legs)
    }

    fn close(
        &mut self,
        entries: &mut Vec<(GraphNode, Vec<TouchedRange>)>,
        legs: &mut Vec<ScheduleItem>,
    ) {
        if entries.is_empty() {
            return;
        }
        legs.push(ScheduleItem::Piece(self.pieces.len()));
        self.pieces.push(GraphSegment { entries: waits::order(std::mem::take(entries)) });
    }

    fn entry(
        &mut self,
        moment: &ScheduledInstruction,
    ) -> Result<(GraphNode, Vec<TouchedRange>), UnsupportedInstr> {
        let instr = moment.instr;
        let device = self.setting.device;
        let (work, touched) = match &instr.action {
            Action::Gemm(_) => {
                let matmul = products::matmul(self.setting, moment)?;
                let touched = product_touches(&matmul);
                (NodeWork::Product(Box::new(matmul)), touched)
            }
            Action::Collective(exchange) => {
                let joint = NcclCollective::new(device, moment, exchange)?;
                let touched = joint.touches();
                (NodeWork::Joint(joint), touched)
            }
            _ => {
                let made = launch::pass(device, moment)?;
                self.scratch_bytes = self.scratch_bytes.max(made.scratch_bytes);
                let touched = launch_touches(&made.launches);
                (NodeWork::Launches(made.launches), touched)
            }
        };
        let lane = match &work {
            NodeWork::Joint(_) => StreamId::Collectives,
            _ => StreamId::Compute,
        };
        let entry = GraphNode {
            lane,
            work,
            waits: None,
            awaited: false,
            part: TimeCategory::of_instruction(instr),
            name: instr.action.name(),
            origin: instr.origin.clone(),
            updates: matches!(instr.action, Action::Fused(FusedOp::AdamW)),
        };
        Ok((entry, touched))
    }

    fn transfer(
        &self,
        moment: &ScheduledInstruction,
        hop: &P2pTransfer,
        sends: bool,
    ) -> Result<P2pOp, UnsupportedInstr> {
        let device = self.setting.device;
        let instr = moment.instr;
        let refused = |why: &str| UnsupportedInstr {
            pass: instr.action.name(),
            origin: instr.origin.clone(),
            why: why.into(),
        };
        let (mine, other) = (self.stage, u64::from(hop.peer_stage));
        if mine.abs_diff(other) != 1 {
            return Err(refused("it names a stage that is no neighbour"));
        }
        let side = if sends { &instr.reads } else { &instr.writes };
        let operands =
            side.iter().map(|access| operand_range(device.stage, access, moment.slot)).collect();
        let onward = (other > mine) == sends;
        Ok(P2pOp {
            onward,
            sends,
            operands,
            origin: instr.origin.clone(),
            part: TimeCategory::of_instruction(instr),
        })
    }
}

/// Bytes of the arena that an entry touches.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TouchedRange {
    bytes: Range<u64>,
    writes: bool,
}

fn launch_touches(launches: &[Launch]) -> Vec<TouchedRange> {
    let arguments = launches.iter().flat_map(|launch| &launch.arguments);
    let spans = arguments.filter_map(|argument| match argument {
        Argument::Memory(span) if span.memory == MemorySpace::Arena && span.rows > 0 => Some(span),
        _ => None,
    });
    spans
        .map(|span| TouchedRange {
            bytes: span.begin..span.row(span.rows - 1).end,
            writes: span.touch != MemoryAccess::Read,
        })
        .collect()
}

fn product_touches(matmul: &Matmul) -> Vec<TouchedRange> {
    let key = &matmul.key;
    let sides = [(&key.a, matmul.a, false), (&key.b, matmul.b, false), (&key.c, matmul.c, true)];
    sides
        .map(|(stored, place, writes)| {
            let columns = stored.columns.saturating_sub(1) * stored.leading + stored.rows;
            let last = key.batch.saturating_sub(1) * stored.batch_stride;
            let bytes = stored.dtype.width() * (columns + last);
            TouchedRange { bytes: place.offset..place.offset + bytes, writes }
        })
        .into()
}
