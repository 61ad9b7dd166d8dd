//! Prices the search space of a segment: every choice by the kernels of its templates.
//!
//! ```text
//! time(op choice)  = m·(forward + backward + [recompute]) + step
//! time(flow)       = m·(forward reshards + recomputed reshards + backward reshards and sums)
//! ```
//! for one instance of the segment, m microbatches a step. The table's links demand equal layouts at the two ends of
//! a port, and that values read by the backward pass are kept or recomputed.

use std::sync::{Arc, OnceLock};

use narrows_plan::emit::{
    InstrTemplate, copy_forward, copy_recompute, flow_backward, flow_forward, flow_recompute,
    gradient_backward, op_backward, op_forward, op_recompute, reduce_owned_gradient,
    update_parameter,
};
use narrows_plan::graph::{OpId, Value, ValueId};
use narrows_plan::strategy::{
    Flow, OpChoice, OpOption, Save, SegmentChoice, SegmentSpace, Strategy, backward_reads_input,
    backward_reads_output,
};
use narrows_plan::{Bytes, Context, EdgeLayout, Layout, Seconds};

use crate::memory::{SegmentBytes, flow_kept_bytes, op_kept_bytes, op_resident_bytes};
use crate::overlap::OverlapSlowdown;
use crate::price::KernelPrice;
use crate::table::{
    CostTable, MemoryRow, MemoryRowId, TableChoice, TableLink, TableNode, TableNodeId,
};

/// The times of one instance of a segment under a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SegmentTime {
    /// Forward pass of one microbatch.
    pub forward: Seconds,
    /// Backward pass of one microbatch, recomputation included.
    pub backward: Seconds,
    /// Step phase: gradient reductions and updates, once a step.
    pub step_phase: Seconds,
    /// The part of `step_phase` that needs the norm of all gradients: the updates.
    pub update: Seconds,
    /// Gradient reductions that run beside the last backward pass. `step_phase` has the least that they add to a step.
    pub overlapped: Seconds,
}

impl SegmentTime {
    fn add(&mut self, other: SegmentTime) {
        self.forward += other.forward;
        self.backward += other.backward;
        self.step_phase += other.step_phase;
        self.update += other.update;
        self.overlapped += other.overlapped;
    }

    /// The time in a step of `microbatches`.
    pub fn total(&self, microbatches: u64) -> Seconds {
        (self.forward + self.backward) * microbatches as f64 + self.step_phase
    }
}

/// Memory rows of a segment's cost table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryRows {
    /// No rows: the table has times only.
    None,
    /// Row 0 counts resident bytes, row 1 the bytes kept for each microbatch in flight.
    ResidentAndKept,
}

/// A segment's space with the times of one microbatch, which depend on the tensor axis and the microbatch size alone.
/// [`table`](PricedSpace::table) adds the step phase, the number of microbatches and the bytes, so that one pricing
/// serves many meshes.
#[derive(Clone, Debug)]
pub struct PricedSpace {
    /// The space.
    pub space: SegmentSpace,
    ops: OpTimes,
    /// Forward plus backward time of one microbatch.
    flows: Arc<[Vec<Seconds>]>,
    links: Arc<[TableLink]>,
    /// Bytes of every choice that are kept for each microbatch in flight, once counted.
    kept_bytes: OnceLock<ChoiceBytes>,
}

/// Bytes of the choices of a table, by node.
pub type ChoiceBytes = Arc<[Vec<Bytes>]>;

/// The times of every alternative of every op for one microbatch. They do not depend on the boundary layout.
#[derive(Clone, Debug)]
pub struct OpTimes(Arc<[Vec<SegmentTime>]>);

impl PricedSpace {
    /// Prices every choice of `space`. `op_times` are those of the same segment and context with another boundary
    /// layout, where they are known.
    pub fn new(space: SegmentSpace, op_times: Option<OpTimes>, price: KernelPrice) -> PricedSpace {
        let links = links(&space).into();
        PricedSpace::with_links(space, links, op_times, price)
    }

    /// Prices the same alternatives in another context, with the same tensor axis and
    /// [`token_dim`](Context::token_dim).
    pub fn in_context(
        &self,
        context: Context,
        op_times: Option<OpTimes>,
        price: KernelPrice,
    ) -> PricedSpace {
        let space = self.space.in_context(context);
        PricedSpace::with_links(space, self.links.clone(), op_times, price)
    }

