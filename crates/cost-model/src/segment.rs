//! Prices the search space of a segment: every choice by the kernels of its templates.
//!
//! ```text
//! time(op choice)  = m·(forward + backward + [redo]) + step
//! time(flow)       = m·(forward reshards + redone reshards + backward reshards and sums)
//! ```
//! for one instance of the segment, m microbatches a step. The table's links say that layouts at
//! the two ends of a port are the same, and that what the backward pass reads is kept or redone.

use narrows_plan::emit::{
    Template, flow_backward, flow_forward, flow_redo, op_backward, op_forward, op_redo,
    parameter_reduce, parameter_update,
};
use narrows_plan::graph::{OpId, ValueId};
use narrows_plan::strategy::{
    Flow, OpOption, Save, SegmentChoice, SegmentSpace, needs_input, needs_output,
};
use narrows_plan::{Bytes, EdgeLayout, Kernel, Layout, Seconds};

use crate::memory::{flow_kept, op_bytes};
use crate::table::{Choice, CostTable, Link, Node, NodeId, Row, RowId};

/// What a kernel costs.
pub type KernelPrice<'a> = &'a (dyn Fn(&Kernel) -> Seconds + Sync);

/// The times of one instance of a segment under a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SegmentTime {
    /// Forward pass of one microbatch.
    pub forward: Seconds,
    /// Backward pass of one microbatch, redoing included.
    pub backward: Seconds,
    /// Once a step.
    pub step: Seconds,
}

impl SegmentTime {
    /// The time in a step of `microbatches`.
    pub fn total(&self, microbatches: u64) -> Seconds {
        (self.forward + self.backward) * microbatches as f64 + self.step
    }
}

/// The cost table of a segment's space. Nodes are the ops, then the values, in their order.
///
/// With `in_flight` microbatches given, one unlimited row counts the bytes of the instance.
pub fn price_segment(
    space: &SegmentSpace,
    price: KernelPrice,
    microbatches: u64,
    in_flight: Option<u64>,
) -> CostTable {
    let mut table = CostTable::default();
    for id in space.segment.op_ids() {
        let node = space.segment.op(id);
        let times = op_times(space, id, price);
        let choices = times.iter().map(|time| choice(time.total(microbatches))).collect();
        table.nodes.push(Node { name: node.name.clone(), choices });
    }
    for id in space.segment.value_ids() {
        let times = flow_times(space, id, price);
        let choices = times.iter().map(|time| choice(time.total(microbatches))).collect();
        let name = format!("value {}", space.segment.value(id).name);
        table.nodes.push(Node { name, choices });
    }
    link(space, &mut table);
    if let Some(in_flight) = in_flight {
        add_row(space, in_flight, &mut table);
    }
    table
}

fn choice(time: Seconds) -> Choice {
    Choice { time, bytes: vec![] }
}

fn sum(templates: &[Template], price: KernelPrice) -> Seconds {
    templates.iter().map(|template| price(&template.kernel())).sum()
}

fn op_time(space: &SegmentSpace, id: OpId, option: &OpOption, price: KernelPrice) -> SegmentTime {
    let (segment, context) = (&space.segment, &space.context);
    let choice = &option.choice;
    let mut time = SegmentTime {
        forward: sum(&op_forward(segment, id, choice, context), price),
        backward: sum(&op_backward(segment, id, choice, context), price),
        step: Seconds(0.0),
    };
    if option.redo {
        time.backward += sum(&op_redo(segment, id, choice, context), price);
    }
    if let Some(parameter) = space.parameters(id, choice.strategy) {
        time.step = sum(&parameter_reduce(&parameter, context), price)
            + sum(&parameter_update(&parameter, context), price);
    }
    time
}

fn flow_time(space: &SegmentSpace, id: ValueId, flow: &Flow, price: KernelPrice) -> SegmentTime {
    let value = space.segment.value(id);
    SegmentTime {
        forward: sum(&flow_forward(value, flow, &space.context), price),
        backward: sum(&flow_backward(value, flow, &space.context), price)
            + sum(&flow_redo(value, flow, &space.context), price),
        step: Seconds(0.0),
    }
}

