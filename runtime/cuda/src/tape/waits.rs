//! What of one stream must wait for what of another.
//!
//! A program is a list: done one after the other it is right. Done on two streams it is right when
//! of any two entries that touch the same bytes, one of them to write, the later waits for the
//! earlier. Within a stream that is so by itself.
//!
//! An entry waits for the last entry of the other stream that it conflicts with, and for that one alone:
//! all before it are over by then, and so is what those waited for. Where something before it in its own
//! stream has waited for as much, it waits for nothing.

use super::{GraphNode, TouchedRange};

/// A stream of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StreamId {
    /// Kernels and products.
    Compute,
    /// Collectives.
    Collectives,
}

impl StreamId {
    /// Both.
    pub const ALL: [StreamId; 2] = [StreamId::Compute, StreamId::Collectives];
}

/// Says of each entry what it waits for, and who is waited for.
pub(super) fn order(entries: Vec<(GraphNode, Vec<TouchedRange>)>) -> Vec<GraphNode> {
    let (mut made, touched): (Vec<GraphNode>, Vec<Vec<TouchedRange>>) = entries.into_iter().unzip();
    // How many entries, counted over both lanes, were over when each lane's last began.
    let mut known = [0; 2];
    for at in 0..made.len() {
        let lane = made[at].lane;
        let begin = known[lane as usize];
        let conflict = (begin..at).rev().find(|before| {
            made[*before].lane != lane && conflicts(&touched[at], &touched[*before])
        });
        if let Some(before) = conflict {
            made[at].waits = Some(before);
            made[before].awaited = true;
            known[lane as usize] = before + 1;
        }
    }
    made
}

fn conflicts(one: &[TouchedRange], other: &[TouchedRange]) -> bool {
    one.iter().any(|a| {
        other.iter().any(|b| {
            (a.writes || b.writes) && a.bytes.start < b.bytes.end && b.bytes.start < a.bytes.end
        })
    })
}

#[cfg(test)]
mod tests {
    use super::super::NodeWork;
    use super::*;
    use narrows_runtime::TimeCategory;

    fn entry(lane: StreamId) -> GraphNode {
        GraphNode {
            lane,
            work: NodeWork::Launches(vec![]),
            waits: None,
            awaited: false,
            part: TimeCategory::Other,
            name: "test",
            origin: String::new(),
            updates: false,
        }
    }

    /// Random lists: whatever conflicts is ordered by the waits and the lanes, and no wait is idle.
    #[test]
    fn conflicts_are_ordered_and_nothing_else() {
        let mut state = 7_u64;
        let mut dice = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..300 {
            let count = 2 + dice(14) as usize;
            let list: Vec<(StreamId, Vec<TouchedRange>)> = (0..count)
                .map(|_| {
                    let lane = StreamId::ALL[dice(2) as usize];
                    let touched = (0..1 + dice(2))
                        .map(|_| {
                            let start = dice(12);
                            let bytes = start..start + 1 + dice(4);
                            TouchedRange { bytes, writes: dice(2) == 0 }
                        })
                        .collect();
                    (lane, touched)
                })
                .collect();
            let made = order(list.iter().map(|(l, t)| (entry(*l), t.clone())).collect());
            let ordered = |skipped: Option<usize>| {
                let mut before = vec![vec![false; count]; count];
                for at in 0..count {
                    let waits = made[at].waits.filter(|_| skipped != Some(at)).into_iter();
                    let same = (0..at).filter(|b| made[*b].lane == made[at].lane);
                    let direct: Vec<usize> = waits.chain(same).collect();
                    for from in direct {
                        before[at][from] = true;
                        let known = before[from].clone();
                        before[at].iter_mut().zip(known).for_each(|(mine, its)| *mine |= its);
                    }
                }
                (0..count)
                    .all(|at| (0..at).all(|b| before[at][b] || !conflicts(&list[at].1, &list[b].1)))
            };
            assert!(ordered(None));
            for at in (0..count).filter(|at| made[*at].waits.is_some()) {
                assert!(made[at].waits.iter().all(|b| *b < at && made[*b].awaited));
                assert!(!ordered(Some(at)), "entry {at} waits for nothing it needs");
            }
        }
    }
}