    fn with_links(
        space: SegmentSpace,
        links: Arc<[TableLink]>,
        op_times: Option<OpTimes>,
        price: KernelPrice,
    ) -> PricedSpace {
        let of_op = |id| times_of_op(&space, id, price);
        let ops = op_times.unwrap_or_else(|| OpTimes(space.segment.op_ids().map(of_op).collect()));
        let flows = space.segment.value_ids().map(|id| times_of_flows(&space, id, price)).collect();
        PricedSpace { space, ops, flows, links, kept_bytes: OnceLock::new() }
    }

    /// The times of the ops, for the same segment with other boundary layouts.
    pub fn op_times(&self) -> OpTimes {
        self.ops.clone()
    }

    /// The cost table in a context of the same tensor axis and microbatch. Nodes are the ops, then the values, in
    /// their order. With [`MemoryRows::ResidentAndKept`], two rows without limits count the bytes of the instance: row 0 the resident
    /// bytes, row 1 the bytes kept for each microbatch in flight.
    pub fn table(
        &self,
        context: &Context,
        step_phases: &StepPhases,
        memory_rows: MemoryRows,
    ) -> CostTable {
        let segment = &self.space.segment;
        let ops = segment.op_ids().map(|id| segment.op(id).name.clone());
        let values = segment.value_ids().map(|id| format!("value {}", segment.value(id).name));
        let choice = |time| TableChoice { time: Seconds(time), bytes: vec![] };
        let nodes = ops.chain(values).zip(self.times(context, step_phases)).map(|(name, times)| {
            TableNode { name, choices: times.into_iter().map(choice).collect() }
        });
        let mut table =
            CostTable { nodes: nodes.collect(), links: self.links.to_vec(), rows: vec![] };
        if memory_rows == MemoryRows::ResidentAndKept {
            self.add_rows(step_phases, &mut table);
        }
        table
    }

    /// Adds the memory rows to a table without any.
    fn add_rows(&self, step_phases: &StepPhases, table: &mut CostTable) {
        for (name, bytes) in
            ["resident bytes", "kept bytes"].into_iter().zip(self.row_bytes(step_phases))
        {
            let row = MemoryRowId(table.rows.len() as u32);
            table.rows.push(MemoryRow { name: name.into(), limit: Bytes(u64::MAX) });
            for (node, bytes) in table.nodes.iter_mut().zip(bytes.iter()) {
                for (choice, bytes) in node.choices.iter_mut().zip(bytes) {
                    choice.bytes.extend((bytes.0 > 0).then_some((row, *bytes)));
                }
            }
        }
    }

    /// The bytes of the [`table`](PricedSpace::table)'s choices by memory row: resident, kept.
    fn row_bytes(&self, step_phases: &StepPhases) -> [ChoiceBytes; 2] {
        let without = |flows: &Vec<Seconds>| vec![Bytes(0); flows.len()];
        let resident = self.op_resident_bytes(step_phases).into_iter();
        [resident.chain(self.flows.iter().map(without)).collect(), self.kept_bytes()]
    }

    /// The resident bytes of the options of each op. Flows have none.
    pub fn op_resident_bytes(&self, step_phases: &StepPhases) -> Vec<Vec<Bytes>> {
        let of_op = |id: OpId| {
            let options = self.space.ops[id.0 as usize].iter();
            options.map(|option| step_phases.of(id, option.choice.strategy).resident).collect()
        };
        self.space.segment.op_ids().map(of_op).collect()
    }

    /// The bytes of the [`table`](PricedSpace::table)'s choices that are kept for each microbatch in flight.
    pub fn kept_bytes(&self) -> ChoiceBytes {
        self.kept_bytes.get_or_init(|| kept_bytes_by_choice(&self.space)).clone()
    }

    /// The times of the [`table`](PricedSpace::table)'s choices in seconds, by node. Without bytes, tables of different
    /// contexts differ in these times only.
    pub fn times(&self, context: &Context, step_phases: &StepPhases) -> Vec<Vec<f64>> {
        let microbatches = context.workload.microbatches(&context.mesh);
        let of_value = |flows: &Vec<Seconds>| {
            flows.iter().map(|time| (*time * microbatches as f64).0).collect()
        };
        let ops = self.op_step_times(context, step_phases).into_iter();
        ops.chain(self.flows.iter().map(of_value)).collect()
    }

