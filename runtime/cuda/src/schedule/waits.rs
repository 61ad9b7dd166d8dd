//! Waits between the streams of a segment.
//!
//! A program says which instructions may run beside a collective: those directly after it, by their number. Everything
//! else runs in order, as the prices of the cost model assume. Nodes of one stream execute in order anyway.
//!
//! A node waits for the last node of each other stream that it may not run beside, unless that one has ended for another
//! reason: an earlier node of the same stream, or another node that this one waits for, came after it.

use std::cmp::Reverse;

use super::graph::{GraphNode, StreamId};

/// Of each stream, the number of nodes of the segment before which all of the stream's nodes have ended.
type Ended = [usize; StreamId::ALL.len()];

/// Sets `waits_for` and `is_awaited` of the nodes of a segment, each with the number of nodes after it that may run
/// beside it.
pub(super) fn add_waits(segment: Vec<(GraphNode, usize)>) -> Vec<GraphNode> {
    let (mut nodes, overlapped): (Vec<GraphNode>, Vec<usize>) = segment.into_iter().unzip();
    // What has ended when each node ends.
    let mut after: Vec<Ended> = Vec::with_capacity(nodes.len());
    let mut of_stream: [Vec<usize>; StreamId::ALL.len()] = Default::default();
    for index in 0..nodes.len() {
        let stream = nodes[index].stream;
        let before = of_stream[stream as usize].last();
        let mut ended = before.map_or(Ended::default(), |before| after[*before]);
        let is_ordered = |earlier: &usize| index > *earlier + overlapped[*earlier];
        let others = StreamId::ALL.into_iter().filter(|other| *other != stream);
        let mut last: Vec<usize> = others
            .filter_map(|other| of_stream[other as usize].iter().copied().rev().find(is_ordered))
            .collect();
        // Later nodes first: others may have ended before them.
        last.sort_unstable_by_key(|earlier| Reverse(*earlier));
        for earlier in last {
            if earlier < ended[nodes[earlier].stream as usize] {
                continue;
            }
            nodes[index].waits_for.push(earlier);
            nodes[earlier].is_awaited = true;
            for (ended, other) in ended.iter_mut().zip(after[earlier]) {
                *ended = (*ended).max(other);
            }
        }
        of_stream[stream as usize].push(index);
        ended[stream as usize] = index + 1;
        after.push(ended);
    }
    nodes
}

#[cfg(test)]
mod tests {
    use narrows_plan::random::SplitMix64;
    use narrows_runtime::TimeCategory;

    use super::*;
    use crate::schedule::graph::NodeWork;

    fn node(stream: StreamId) -> GraphNode {
        GraphNode {
            stream,
            work: NodeWork::Launches(vec![]),
            waits_for: vec![],
            is_awaited: false,
            category: TimeCategory::Other,
            begins_instr: true,
            name: "test",
            origin: String::new(),
            updates_weights: false,
        }
    }

    /// Random segments: waits and streams order all nodes that may not run beside each other, and no wait is superfluous.
    #[test]
    fn only_overlapped_nodes_are_unordered() {
        let mut rng = SplitMix64::new(7);
        let mut random = |end: u64| rng.next_u64() % end;
        for _ in 0..300 {
            let count = 2 + random(14) as usize;
            let segment: Vec<(StreamId, usize)> = (0..count)
                .map(|_| match StreamId::ALL[random(3) as usize] {
                    StreamId::Collectives => (StreamId::Collectives, random(4) as usize),
                    StreamId::Compute => (StreamId::Compute, 0),
                    stream => (stream, random(8) as usize),
                })
                .collect();
            let nodes = add_waits(segment.iter().map(|(s, count)| (node(*s), *count)).collect());
            let all_ordered = |ignored_wait: Option<(usize, usize)>| {
                let mut precedes = vec![vec![false; count]; count];
                for index in 0..count {
                    let waits = nodes[index].waits_for.iter().copied();
                    let same_stream =
                        (0..index).filter(|earlier| nodes[*earlier].stream == nodes[index].stream);
                    let direct = waits
                        .filter(|earlier| ignored_wait != Some((index, *earlier)))
                        .chain(same_stream);
                    for earlier in direct {
                        precedes[index][earlier] = true;
                        let transitive = precedes[earlier].clone();
                        precedes[index]
                            .iter_mut()
                            .zip(transitive)
                            .for_each(|(known, more)| *known |= more);
                    }
                }
                (0..count).all(|index| {
                    (0..index).all(|earlier| {
                        precedes[index][earlier] || index <= earlier + segment[earlier].1
                    })
                })
            };
            assert!(all_ordered(None));
            for (index, node) in nodes.iter().enumerate() {
                for earlier in &node.waits_for {
                    assert!(*earlier < index && nodes[*earlier].is_awaited);
                    let without = all_ordered(Some((index, *earlier)));
                    assert!(!without, "node {index} waits for node {earlier} without need");
                }
            }
        }
    }
}