fn op_times(space: &SegmentSpace, id: OpId, price: KernelPrice) -> Vec<SegmentTime> {
    space.ops[id.0 as usize].iter().map(|option| op_time(space, id, option, price)).collect()
}

fn flow_times(space: &SegmentSpace, id: ValueId, price: KernelPrice) -> Vec<SegmentTime> {
    let value = space.segment.value(id);
    let mut made: Vec<SegmentTime> = vec![];
    let flows = &space.flows[id.0 as usize];
    for (index, flow) in flows.iter().enumerate() {
        // Flows that differ only in what they save come one after the other.
        let same = index > 0 && {
            let last = &flows[index - 1];
            (last.producer, last.primary, last.second) == (flow.producer, flow.primary, flow.second)
        };
        if !same {
            made.push(flow_time(space, id, flow, price));
            continue;
        }
        let redo = |flow: &Flow| sum(&flow_redo(value, flow, &space.context), price);
        let mut time = made[index - 1];
        time.backward = time.backward - redo(&flows[index - 1]) + redo(flow);
        made.push(time);
    }
    made
}

/// The times of one instance of a segment under a choice: the sum over its kernels.
pub fn segment_time(
    space: &SegmentSpace,
    chosen: &SegmentChoice,
    price: KernelPrice,
) -> SegmentTime {
    let ops = space
        .segment
        .op_ids()
        .map(|id| op_time(space, id, &chosen.ops[id.0 as usize], price));
    let flows = space
        .segment
        .value_ids()
        .map(|id| flow_time(space, id, &chosen.flows[id.0 as usize], price));
    ops.chain(flows).fold(SegmentTime::default(), |total, time| SegmentTime {
        forward: total.forward + time.forward,
        backward: total.backward + time.backward,
        step: total.step + time.step,
    })
}

/// Reads an assignment of the table back into choices of the space.
pub fn decode(space: &SegmentSpace, assignment: &[u32]) -> SegmentChoice {
    let (ops, flows) = assignment.split_at(space.ops.len());
    let mut chosen = SegmentChoice {
        ops: ops.iter().zip(&space.ops).map(|(&c, list)| list[c as usize].clone()).collect(),
        flows: flows.iter().zip(&space.flows).map(|(&c, list)| list[c as usize].clone()).collect(),
    };
    chosen.tidy(&space.segment);
    chosen
}

fn link(space: &SegmentSpace, table: &mut CostTable) {
    let segment = &space.segment;
    for value_id in segment.value_ids() {
        let value = segment.value(value_id);
        let linker = Linker { space, value: value_id };
        if let Some((op, port)) = segment.output_port(value_id) {
            table.links.push(linker.producer(op, port));
            let strategies = space.ops[op.0 as usize].iter();
            if strategies
                .clone()
                .any(|option| needs_output(&segment.op(op).op, option.choice.strategy))
            {
                table.links.push(linker.output_saved(op));
            }
        }
        for (index, &(op, port)) in value.consumers.iter().enumerate() {
            let last = index + 1 == value.consumers.len();
            table.links.push(linker.consumer(op, port, last));
            table.links.push(linker.input_saved(op, port));
        }
    }
}

/// Makes the links between one value and the ops around it.
struct Linker<'a> {
    space: &'a SegmentSpace,
    value: ValueId,
}