    /// The times of the options of each op in a step, in seconds.
    pub fn op_step_times(&self, context: &Context, step_phases: &StepPhases) -> Vec<Vec<f64>> {
        let microbatches = context.workload.microbatches(&context.mesh);
        let of_op = |id: OpId| {
            let time = |(option, time): (&OpOption, &SegmentTime)| {
                let step_phase = step_phases.of(id, option.choice.strategy).time;
                (time.total(microbatches) + step_phase).0
            };
            let options = &self.space.ops[id.0 as usize];
            options.iter().zip(&self.ops.0[id.0 as usize]).map(time).collect()
        };
        self.space.segment.op_ids().map(of_op).collect()
    }

    /// Forward plus backward time of each flow of each value for one microbatch.
    pub fn flow_times(&self) -> Arc<[Vec<Seconds>]> {
        self.flows.clone()
    }

    /// The number of choices of each node of the [`table`](PricedSpace::table).
    pub fn choice_counts(&self) -> Vec<usize> {
        self.ops.0.iter().map(Vec::len).chain(self.flows.iter().map(Vec::len)).collect()
    }

    /// The links of the [`table`](PricedSpace::table), in every context.
    pub fn links(&self) -> &[TableLink] {
        &self.links
    }
}

/// The step phase of an op under one strategy.
#[derive(Clone, Copy, Debug, Default)]
struct OpStep {
    /// Gradient reductions and updates.
    time: Seconds,
    /// The updates.
    update: Seconds,
    /// Gradient reductions beside the last backward pass, of which `time` has the least that they add to a step.
    overlapped: Seconds,
    /// Bytes of the parameters with their gradients and optimizer states.
    resident: Bytes,
}

/// The step phases of a segment's ops in one context, by strategy. They depend on neither the boundary layout nor the
/// workload.
#[derive(Clone, Debug)]
pub struct StepPhases(Vec<Vec<(Strategy, OpStep)>>);

impl StepPhases {
    /// Prices the step phases of all ops of `space` in a context with the same tensor axis, with the least that
    /// reductions beside the last backward pass add to a step.
    pub fn new(
        space: &SegmentSpace,
        context: &Context,
        price: KernelPrice,
        slowdown: Option<OverlapSlowdown>,
    ) -> StepPhases {
        let of_op = |id: OpId| {
            let mut steps: Vec<(Strategy, OpStep)> = vec![];
            for option in &space.ops[id.0 as usize] {
                let strategy = option.choice.strategy;
                if steps.iter().all(|(known, _)| *known != strategy) {
                    let step = op_step(space, (context, id, strategy), price, slowdown);
                    steps.push((strategy, step));
                }
            }
            steps
        };
        StepPhases(space.segment.op_ids().map(of_op).collect())
    }

    fn of(&self, id: OpId, strategy: Strategy) -> OpStep {
        let step = self.0[id.0 as usize].iter().find(|(known, _)| *known == strategy);
        step.map(|(_, step)| *step).unwrap_or_default()
    }

    /// Adds the step phase and the resident bytes of a choice.
    pub fn add_to(&self, choice: &SegmentChoice, time: &mut SegmentTime, bytes: &mut SegmentBytes) {
        for (op, option) in choice.ops.iter().enumerate() {
            let step = self.of(OpId(op as u32), option.choice.strategy);
            time.step_phase += step.time;
            time.update += step.update;
            time.overlapped += step.overlapped;
            bytes.resident += step.resident;
        }
    }

    /// Lower bound on the segment's reductions beside the last backward pass.
    pub fn overlapped_min(&self) -> Seconds {
        let least = |steps: &Vec<(Strategy, OpStep)>| {
            Seconds(steps.iter().map(|(_, step)| step.overlapped.0).reduce(f64::min).unwrap_or(0.0))
        };
        self.0.iter().map(least).sum()
    }

    /// Lower and upper bound of the segment's time in the step phase: sums of each op's least and largest time.
    pub fn bounds(&self) -> [Seconds; 2] {
        let mut range = [Seconds(0.0); 2];
        for steps in &self.0 {
            let extreme = |pick: fn(f64, f64) -> f64| {
                Seconds(steps.iter().map(|(_, step)| step.time.0).reduce(pick).unwrap_or(0.0))
            };
            range[0] += extreme(f64::min);
            range[1] += extreme(f64::max);
        }
        range
    }
}

