//! Templates of the reshards between the producer and the consumers of a value, forward and backward.

use crate::Layout;
use crate::context::Context;
use crate::graph::Value;
use crate::strategy::{Flow, Save};

use super::{InstrTemplate, gradient_fill, gradient_sum, reshard};

/// The reshard that makes copy `copy` of a value from the producer's, in the forward pass.
pub fn copy_forward(
    value: &Value,
    flow: &Flow,
    copy: usize,
    context: &Context,
) -> Vec<InstrTemplate> {
    let statistic = flow.producer.norm_owed && value.carries_statistic_of.is_some();
    copy_from_first(value, flow, copy, statistic, context)
}

/// The same reshard when the copy is recomputed: the statistic is known already.
pub fn copy_recompute(
    value: &Value,
    flow: &Flow,
    copy: usize,
    context: &Context,
) -> Vec<InstrTemplate> {
    copy_from_first(value, flow, copy, false, context)
}

fn copy_from_first(
    value: &Value,
    flow: &Flow,
    copy: usize,
    statistic: bool,
    context: &Context,
) -> Vec<InstrTemplate> {
    if copy == 0 {
        return vec![];
    }
    let to = flow.copies()[copy];
    reshard(value.width(), flow.producer.forward, to, statistic, context).unwrap_or_default()
}

/// How the gradient contributions of one layout reach the producer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradientPath {
    /// The layout of the contributions.
    pub layout: Layout,
    /// Zeroes the sum before the first contribution, unless the last consumer writes it.
    pub fill: Option<InstrTemplate>,
    /// Brings the sum to the producer's layout.
    pub reshard: Vec<InstrTemplate>,
    /// Adds it to the first path's result.
    pub sum: Option<InstrTemplate>,
}

/// The paths of a gradient to the producer: one for each distinct layout of contributions.
pub fn gradient_paths(value: &Value, flow: &Flow, context: &Context) -> Vec<GradientPath> {
    let width = value.width();
    let target = flow.producer.backward;
    flow.gradients()
        .into_iter()
        .enumerate()
        .map(|(index, layout)| GradientPath {
            layout,
            fill: (index > 0).then(|| gradient_fill(width, layout, context)),
            reshard: reshard(width, layout, target, false, context).unwrap_or_default(),
            sum: (index > 0).then(|| gradient_sum(width, target, context)),
        })
        .collect()
}

/// Everything a flow runs in the forward pass.
pub fn flow_forward(value: &Value, flow: &Flow, context: &Context) -> Vec<InstrTemplate> {
    (1..flow.copies().len()).flat_map(|copy| copy_forward(value, flow, copy, context)).collect()
}

/// The reshards that a flow runs again in the backward pass.
pub fn flow_recompute(value: &Value, flow: &Flow, context: &Context) -> Vec<InstrTemplate> {
    (1..flow.copies().len())
        .filter(|copy| flow.saves[*copy] == Save::Recomputed)
        .flat_map(|copy| copy_recompute(value, flow, copy, context))
        .collect()
}

/// All instructions of a flow in the backward pass, without recomputation.
pub fn flow_backward(value: &Value, flow: &Flow, context: &Context) -> Vec<InstrTemplate> {
    gradient_paths(value, flow, context)
        .into_iter()
        .flat_map(|path| path.fill.into_iter().chain(path.reshard).chain(path.sum))
        .collect()
}