impl Linker<'_> {
    fn options(&self, op: OpId) -> &[OpOption] {
        &self.space.ops[op.0 as usize]
    }

    fn flows(&self) -> &[Flow] {
        &self.space.flows[self.value.0 as usize]
    }

    fn make(&self, op: OpId, demand: Vec<Option<u8>>, offer: Vec<u64>) -> Link {
        let to = NodeId(self.space.ops.len() as u32 + self.value.0);
        Link { from: NodeId(op.0), to, demand, offer }
    }

    /// The op leaves the value in the flow's producer layouts; it is redone if the flow says so.
    fn producer(&self, op: OpId, port: usize) -> Link {
        let mut keys: Vec<(EdgeLayout, bool)> = vec![];
        let mut key = |pair| index_of(&mut keys, pair);
        let demand = self
            .options(op)
            .iter()
            .map(|option| Some(key((option.choice.outputs[port], option.redo))))
            .collect();
        let offer = self
            .flows()
            .iter()
            .map(|flow| 1 << key((flow.producer, flow.saves[0] == Save::Redone)))
            .collect();
        self.make(op, demand, offer)
    }

    /// The op reads one of the flow's copies. The last consumer reads the primary one.
    fn consumer(&self, op: OpId, port: usize, last: bool) -> Link {
        let mut keys: Vec<EdgeLayout> = vec![];
        let mut key = |edge| index_of(&mut keys, edge);
        let demand = self
            .options(op)
            .iter()
            .map(|option| Some(key(option.choice.inputs[port])))
            .collect();
        let offer = self
            .flows()
            .iter()
            .map(|flow| {
                let second = flow.second.filter(|_| !last);
                std::iter::once(flow.primary).chain(second).fold(0, |set, edge| set | 1 << key(edge))
            })
            .collect();
        self.make(op, demand, offer)
    }

    /// What the op reads in the backward pass, or when redone, is there.
    fn input_saved(&self, op: OpId, port: usize) -> Link {
        let node = self.space.segment.op(op);
        let mut keys: Vec<Layout> = vec![];
        let mut key = |layout| index_of(&mut keys, layout);
        let demand = self
            .options(op)
            .iter()
            .map(|option| {
                let reads = option.redo || needs_input(&node.op);
                reads.then(|| key(option.choice.inputs[port].forward))
            })
            .collect();
        let offer = self
            .flows()
            .iter()
            .map(|flow| {
                flow.copies()
                    .into_iter()
                    .filter(|layout| flow.available(*layout))
                    .fold(0, |set, layout| set | 1 << key(layout))
            })
            .collect();
        self.make(op, demand, offer)
    }

    /// The op's own output is there.
    fn output_saved(&self, op: OpId) -> Link {
        let node = self.space.segment.op(op);
        let demand = self
            .options(op)
            .iter()
            .map(|option| needs_output(&node.op, option.choice.strategy).then_some(0))
            .collect();
        let offer =
            self.flows().iter().map(|flow| u64::from(flow.saves[0] != Save::Dropped)).collect();
        self.make(op, demand, offer)
    }
}

fn index_of<T: PartialEq>(keys: &mut Vec<T>, key: T) -> u8 {
    let found = keys.iter().position(|known| *known == key).unwrap_or_else(|| {
        keys.push(key);
        keys.len() - 1
    });
    u8::try_from(found).expect("a port has fewer than 64 layouts")
}

/// One row: what an instance holds between its passes.
fn add_row(space: &SegmentSpace, in_flight: u64, table: &mut CostTable) {
    let row = RowId(table.rows.len() as u32);
    table.rows.push(Row { name: "bytes of the block".into(), limit: Bytes(u64::MAX) });
    for (node, options) in space.ops.iter().enumerate() {
        for (option, choice) in options.iter().zip(&mut table.nodes[node].choices) {
            let bytes = op_bytes(space, OpId(node as u32), option).total(in_flight);
            choice.bytes.extend((bytes.0 > 0).then_some((row, bytes)));
        }
    }
    for (value, flows) in space.flows.iter().enumerate() {
        let choices = &mut table.nodes[space.ops.len() + value].choices;
        for (flow, choice) in flows.iter().zip(choices) {
            let bytes = flow_kept(space, ValueId(value as u32), flow) * in_flight;
            choice.bytes.extend((bytes.0 > 0).then_some((row, bytes)));
        }
    }
}