/// The step phase of an op: the reductions of its gradients, and its updates.
fn op_step(
    space: &SegmentSpace,
    (context, id, strategy): (&Context, OpId, Strategy),
    price: KernelPrice,
    slowdown: Option<OverlapSlowdown>,
) -> OpStep {
    let resident = op_resident_bytes(space, context, id, strategy);
    let Some(parameter) = space.parameters(id, strategy, context) else {
        return OpStep { resident, ..OpStep::default() };
    };
    let (kind, tied) = (space.segment.kind, space.tied);
    let reductions = reduce_owned_gradient(kind, &parameter, tied, context);
    let beside = reductions.overlapped.map_or(Seconds(0.0), |template| price(&template.kernel()));
    let reduce = sum(&reductions.rest, price);
    let update = sum(&update_parameter(&parameter, context), price);
    let (hidden_cost, overlapped) = match slowdown {
        Some(slowdown) => (beside * slowdown.hidden_cost(), beside),
        None => (beside, Seconds(0.0)),
    };
    OpStep { time: reduce + update + hidden_cost, update, overlapped, resident }
}

fn sum(templates: &[InstrTemplate], price: KernelPrice) -> Seconds {
    templates.iter().map(|template| price(&template.kernel())).sum()
}

/// The times of options that differ only in whether they are recomputed, for one microbatch; the step phase is left at
/// zero.
fn op_times<'a>(
    space: &'a SegmentSpace,
    id: OpId,
    options: &'a [OpOption],
    price: KernelPrice<'a>,
) -> impl Iterator<Item = SegmentTime> + 'a {
    let passes = options.first().map(|option| op_passes(space, id, &option.choice, price));
    let passes = passes.unwrap_or_default();
    options.iter().map(move |option| {
        let mut time = passes;
        if option.recompute {
            time.backward += recompute_time(space, id, &option.choice, price);
        }
        time
    })
}

/// The forward and backward pass of one microbatch without recomputation.
fn op_passes(space: &SegmentSpace, id: OpId, choice: &OpChoice, price: KernelPrice) -> SegmentTime {
    let (segment, context) = (&space.segment, &space.context);
    SegmentTime {
        forward: sum(&op_forward(segment, id, choice, context), price),
        backward: sum(&op_backward(segment, id, choice, context), price),
        ..SegmentTime::default()
    }
}

fn recompute_time(
    space: &SegmentSpace,
    id: OpId,
    choice: &OpChoice,
    price: KernelPrice,
) -> Seconds {
    sum(&op_recompute(&space.segment, id, choice, &space.context), price)
}

fn flow_time(space: &SegmentSpace, id: ValueId, flow: &Flow, price: KernelPrice) -> SegmentTime {
    let value = space.segment.value(id);
    SegmentTime {
        forward: sum(&flow_forward(value, flow, &space.context), price),
        backward: sum(&flow_backward(value, flow, &space.context), price)
            + sum(&flow_recompute(value, flow, &space.context), price),
        ..SegmentTime::default()
    }
}

fn times_of_op(space: &SegmentSpace, id: OpId, price: KernelPrice) -> Vec<SegmentTime> {
    let options = &space.ops[id.0 as usize];
    let mut times = Vec::with_capacity(options.len());
    // Options that differ only in whether they are recomputed are adjacent.
    for group in options.chunk_by(|a, b| a.choice == b.choice) {
        times.extend(op_times(space, id, group, price));
    }
    times
}

/// Forward plus backward time of each flow of a value for one microbatch.
fn times_of_flows(space: &SegmentSpace, id: ValueId, price: KernelPrice) -> Vec<Seconds> {
    let value = space.segment.value(id);
    let flows = &space.flows[id.0 as usize];
    let same =
        |a: &Flow, b: &Flow| (a.producer, a.primary, a.second) == (b.producer, b.primary, b.second);
    let mut reshards = ReshardTimes { value, context: &space.context, price, known: vec![] };
    let mut times: Vec<Seconds> = Vec::with_capacity(flows.len());
    // Flows that differ only in their saves are adjacent.
    for group in flows.chunk_by(same) {
        let flow = &group[0];
        let (copies, gradients) = (flow.copies(), flow.gradients());
        let mut forward = Seconds(0.0);
        let mut recompute = vec![Seconds(0.0); copies.len()];
        for (copy, recompute) in recompute.iter_mut().enumerate().skip(1) {
            reshards.forward(flow, &copies, copy).iter().for_each(|time| forward += *time);
            *recompute = reshards.recompute(flow, &copies, copy).iter().copied().sum();
        }
        let mut backward = Seconds(0.0);
        for gradient in 0..gradients.len() {
            let times = reshards.backward(flow, &gradients, gradient);
            times.iter().for_each(|time| backward += *time);
        }
        times.extend(group.iter().map(|flow| {
            let recomputed =
                flow.saves.iter().zip(&recompute).filter(|(save, _)| **save == Save::Recomputed);
            let recomputed: Seconds = recomputed.map(|(_, time)| *time).sum();
            forward + (backward + recomputed)
        }));
    }
    times
}

