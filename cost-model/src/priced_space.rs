//! Prices the search space of a segment: every choice by the kernels of its templates.
//!
//! ```text
//! time(op choice)  = m·(forward + backward + [recompute] + sharding) + step
//! time(flow)       = m·(forward reshards + recomputed reshards + backward reshards and sums)
//! ```
//! for one instance of the segment, m microbatches a step. A collective overlapped with a weight-gradient GEMM counts with
//! its exposed time. The table's links demand equal layouts at the two ends of a port, and that values read by the backward
//! pass are kept or recomputed.

use std::sync::{Arc, OnceLock};

use narrows_plan::emit::{is_weight_gradient_deferrable, op_forward};
use narrows_plan::graph::{OpId, ValueId};
use narrows_plan::strategy::{OpOption, SegmentChoice, SegmentSpace};
use narrows_plan::{Bytes, Context, Seconds};

use crate::flow_time::{FlowPrices, FlowTimes};
use crate::memory::{
    DeferredBytes, InFlight, SegmentBytes, flow_deferred_bytes, flow_kept_bytes, op_kept_bytes,
};
use crate::op_order::time_before_weight;
use crate::op_times::{OpTimes, op_times};
use crate::price::StreamPrices;
use crate::segment_time::{PassTimesMin, SegmentTime, StepWeights};
use crate::step_phases::StepPhases;
use crate::table::{CostTable, MemoryRow, MemoryRowId, TableChoice, TableLink, TableNode};
use crate::table_links::links;

/// Memory rows of a segment's cost table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryRows {
    /// No rows: the table has times only.
    None,
    /// Row 0 counts resident bytes, the others bytes of each microbatch: row 1 those kept, and of [`DeferredBytes`] row 2 the
    /// operands kept and row 3 those written.
    All,
}

/// A segment's space with the times of one microbatch, which depend on the tensor axis and the microbatch size alone.
/// [`table`](PricedSpace::table) adds the step phase, the number of microbatches and the bytes, so that one pricing
/// serves many meshes.
#[derive(Clone, Debug)]
pub struct PricedSpace {
    /// The space.
    pub space: SegmentSpace,
    ops: OpTimes,
    /// The times of the flows of each value.
    flows: Arc<[FlowTimes]>,
    links: Arc<[TableLink]>,
    /// Bytes of every choice that are kept for each microbatch in flight, once counted.
    kept_bytes: OnceLock<ChoiceBytes>,
    /// Operands of deferred weight gradients of every choice, kept and written, once counted.
    deferred_bytes: OnceLock<[ChoiceBytes; 2]>,
}

/// Bytes of the choices of a table, by node.
pub type ChoiceBytes = Arc<[Vec<Bytes>]>;

impl PricedSpace {
    /// Prices every choice of `space`. `op_times` are the times of the same segment and context with another boundary
    /// layout, where they are known.
    pub fn new(
        space: SegmentSpace,
        op_times: Option<OpTimes>,
        prices: StreamPrices,
    ) -> PricedSpace {
        let links = links(&space).into();
        PricedSpace::with_links(space, links, op_times, prices)
    }

    /// Prices the same alternatives in another context, with the same tensor axis and
    /// [`token_dim`](Context::token_dim).
    pub fn in_context(
        &self,
        context: Context,
        op_times: Option<OpTimes>,
        prices: StreamPrices,
    ) -> PricedSpace {
        let space = self.space.in_context(context);
        PricedSpace::with_links(space, self.links.clone(), op_times, prices)
    }

    fn with_links(
        space: SegmentSpace,
        links: Arc<[TableLink]>,
        op_times: Option<OpTimes>,
        prices: StreamPrices,
    ) -> PricedSpace {
        let ops = op_times.unwrap_or_else(|| OpTimes::new(&space, prices));
        let segment = &space.segment;
        let of_value = |id: ValueId| {
            let times = || FlowPrices::new(&space, id, prices).times();
            match segment.output_port(id).is_none() || segment.is_output(id) {
                true => times(),
                false => ops.of_flows[id.0 as usize].get_or_init(times).clone(),
            }
        };
        let flows = segment.value_ids().map(of_value).collect();
        let (kept_bytes, deferred_bytes) = (OnceLock::new(), OnceLock::new());
        PricedSpace { space, ops, flows, links, kept_bytes, deferred_bytes }
    }

    /// The times of the ops, for the same segment with other boundary layouts.
    pub fn op_times(&self) -> OpTimes {
        self.ops.clone()
    }

