//! Links of a segment's cost table: equal layouts at the two ends of a port, and values that the backward pass reads are
//! kept or recomputed.

use narrows_plan::emit::ResidualSum;
use narrows_plan::graph::{OpId, ValueId};
use narrows_plan::strategy::{
    Flow, OpOption, Save, SegmentSpace, backward_reads_input, backward_reads_output,
};
use narrows_plan::{EdgeLayout, Layout};

use crate::table::{TableLink, TableNodeId};

/// The links of the table of a space.
pub(crate) fn links(space: &SegmentSpace) -> Vec<TableLink> {
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

    /// Demands that an input which the op reads in the backward pass, or for its recomputation, is kept or recomputed. The
    /// summand of a residual sum is so only then: the time of its flow counts the sum as recomputed with it.
    fn input_saved(&self, op: OpId, port: usize) -> TableLink {
        let node = self.space.segment.op(op);
        let is_summand = ResidualSum::of_some_flow(&self.space.segment, self.value).is_some();
        // `None` is the key of an input that is dropped.
        let mut keys: Vec<Option<Layout>> = vec![];
        let mut key = |layout| index_of(&mut keys, layout);
        let demand = self
            .options(op)
            .iter()
            .map(|option| {
                let reads = option.recompute || backward_reads_input(&node.op);
                match reads {
                    true => Some(key(Some(option.choice.inputs[port].forward))),
                    false => is_summand.then(|| key(None)),
                }
            })
            .collect();
        let offer = self
            .flows()
            .iter()
            .map(|flow| {
                let saved = flow.copies().into_iter().zip(&flow.saves);
                let saved: Vec<Layout> = saved
                    .filter(|(_, save)| **save != Save::Dropped)
                    .map(|(layout, _)| layout)
                    .collect();
                let dropped = (is_summand && saved.is_empty()).then_some(None);
                saved
                    .into_iter()
                    .map(Some)
                    .chain(dropped)
                    .fold(0, |set, state| set | 1 << key(state))
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