/// Kernel times of the reshards of one value. Its flows share them.
struct ReshardTimes<'a> {
    value: &'a Value,
    context: &'a Context,
    price: KernelPrice<'a>,
    known: Vec<(Reshard, Vec<Seconds>)>,
}

/// A reshard of a value: all that its kernels depend on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reshard {
    /// From the producer's layout to that of a copy; whether a division by a norm is pending.
    Forward(Layout, Layout, bool),
    /// The same in the backward pass.
    Recompute(Layout, Layout),
    /// From the layout of gradient contributions to the producer's; whether it is the first sum.
    Backward(Layout, Layout, bool),
}

impl ReshardTimes<'_> {
    fn forward(&mut self, flow: &Flow, copies: &[Layout], copy: usize) -> &[Seconds] {
        let producer = flow.producer;
        let key = Reshard::Forward(producer.forward, copies[copy], producer.norm_pending);
        self.times(key, |value, context| copy_forward(value, flow, copy, context))
    }

    fn recompute(&mut self, flow: &Flow, copies: &[Layout], copy: usize) -> &[Seconds] {
        let key = Reshard::Recompute(flow.producer.forward, copies[copy]);
        self.times(key, |value, context| copy_recompute(value, flow, copy, context))
    }

    fn backward(&mut self, flow: &Flow, gradients: &[Layout], gradient: usize) -> &[Seconds] {
        let key = Reshard::Backward(gradients[gradient], flow.producer.backward, gradient == 0);
        self.times(key, |value, context| gradient_backward(value, flow, gradient, context))
    }

    fn times(
        &mut self,
        key: Reshard,
        templates: impl FnOnce(&Value, &Context) -> Vec<InstrTemplate>,
    ) -> &[Seconds] {
        let index = self.known.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
            let templates = templates(self.value, self.context);
            let price = |template: &InstrTemplate| (self.price)(&template.kernel());
            self.known.push((key, templates.iter().map(price).collect()));
            self.known.len() - 1
        });
        &self.known[index].1
    }
}

/// The times of one instance of a segment in the passes of one microbatch under a choice: the sum over its kernels. The
/// step phase is left at zero; [`StepPhases::add_to`] adds it.
pub fn pass_time(space: &SegmentSpace, choice: &SegmentChoice, price: KernelPrice) -> SegmentTime {
    let mut total = SegmentTime::default();
    for id in space.segment.op_ids() {
        let option = &choice.ops[id.0 as usize];
        op_times(space, id, std::slice::from_ref(option), price).for_each(|time| total.add(time));
    }
    for id in space.segment.value_ids() {
        total.add(flow_time(space, id, &choice.flows[id.0 as usize], price));
    }
    total
}

/// The choices of the space for an assignment of its table.
pub fn decode_assignment(space: &SegmentSpace, assignment: &[u32]) -> SegmentChoice {
    let (ops, flows) = assignment.split_at(space.ops.len());
    let mut choice = SegmentChoice {
        ops: ops.iter().zip(space.ops.iter()).map(|(&c, list)| list[c as usize].clone()).collect(),
        flows: flows
            .iter()
            .zip(space.flows.iter())
            .map(|(&c, list)| list[c as usize].clone())
            .collect(),
    };
    choice.drop_unread_saves(&space.segment);
    choice
}

fn links(space: &SegmentSpace) -> Vec<TableLink> {
    let segment = &space.segment;
    let mut links = vec![];
    for value_id in segment.value_ids() {
        let value = segment.value(value_id);
        let linker = LinkBuilder { space, value: value_id };
        if let Some((op, port)) = segment.output_port(value_id) {
            links.push(linker.producer(op, port));
            let strategies = space.ops[op.0 as usize].iter();
            if strategies
                .clone()
                .any(|option| backward_reads_output(&segment.op(op).op, option.choice.strategy))
            {
                links.push(linker.output_saved(op));
            }
        }
        for (index, &(op, port)) in value.consumers.iter().enumerate() {
            let last = index + 1 == value.consumers.len() && !segment.is_output(value_id);
            links.push(linker.consumer(op, port, last));
            links.push(linker.input_saved(op, port));
        }
    }
    links
}