    /// The cost table in a context of the same tensor axis and microbatch. Nodes are the ops, then the values, in
    /// their order. With [`MemoryRows::All`], rows without limits count the bytes of the instance.
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
        if memory_rows == MemoryRows::All {
            self.add_rows(step_phases, &mut table);
        }
        table
    }

    /// Adds the memory rows to a table without any.
    fn add_rows(&self, step_phases: &StepPhases, table: &mut CostTable) {
        for (name, bytes) in ["resident bytes", "kept bytes", "operands kept", "operands written"]
            .into_iter()
            .zip(self.row_bytes(step_phases))
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

    /// The bytes of the [`table`](PricedSpace::table)'s choices by memory row.
    fn row_bytes(&self, step_phases: &StepPhases) -> [ChoiceBytes; 4] {
        let without = |flows: &FlowTimes| vec![Bytes(0); flows.both.len()];
        let resident = self.op_resident_bytes(step_phases).into_iter();
        let resident = resident.chain(self.flows.iter().map(without)).collect();
        let [operands_kept, operands_written] = self.deferred_bytes();
        [resident, self.kept_bytes(), operands_kept, operands_written]
    }

    /// The bytes of the [`table`](PricedSpace::table)'s choices with these microbatches in flight.
    pub fn bytes(&self, step_phases: &StepPhases, in_flight: InFlight) -> Vec<Vec<Bytes>> {
        let [resident, kept, operands_kept, operands_written] = self.row_bytes(step_phases);
        let node = |node: usize| {
            let of_choice = |choice: usize| {
                let deferred = DeferredBytes {
                    kept: operands_kept[node][choice],
                    written: operands_written[node][choice],
                };
                let (resident, kept) = (resident[node][choice], kept[node][choice]);
                SegmentBytes { resident, kept, deferred }.total(in_flight)
            };
            (0..kept[node].len()).map(of_choice).collect()
        };
        (0..kept.len()).map(node).collect()
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

    /// The operands of deferred weight gradients of the [`table`](PricedSpace::table)'s choices, kept and written.
    pub fn deferred_bytes(&self) -> [ChoiceBytes; 2] {
        let count = || {
            let ops =
                self.space.ops.iter().map(|options| vec![DeferredBytes::default(); options.len()]);
            let of_value = |id: ValueId| {
                let flows = self.space.flows[id.0 as usize].iter();
                flows.map(|flow| flow_deferred_bytes(&self.space, id, flow)).collect()
            };
            let both: Vec<Vec<DeferredBytes>> =
                ops.chain(self.space.segment.value_ids().map(of_value)).collect();
            let parts: [fn(&DeferredBytes) -> Bytes; 2] = [|of| of.kept, |of| of.written];
            parts
                .map(|part| both.iter().map(|choices| choices.iter().map(part).collect()).collect())
        };
        self.deferred_bytes.get_or_init(count).clone()
    }

    /// The times of the [`table`](PricedSpace::table)'s choices in seconds, by node. Without bytes, tables of different
    /// contexts differ in these times only.
    pub fn times(&self, context: &Context, step_phases: &StepPhases) -> Vec<Vec<f64>> {
        let microbatches = context.workload.microbatches(&context.mesh);
        let of_value = |flows: &FlowTimes| {
            flows.both.iter().map(|time| (*time * microbatches as f64).0).collect()
        };
        let ops = self.op_step_times(context, step_phases).into_iter();
        ops.chain(self.flows.iter().map(of_value)).collect()
    }

    /// The times of the options of each op in a step, in seconds.
    pub fn op_step_times(&self, context: &Context, step_phases: &StepPhases) -> Vec<Vec<f64>> {
        let microbatches = context.workload.microbatches(&context.mesh);
        let of_op = |id: OpId| {
            let time = |(option, time): (&OpOption, &SegmentTime)| {
                let step = step_phases.of(id, option.choice.strategy);
                let sharding = step.sharding.forward() + step.sharding.backward();
                (time.total(microbatches) + sharding * microbatches as f64 + step.time).0
            };
            let options = &self.space.ops[id.0 as usize];
            options.iter().zip(&self.ops.of_options[id.0 as usize]).map(time).collect()
        };
        self.space.segment.op_ids().map(of_op).collect()
    }

    /// Lower bounds on the passes of one microbatch: each op's least, and of flows what residual sums in GEMMs save, as in
    /// [`OpTimes::min_pass_time`].
    pub fn min_pass_times(&self) -> PassTimesMin {
        let least = |pass: fn(&SegmentTime) -> f64| {
            let of_op = |times: &Vec<SegmentTime>| times.iter().map(pass).reduce(f64::min);
            self.ops.of_options.iter().filter_map(of_op).sum::<f64>()
        };
        let saved = self.ops.residual_sums_min.0;
        PassTimesMin {
            forward: least(|time| time.forward.0) + saved,
            backward: least(|time| time.backward.0),
            without_weight_gradients: least(|time| time.without_weight_gradients().0) + saved,
        }
    }

    /// Upper bound over all choices on the forward pass of one microbatch before an op reads a weight that is gathered during it.
    pub fn forward_before_gathers_max(
        &self,
        step_phases: &StepPhases,
        prices: StreamPrices,
    ) -> Seconds {
        let (space, reader) = (&self.space, step_phases.first_gathered());
        let segment = &space.segment;
        let forward = StepWeights { forward: 1.0, ..StepWeights::default() };
        let times = self.weighted_pass_times(&forward);
        let (ops, flows) = times.split_at(space.ops.len());
        let most = |times: &Vec<f64>| times.iter().copied().fold(0.0, f64::max);
        let of_flows = |values: &[ValueId]| -> f64 {
            values.iter().map(|id| most(&flows[id.0 as usize])).sum()
        };
        let of_op = |op: OpId| most(&ops[op.0 as usize]) + of_flows(&segment.op(op).outputs);
        let of_reader = |op: OpId| {
            let before = |option: &OpOption| {
                let instructions = op_forward(segment, op, &option.choice, &space.context);
                time_before_weight(&instructions, prices.kernel).0
            };
            most(&space.ops[op.0 as usize].iter().map(before).collect())
        };
        let earlier = segment.op_ids().take_while(|op| Some(*op) != reader);
        let before_reader = of_flows(&segment.inputs) + earlier.map(of_op).sum::<f64>();
        Seconds(before_reader + reader.map_or(0.0, of_reader))
    }

    /// The times of the [`table`](PricedSpace::table)'s choices for the passes of one microbatch without what ZeRO adds, in
    /// seconds, with `multiplier` seconds for each kept byte. The choices of all nodes follow one after the other.
    pub fn pass_costs(&self, multiplier: f64) -> Vec<f64> {
        let of_ops = self.ops.of_options.iter().flatten();
        let of_ops = of_ops.map(|time| (time.forward + time.backward).0);
        let of_flows = self.flows.iter().flat_map(|times| times.both.iter().map(|time| time.0));
        let mut costs: Vec<f64> = Vec::with_capacity(self.choice_counts().iter().sum());
        costs.extend(of_ops);
        costs.extend(of_flows);
        if multiplier > 0.0 {
            let kept = self.kept_bytes();
            let kept = kept.iter().flatten();
            costs.iter_mut().zip(kept).for_each(|(cost, kept)| *cost += multiplier * kept.as_f64());
        }
        costs
    }

    /// The weighted times of the [`table`](PricedSpace::table)'s choices in a step, in seconds, by node.
    pub fn weighted_times(&self, step_phases: &StepPhases, weights: &StepWeights) -> Vec<Vec<f64>> {
        let mut times = self.weighted_pass_times(weights);
        for (id, times) in self.space.segment.op_ids().zip(&mut times) {
            for (time, option) in times.iter_mut().zip(&self.space.ops[id.0 as usize]) {
                *time += step_phases.of(id, option.choice.strategy).weighted(weights).0;
            }
        }
        times
    }

    /// As [`weighted_times`](PricedSpace::weighted_times), of the passes of one microbatch without the step phase and what ZeRO
    /// adds.
    pub fn weighted_pass_times(&self, weights: &StepWeights) -> Vec<Vec<f64>> {
        let StepWeights { forward, backward, weight_gradient, .. } = *weights;
        let of_option = |time: &SegmentTime| {
            let passes = time.forward * forward + time.backward * backward;
            (passes + time.weight_gradient * weight_gradient).0
        };
        let of_op = |times: &Vec<SegmentTime>| times.iter().map(of_option).collect();
        let of_value = |times: &FlowTimes| {
            let FlowTimes { both, backward: of_backward, overlapped_gemms } = times;
            let times = both.iter().zip(of_backward.iter()).zip(overlapped_gemms.iter());
            let of_flow = |((both, of_backward), overlapped): ((&Seconds, &Seconds), &Seconds)| {
                // No pass of its own runs a weight gradient that overlaps with the collective of the flow.
                let passes = *both * forward + *of_backward * (backward - forward);
                (passes - *overlapped * weight_gradient).0
            };
            times.map(of_flow).collect()
        };
        let flows = self.flows.iter().map(of_value);
        self.ops.of_options.iter().map(of_op).chain(flows).collect()
    }

    /// Forward plus backward time of each flow of each value for one microbatch.
    pub fn flow_times(&self) -> impl Iterator<Item = &[Seconds]> {
        self.flows.iter().map(|times| &*times.both)
    }

    /// The number of choices of each node of the [`table`](PricedSpace::table).
    pub fn choice_counts(&self) -> Vec<usize> {
        let flows = self.flows.iter().map(|times| times.both.len());
        self.ops.of_options.iter().map(Vec::len).chain(flows).collect()
    }

    /// The links of the [`table`](PricedSpace::table), in every context.
    pub fn links(&self) -> &[TableLink] {
        &self.links
    }
}

/// The times of one instance of a segment in the passes of one microbatch under a choice: the sum over its kernels. The
/// step phase is left at zero; [`StepPhases::add_to`] adds it.
pub fn pass_time(
    space: &SegmentSpace,
    choice: &SegmentChoice,
    prices: StreamPrices,
) -> SegmentTime {
    let mut total = SegmentTime::default();
    for id in space.segment.op_ids() {
        let option = &choice.ops[id.0 as usize];
        let is_deferrable =
            is_weight_gradient_deferrable(&space.segment, id, choice, &space.context);
        for mut time in op_times(space, id, std::slice::from_ref(option), prices) {
            if !is_deferrable {
                time.weight_gradient = Seconds(0.0);
            }
            total.add(time);
        }
    }
    for id in space.segment.value_ids() {
        total.add(FlowPrices::new(space, id, prices).time(&choice.flows[id.0 as usize]));
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
