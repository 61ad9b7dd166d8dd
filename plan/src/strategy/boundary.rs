//! Layouts of the tensors between segments.

use crate::EdgeLayout;
use crate::context::Context;
use crate::graph::{Segment, ValueId};

/// Layouts of the tensors between segments: one for the hidden state, one for all crossing latents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BoundaryLayout {
    /// Layouts of the hidden state.
    pub hidden: EdgeLayout,
    /// Layouts of the crossing latents; replicated when the model has none.
    pub latents: EdgeLayout,
}

impl BoundaryLayout {
    /// Boundary layouts without crossing latents.
    pub const fn hidden(hidden: EdgeLayout) -> BoundaryLayout {
        BoundaryLayout { hidden, latents: EdgeLayout::REPLICATED }
    }

    /// Layouts of boundary tensor `index`; 0 is the hidden state.
    pub fn edge(&self, index: usize) -> EdgeLayout {
        if index == 0 { self.hidden } else { self.latents }
    }

    /// Layouts of an input of a segment, as the previous segment produces it.
    ///
    /// # Panics
    /// When the value is not an input of the segment.
    pub fn input_edge(&self, segment: &Segment, value: ValueId) -> EdgeLayout {
        let index = segment.input_index(value);
        self.edge(index.expect("a value without producer is an input of its segment"))
    }

    /// Layouts in which the next segment consumes a value; `None` for values that are not outputs.
    pub fn output_edge(&self, segment: &Segment, value: ValueId) -> Option<EdgeLayout> {
        Some(self.edge(segment.output_index(value)?))
    }
}

/// All legal boundary layouts for a hidden state of width `hidden` and crossing latents of widths
/// `latents`.
pub fn boundary_layouts(hidden: u64, latents: &[u64], context: &Context) -> Vec<BoundaryLayout> {
    let all = layouts(std::slice::from_ref(&hidden), context);
    let crossing =
        if latents.is_empty() { vec![EdgeLayout::REPLICATED] } else { layouts(latents, context) };
    let pairs = all.iter().flat_map(|&hidden| {
        crossing.iter().map(move |&latents| BoundaryLayout { hidden, latents })
    });
    pairs.collect()
}

fn layouts(widths: &[u64], context: &Context) -> Vec<EdgeLayout> {
    let mut layouts = vec![EdgeLayout::REPLICATED];
    if context.tensor_size() > 1 {
        if widths.iter().all(|width| width.is_multiple_of(context.tensor_size())) {
            layouts.push(EdgeLayout::sharded(crate::Dim::Feature));
        }
        layouts.extend(context.token_dim().map(EdgeLayout::sharded));
    }
    layouts
}