/// Builds the links between one value and its producer and consumers.
struct LinkBuilder<'a> {
    space: &'a SegmentSpace,
    value: ValueId,
}

impl LinkBuilder<'_> {
    fn options(&self, op: OpId) -> &[OpOption] {
        &self.space.ops[op.0 as usize]
    }

    fn flows(&self) -> &[Flow] {
        &self.space.flows[self.value.0 as usize]
    }

    fn link(&self, op: OpId, demand: Vec<Option<u8>>, offer: Vec<u64>) -> TableLink {
        let to = TableNodeId(self.space.ops.len() as u32 + self.value.0);
        TableLink { from: TableNodeId(op.0), to, demand, offer }
    }

    /// Demands that the op's output layouts are the flow's producer layouts, and that the op is recomputed if and only
    /// if the flow's first copy is.
    fn producer(&self, op: OpId, port: usize) -> TableLink {
        let mut keys: Vec<(EdgeLayout, bool)> = vec![];
        let mut key = |pair| index_of(&mut keys, pair);
        let demand = self
            .options(op)
            .iter()
            .map(|option| Some(key((option.choice.outputs[port], option.recompute))))
            .collect();
        let offer = self
            .flows()
            .iter()
            .map(|flow| 1 << key((flow.producer, flow.saves[0] == Save::Recomputed)))
            .collect();
        self.link(op, demand, offer)
    }

    /// Demands that the op reads one of the flow's copies. The last consumer reads the primary copy.
    fn consumer(&self, op: OpId, port: usize, last: bool) -> TableLink {
        let mut keys: Vec<EdgeLayout> = vec![];
        let mut key = |edge| index_of(&mut keys, edge);
        let demand =
            self.options(op).iter().map(|option| Some(key(option.choice.inputs[port]))).collect();
        let offer = self
            .flows()
            .iter()
            .map(|flow| {
                let second = flow.second.filter(|_| !last);
                std::iter::once(flow.primary)
                    .chain(second)
                    .fold(0, |set, edge| set | 1 << key(edge))
            })
            .collect();
        self.link(op, demand, offer)
    }

    /// Demands that an input which the op reads in the backward pass, or for its recomputation, is kept or recomputed.
    fn input_saved(&self, op: OpId, port: usize) -> TableLink {
        let node = self.space.segment.op(op);
        let mut keys: Vec<Layout> = vec![];
        let mut key = |layout| index_of(&mut keys, layout);
        let demand = self
            .options(op)
            .iter()
            .map(|option| {
                let reads = option.recompute || backward_reads_input(&node.op);
                reads.then(|| key(option.choice.inputs[port].forward))
            })
            .collect();
        let offer = self
            .flows()
            .iter()
            .map(|flow| {
                let saved = flow.copies().into_iter().zip(&flow.saves);
                saved
                    .filter(|(_, save)| **save != Save::Dropped)
                    .fold(0, |set, (layout, _)| set | 1 << key(layout))
            })
            .collect();
        self.link(op, demand, offer)
    }

    /// Demands that an output which the op reads in the backward pass is kept or recomputed.
    fn output_saved(&self, op: OpId) -> TableLink {
        let node = self.space.segment.op(op);
        let demand = self
            .options(op)
            .iter()
            .map(|option| backward_reads_output(&node.op, option.choice.strategy).then_some(0))
            .collect();
        let offer =
            self.flows().iter().map(|flow| u64::from(flow.saves[0] != Save::Dropped)).collect();
        self.link(op, demand, offer)
    }
}

fn index_of<T: PartialEq>(keys: &mut Vec<T>, key: T) -> u8 {
    let index = keys.iter().position(|known| *known == key).unwrap_or_else(|| {
        keys.push(key);
        keys.len() - 1
    });
    u8::try_from(index).expect("a port has fewer than 64 layouts")
}

/// The bytes of every choice that are kept for each microbatch in flight.
fn kept_bytes_by_choice(space: &SegmentSpace) -> ChoiceBytes {
    let of_op = |id: OpId| {
        let options = space.ops[id.0 as usize].iter();
        options.map(|option| op_kept_bytes(space, id, option)).collect()
    };
    let of_value = |id: ValueId| {
        let flows = space.flows[id.0 as usize].iter();
        flows.map(|flow| flow_kept_bytes(space, id, flow)).collect()
    };
    space.segment.op_ids().map(of_op).chain(space.segment.value_ids().map(of_value)).collect()
}
