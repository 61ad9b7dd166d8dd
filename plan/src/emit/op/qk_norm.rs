//! RMSNorm of the heads of queries and keys, followed by RoPE where these are rotated. The scales are the same for all
//! heads, so a device with a shard of the heads has all of them, and a part of their gradient.

use crate::graph::QkvHeads;
use crate::model::LinearKind;
use crate::program::{FusedOp, QkHeads};

use super::{InstrTemplate, OpEmitter, rotary, row_parameters};

pub(super) fn forward(emitter: &OpEmitter, heads: &QkvHeads) -> Vec<InstrTemplate> {
    let local = local_heads(emitter, heads);
    let mut templates =
        vec![row_parameters::forward(emitter, FusedOp::QkNorm(local), local.scale_count())];
    templates.extend(rotary::of_heads(emitter, heads, false));
    templates
}

pub(super) fn backward(emitter: &OpEmitter, heads: &QkvHeads) -> Vec<InstrTemplate> {
    let local = local_heads(emitter, heads);
    let mut templates: Vec<InstrTemplate> =
        rotary::of_heads(emitter, heads, true).into_iter().collect();
    templates.push(row_parameters::backward(
        emitter,
        FusedOp::QkNormBackward(local),
        local.scale_count(),
    ));
    templates
}

fn local_heads(emitter: &OpEmitter, heads: &QkvHeads) -> QkHeads {
    let local = |linear| emitter.shard(heads.heads_of(linear));
    let (queries, keys) = (local(LinearKind::Q), local(LinearKind::K));
    QkHeads { head_dim: heads.head_dim, queries, keys }
}
