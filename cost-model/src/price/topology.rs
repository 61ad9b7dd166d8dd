//! The nodes that the members of a device group lie in.
//!
//! Devices fill nodes in rank order, D a node. A group of n members at stride s spans n·s ranks. It lies in one node
//! when that span divides D (or when one node holds the whole mesh). Otherwise a node holds ⌈D/s⌉ members at most,
//! and a ring passes through ⌈n / members a node⌉ nodes. Of the groups of one shape, all are priced like the worst.

use narrows_plan::DeviceGroup;

/// Devices and nodes of a mesh.
#[derive(Clone, Copy, Debug)]
pub(super) struct Topology {
    devices_per_node: u64,
    devices: u64,
}

/// The spread of a group over nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GroupPlacement {
    /// Members of the group.
    pub members: u64,
    /// Nodes that hold members.
    pub nodes: u64,
    /// Members in the fullest node.
    pub members_per_node: u64,
}

impl Topology {
    /// A mesh of `devices`, with `devices_per_node` in each node but perhaps the last.
    pub(super) fn new(devices_per_node: u64, devices: u64) -> Self {
        Topology { devices_per_node: devices_per_node.max(1), devices }
    }

    /// Devices of a full node.
    pub(super) fn devices_per_node(&self) -> u64 {
        self.devices_per_node
    }

    /// Whether the mesh takes more than one node.
    pub(super) fn has_several_nodes(&self) -> bool {
        self.devices > self.devices_per_node
    }

    /// The placement of the worst group of this shape.
    pub(super) fn place(&self, group: &DeviceGroup) -> GroupPlacement {
        let members = group.size.max(1);
        let stride = group.stride.max(1);
        let span = members.saturating_mul(stride);
        let per_node = self.devices_per_node;
        if !self.has_several_nodes() || (span <= per_node && per_node.is_multiple_of(span)) {
            return GroupPlacement { members, nodes: 1, members_per_node: members };
        }
        let local = if span <= per_node {
            // Some group straddles a node border, at best with half of its members on either side.
            members.div_ceil(2)
        } else {
            per_node.div_ceil(stride).min(members)
        };
        GroupPlacement { members, nodes: members.div_ceil(local), members_per_node: local }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use narrows_plan::Axis;

    #[track_caller]
    fn check(
        devices_per_node: u64,
        devices: u64,
        size: u64,
        stride: u64,
        nodes: u64,
        members_per_node: u64,
    ) {
        let group = DeviceGroup { axis: Axis::Data, size, stride };
        let placement = Topology::new(devices_per_node, devices).place(&group);
        assert_eq!(placement, GroupPlacement { members: size, nodes, members_per_node });
    }

    #[test]
    fn placement_follows_from_the_span() {
        check(4, 4, 4, 1, 1, 4);
        check(8, 16, 4, 1, 1, 4);
        check(4, 16, 8, 1, 2, 4);
        check(4, 16, 4, 4, 4, 1);
        check(8, 16, 4, 4, 2, 2);
        check(8, 64, 4, 16, 4, 1);
    }

    #[test]
    fn groups_that_straddle_a_border_span_two_nodes() {
        check(4, 6, 3, 1, 2, 2);
        check(4, 3, 3, 1, 1, 3);
    }
}
