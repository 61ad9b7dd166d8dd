//! Where the members of a group sit.
//!
//! Devices fill nodes in the order of their numbers, D a node. A group of n members at distance s
//! spans n·s numbers. It lies in one node when that span divides D (or when one node holds the whole
//! mesh). Otherwise a node holds ⌈D/s⌉ of its members at most, and the ring passes through
//! ⌈n / members a node⌉ nodes; groups that straddle a border are priced like the worst of them.

use narrows_plan::mesh::DeviceGroup;

/// How devices fill nodes.
#[derive(Clone, Copy, Debug)]
pub struct Topology {
    devices_per_node: u64,
    devices: u64,
}

/// How the members of a group are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupPlacement {
    /// Members.
    pub members: u64,
    /// Nodes they lie in.
    pub nodes: u64,
    /// Members in the fullest node.
    pub local: u64,
}

impl Topology {
    /// `devices` in all, `devices_per_node` in each node but perhaps the last.
    pub fn new(devices_per_node: u64, devices: u64) -> Self {
        Topology { devices_per_node: devices_per_node.max(1), devices }
    }

    /// Devices of a full node.
    pub fn devices_per_node(&self) -> u64 {
        self.devices_per_node
    }

    /// How the members of the worst group of this shape are spread.
    pub fn place(&self, group: &DeviceGroup) -> GroupPlacement {
        let members = group.size.max(1);
        let stride = group.stride.max(1);
        let span = members.saturating_mul(stride);
        let per_node = self.devices_per_node;
        if self.devices <= per_node || (span <= per_node && per_node.is_multiple_of(span)) {
            return GroupPlacement { members, nodes: 1, local: members };
        }
        let local = if span <= per_node {
            // Some group straddles a border, with its halves on either side at best.
            members.div_ceil(2)
        } else {
            per_node.div_ceil(stride).min(members)
        };
        GroupPlacement { members, nodes: members.div_ceil(local), local }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use narrows_plan::mesh::Axis;

    #[track_caller]
    fn check(per_node: u64, devices: u64, size: u64, stride: u64, nodes: u64, local: u64) {
        let group = DeviceGroup { axis: Axis::Data, size, stride };
        let placed = Topology::new(per_node, devices).place(&group);
        assert_eq!(placed, GroupPlacement { members: size, nodes, local });
    }

    #[test]
    fn groups_are_placed_by_their_span() {
        check(4, 4, 4, 1, 1, 4);
        check(8, 16, 4, 1, 1, 4);
        check(4, 16, 8, 1, 2, 4);
        check(4, 16, 4, 4, 4, 1);
        check(8, 16, 4, 4, 2, 2);
        check(8, 64, 4, 16, 4, 1);
    }

    #[test]
    fn a_group_that_straddles_a_border_is_priced_as_such() {
        check(4, 6, 3, 1, 2, 2);
        check(4, 3, 3, 1, 1, 3);
    }
}
