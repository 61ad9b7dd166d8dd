//! Waits between the streams of a segment.
//!
//! A program says which instructions may run beside a collective: those directly after it, by their number. Everything
//! else runs in order, as the prices of the cost model assume. Nodes of one stream execute in order anyway.
//!
//! A node waits for the last node of the other stream that it may not run beside, and only for that one: all nodes
//! before it, and those they waited for, have then ended. No wait is added where an earlier node of the same
//! stream has waited for that node or a later one.

use super::graph::{GraphNode, StreamId};

/// Sets `waits_for` and `is_awaited` of the nodes of a segment, each with the number of nodes after it that may run
/// beside it.
pub(super) fn add_waits(segment: Vec<(GraphNode, usize)>) -> Vec<GraphNode> {
    let (mut nodes, overlapped): (Vec<GraphNode>, Vec<usize>) = segment.into_iter().unzip();
    // Per stream: all nodes before this index had ended when its latest node began.
    let mut ended = [0; StreamId::ALL.len()];
    for index in 0..nodes.len() {
        let stream = nodes[index].stream;
        let begin = ended[stream as usize];
        let latest = (begin..index).rev().find(|earlier| {
            nodes[*earlier].stream != stream && index > *earlier + overlapped[*earlier]
        });
        if let Some(earlier) = latest {
            nodes[index].waits_for = Some(earlier);
            nodes[earlier].is_awaited = true;
            ended[stream as usize] = earlier + 1;
        }
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
            waits_for: None,
            is_awaited: false,
            category: TimeCategory::Other,
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
                .map(|_| match StreamId::ALL[random(2) as usize] {
                    StreamId::Collectives => (StreamId::Collectives, random(4) as usize),
                    stream => (stream, 0),
                })
                .collect();
            let nodes = add_waits(segment.iter().map(|(s, count)| (node(*s), *count)).collect());
            let all_ordered = |ignored_wait: Option<usize>| {
                let mut precedes = vec![vec![false; count]; count];
                for index in 0..count {
                    let wait = nodes[index].waits_for.filter(|_| ignored_wait != Some(index));
                    let same_stream =
                        (0..index).filter(|earlier| nodes[*earlier].stream == nodes[index].stream);
                    let direct: Vec<usize> = wait.into_iter().chain(same_stream).collect();
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
            for index in (0..count).filter(|index| nodes[*index].waits_for.is_some()) {
                let earlier = nodes[index].waits_for.unwrap();
                assert!(earlier < index && nodes[earlier].is_awaited);
                assert!(!all_ordered(Some(index)), "the wait of node {index} is superfluous");
            }
        }
    }
}
