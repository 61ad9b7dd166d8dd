//! Keys of the tables and solutions that searches share.

use narrows_cost_model::GroupLinks;
use narrows_plan::graph::{Grouping, SegmentKind};
use narrows_plan::strategy::{AlternativesContext, TiedWeightLayout};
use narrows_plan::{Bytes, Context, Dim};

use super::spec::SegmentSpec;

/// Key of alternatives within one model and one set of rules.
pub(super) type AlternativesKey = (SegmentSpec, Grouping, AlternativesContext);

/// Key of times of one microbatch: the context without its data and pipeline axes, and the links of its
/// tensor and context axes.
pub(crate) type PassKey = (Context, [GroupLinks; 2]);

/// Key of times of a step without stages and their transfers: the context, and the links of its tensor,
/// context and data axes.
pub(super) type StepKey = (Context, [GroupLinks; 3]);

/// A segment without its boundary layout, on which the times of ops do not depend: its kind and shape, the layout of a
/// tied weight, and its grouping.
pub(super) type OpsKey = (SegmentKind, usize, Option<TiedWeightLayout>, Grouping);

/// As [`StepKey`] for the step phase, which depends on the dim of tokens but on no other part of the workload.
pub(super) type StepPhaseKey = (StepKey, Option<Dim>);

/// A segment on a stage, in a context whose number of microbatches does not matter, under a memory limit.
pub(super) type ByteMultipliersKey = (SegmentSpec, Context, usize, Bytes);

/// The key of the ops of a segment.
pub(super) fn ops_key(spec: SegmentSpec, grouping: Grouping) -> OpsKey {
    (spec.kind, spec.shape, spec.tied_weight, grouping)
}
