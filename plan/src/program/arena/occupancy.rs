//! Addresses that are occupied during spans of time, for the placement of buffers by lifetime.
//!
//! A segment tree over time divides every lifetime among O(log n) nodes. Each node has the union of the addresses of
//! buffers that are alive during all of its time, and the union of those that are alive during some of it. The addresses
//! occupied at any time of a lifetime are then the union of O(log n) sets: of the second kind at the nodes that cover the
//! lifetime, of the first kind at the nodes above these. First fit leaves few gaps, so that a set is a short list of
//! ranges, however many buffers it has.

/// First and last position of a timeline at which a buffer is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LiveRange {
    pub first: usize,
    pub last: usize,
}

/// Which addresses are occupied when.
pub(super) struct Occupancy {
    /// Times at which a lifetime begins, ascending. Two lifetimes overlap exactly if both contain one of these times.
    begins: Vec<usize>,
    /// Number of leaves of the tree, one for each of these times: a power of two.
    leaves: usize,
    /// Node i has the children 2i and 2i + 1; node 0 is unused.
    nodes: Vec<Node>,
}

#[derive(Clone, Default)]
struct Node {
    /// Addresses occupied during all times of the node.
    always: AddressSet,
    /// Addresses occupied at some time of the node.
    sometimes: AddressSet,
}

/// The nodes of a lifetime.
struct LifetimeNodes {
    /// Nodes whose times are those of the lifetime, each time once.
    covering: Vec<usize>,
    /// All nodes above these, which also have other times.
    above: Vec<usize>,
}

impl Occupancy {
    /// No address is occupied. `lifetimes` has all those that will be placed.
    pub fn new(lifetimes: impl Iterator<Item = LiveRange>) -> Occupancy {
        let mut begins: Vec<usize> = lifetimes.map(|lifetime| lifetime.first).collect();
        begins.sort_unstable();
        begins.dedup();
        let leaves = begins.len().next_power_of_two();
        Occupancy { begins, leaves, nodes: vec![Node::default(); 2 * leaves] }
    }

    /// Places `bytes` during a lifetime at the lowest free offset that is not below `base`, and returns the offset.
    pub fn place(&mut self, lifetime: LiveRange, bytes: u64, base: u64) -> u64 {
        let nodes = self.nodes_of(lifetime);
        let offset = self.first_fit(&nodes, bytes, base);
        let end = offset + bytes;
        for &node in &nodes.covering {
            self.nodes[node].always.insert(offset, end);
        }
        for &node in nodes.covering.iter().chain(&nodes.above) {
            self.nodes[node].sometimes.insert(offset, end);
        }
        offset
    }

    fn first_fit(&self, nodes: &LifetimeNodes, bytes: u64, base: u64) -> u64 {
        let covering = nodes.covering.iter().map(|node| &self.nodes[*node].sometimes);
        let above = nodes.above.iter().map(|node| &self.nodes[*node].always);
        let mut occupied: Vec<&[(u64, u64)]> =
            covering.chain(above).map(|set| &set.0[..]).filter(|set| !set.is_empty()).collect();
        let mut offset = base;
        loop {
            let before = offset;
            for ranges in &mut occupied {
                // The offset only grows, so that ranges which end below it are not needed again.
                *ranges = &ranges[ranges.partition_point(|(_, end)| *end <= offset)..];
                if let Some((_, end)) = ranges.first().filter(|(begin, _)| *begin < offset + bytes)
                {
                    offset = *end;
                }
            }
            if offset == before {
                return offset;
            }
        }
    }

    fn nodes_of(&self, lifetime: LiveRange) -> LifetimeNodes {
        let index = |time| self.begins.partition_point(|begin| *begin < time);
        let mut first = self.leaves + index(lifetime.first);
        // After the last.
        let mut last = self.leaves + index(lifetime.last + 1);
        let (mut covering, mut above) = (vec![], vec![]);
        let ends = [first, last - 1];
        while first < last {
            if first % 2 == 1 {
                covering.push(first);
                first += 1;
            }
            if last % 2 == 1 {
                last -= 1;
                covering.push(last);
            }
            (first, last) = (first / 2, last / 2);
        }
        for end in ends {
            // Each time has one covering node; the nodes between them have times of the lifetime only.
            let mut node = end;
            while !covering.contains(&node) {
                node /= 2;
            }
            node /= 2;
            while node > 0 && !above.contains(&node) {
                above.push(node);
                node /= 2;
            }
        }
        LifetimeNodes { covering, above }
    }
}

/// A set of addresses: disjoint ranges that do not touch, ascending.
#[derive(Clone, Default)]
struct AddressSet(Vec<(u64, u64)>);

impl AddressSet {
    /// Adds the addresses from `begin` to `end`.
    fn insert(&mut self, begin: u64, end: u64) {
        let first = self.0.partition_point(|(_, stop)| *stop < begin);
        let last = self.0.partition_point(|(start, _)| *start <= end);
        match self.0.get(first..last) {
            Some([]) | None => self.0.insert(first, (begin, end)),
            Some(touching) => {
                let start = touching[0].0.min(begin);
                let stop = touching[touching.len() - 1].1.max(end);
                self.0[first] = (start, stop);
                self.0.drain(first + 1..last);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lowest offset that is free, by comparison with every placed buffer.
    fn place_by_comparison(
        placed: &mut Vec<(u64, u64, LiveRange)>,
        span: LiveRange,
        bytes: u64,
        base: u64,
    ) -> u64 {
        let overlapping = |other: &LiveRange| span.first <= other.last && other.first <= span.last;
        let mut alive: Vec<_> =
            placed.iter().filter(|(_, _, other)| overlapping(other)).copied().collect();
        alive.sort_by_key(|(begin, end, _)| (*begin, *end));
        let mut offset = base;
        for (begin, end, _) in alive {
            if begin < offset + bytes && end > offset {
                offset = end;
            }
        }
        placed.push((offset, offset + bytes, span));
        offset
    }

    #[test]
    fn placement_equals_comparison_with_every_buffer() {
        arbtest::arbtest(|draw| {
            let (base, times): (u64, usize) =
                (draw.int_in_range(0..=64)?, draw.int_in_range(1..=40)?);
            let mut buffers = vec![];
            for _ in 0..draw.int_in_range(0..=60)? {
                let first = draw.int_in_range(0..=times)?;
                let last = first + draw.int_in_range(0..=times)?;
                buffers.push((LiveRange { first, last }, draw.int_in_range(0..=9)? * 64));
            }
            // Not always the largest first: placement is exact in any order.
            if draw.arbitrary()? {
                buffers.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
            }
            let mut occupancy = Occupancy::new(buffers.iter().map(|(lifetime, _)| *lifetime));
            let mut placed = vec![];
            for (lifetime, bytes) in buffers {
                let expected = place_by_comparison(&mut placed, lifetime, bytes, base);
                assert_eq!(occupancy.place(lifetime, bytes, base), expected);
            }
            Ok(())
        });
    }
}
