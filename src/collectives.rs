//! Collectives of activations, as reports and pictures list them.

use std::collections::BTreeMap;

use narrows_plan::Bytes;
use narrows_plan::emit::InstrTemplate;
use narrows_plan::kernel::CollectiveKind;
use narrows_plan::program::Action;

/// Bytes of the unsharded tensors of the tensor-axis and context-axis collectives of some instructions, by kind. A
/// statistic that is reduced along with a payload is left out. The shifts of ring attention count.
pub fn activation_collectives(templates: &[InstrTemplate]) -> BTreeMap<CollectiveKind, Bytes> {
    let mut kinds: BTreeMap<CollectiveKind, Bytes> = BTreeMap::new();
    for template in templates {
        if let Action::Attention(attention) = &template.action {
            for (count, shift) in attention.ring_shifts() {
                *kinds.entry(shift.kind).or_default() += shift.payload * count;
            }
        }
        if let Action::Collective(collective) = &template.action
            && collective.axis.shards_activations()
        {
            let alone = collective.payload == Bytes(0);
            *kinds.entry(collective.kind()).or_default() +=
                if alone { collective.statistic } else { collective.payload };
        }
    }
    kinds
}
