//! The price of collectives and P2P transfers, after NCCL's tuner.
//!
//! For n devices in N nodes, payload S (the unsharded tensor), every algorithm and protocol takes
//! ```text
//! time = base + hops · hop + fill · S/(S + S½) + S · f / (bus · share)
//! ```
//! and the fastest is taken. `base`, `hop` and `share` are NCCL's constants ([`nccl`]); `fill` and the efficiency
//! in `bus` are numbers of the profile.
//!
//! | kind | algorithm | hops, of which across nodes | f |
//! |---|---|---|---|
//! | all-reduce | ring | 2(n−1), 2(N−1) | 2(n−1)/n |
//! | all-reduce | tree | 2(n/N−1 + log₂N), 2·log₂N | 2, and a correction by size |
//! | reduce-scatter, all-gather | ring | n−1, N−1 | (n−1)/n |
//! | shift | a P2P transfer to the neighbour | | |
//! | all-to-all | direct | 1 | (n/N−1)/n² inside, (n−n/N)/n² across, at the same time |
//!
//! `bus` is the bandwidth of the slowest link: inside a node all links of a device (with [`NodeWiring::AllPairs`],
//! the links to members only), across nodes the members' share of the network cards. Sibling groups use the other
//! cards at the same time. Between two nodes a tree sends half as much over the network as between the devices of a node:
//! each node is the root of one of the two trees, which has one child (NVIDIA/nccl, issues 812 and 946). For it, `across` counts
//! twice.

use narrows_plan::kernel::{Collective, CollectiveKind, Transfer};
use narrows_plan::{Axis, Bytes, DeviceGroup, Seconds};

use super::nccl::{self, NcclAlgorithm, NcclProtocol};
use super::topology::{GroupPlacement, Topology};
use crate::profile::{CollectiveLibrary, LinkSpec, NodeWiring, Profile};

/// Links of one device group: with the bytes and the values that profiles of equal
/// [`Profile::fingerprint_within_nodes`](crate::Profile::fingerprint_within_nodes) share, they determine the prices of
/// its collectives and transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupLinks {
    placement: GroupPlacement,
    /// Bits of the bandwidth and of the extra latency between nodes, for a group that spans nodes.
    inter_node: Option<[u64; 2]>,
}

impl GroupLinks {
    /// The links of a group of all devices.
    pub fn of_all_devices(profile: &Profile, devices: u64) -> GroupLinks {
        let topology = Topology::new(profile.devices_per_node(), devices);
        let group = DeviceGroup { axis: Axis::Data, size: devices, stride: 1 };
        LinkPrice::new(&profile.file().links, topology).of_group(&group)
    }
}

/// Prices collectives and transfers; see the [module](self).
#[derive(Clone, Debug)]
pub(super) struct LinkPrice {
    library: CollectiveLibrary,
    topology: Topology,
    wiring: NodeWiring,
    intra_bytes_per_s: f64,
    /// One device's share of the network cards of its node.
    nic_bytes_per_s: f64,
    fill_s: f64,
    fill_half_bytes: f64,
    inter_node_extra_s: f64,
}

impl LinkPrice {
    /// From the links of a validated profile.
    pub(super) fn new(links: &LinkSpec, topology: Topology) -> Self {
        let (intra, inter) = (&links.intra_node, &links.inter_node);
        let cards = f64::from(inter.nics_per_node) / f64::from(links.devices_per_node);
        LinkPrice {
            library: links.library,
            topology,
            wiring: intra.wiring,
            intra_bytes_per_s: intra.bandwidth_bytes_per_s * intra.efficiency,
            nic_bytes_per_s: cards * inter.bandwidth_bytes_per_s * inter.efficiency,
            fill_s: intra.fill_s,
            fill_half_bytes: intra.fill_half_bytes,
            inter_node_extra_s: inter.extra_latency_s,
        }
    }

    /// These links with a bandwidth between nodes no lower than that inside a node; `None` where it is that high already,
    /// or has no use on one node. No collective or transfer takes longer over them.
    pub(super) fn with_fast_inter_node_links(&self) -> Option<LinkPrice> {
        let is_slower =
            self.topology.has_several_nodes() && self.nic_bytes_per_s < self.intra_bytes_per_s;
        is_slower.then(|| LinkPrice { nic_bytes_per_s: self.intra_bytes_per_s, ..self.clone() })
    }

    /// Whether a group of this shape spans nodes.
    pub(super) fn crosses_nodes(&self, group: &DeviceGroup) -> bool {
        self.topology.place(group).nodes > 1
    }

    /// The links of a group of this shape.
    pub(super) fn of_group(&self, group: &DeviceGroup) -> GroupLinks {
        let placement = self.topology.place(group);
        let inter_node = [self.nic_bytes_per_s.to_bits(), self.inter_node_extra_s.to_bits()];
        GroupLinks { placement, inter_node: (placement.nodes > 1).then_some(inter_node) }
    }

    /// Seconds of a collective among two or more members, without the launch gap.
    pub(super) fn collective(&self, collective: &Collective) -> Seconds {
        let place = self.topology.place(&collective.group);
        if collective.kind == CollectiveKind::Shift {
            let bytes = Bytes(collective.payload.0 / place.members);
            return self.transfer(&Transfer { bytes, group: collective.group });
        }
        let bytes = collective.payload.as_f64();
        let fill = self.fill_s * bytes / (bytes + self.fill_half_bytes);
        let transport_s = match (collective.kind, self.library) {
            (CollectiveKind::AllToAll, _) => self.all_to_all_s(place, bytes),
            (kind, CollectiveLibrary::SharedMemory) => {
                bytes * ring_factor(kind, place.members)
                    / self.bus_bandwidth(NcclAlgorithm::Ring, place)
            }
            (kind, _) => self.fastest_nccl_s(kind, place, bytes),
        };
        Seconds(fill + transport_s)
    }

    /// Seconds of a P2P transfer between neighbouring members of a group, without the launch gap. When any two neighbours
    /// lie in different nodes, all of its transfers are priced as between nodes.
    pub(super) fn transfer(&self, transfer: &Transfer) -> Seconds {
        let bytes = transfer.bytes.as_f64();
        let fill = self.fill_s * bytes / (bytes + self.fill_half_bytes);
        let crosses = self.crosses_nodes(&transfer.group);
        let bandwidth = if crosses { self.nic_bytes_per_s } else { self.intra_node_bandwidth(2) };
        Seconds(self.p2p_latency_s(crosses) + fill + bytes / bandwidth)
    }

    /// The time by the fastest of NCCL's algorithms and protocols.
    fn fastest_nccl_s(&self, kind: CollectiveKind, place: GroupPlacement, bytes: f64) -> f64 {
        nccl::CANDIDATES
            .iter()
            .filter(|(algorithm, _)| {
                *algorithm == NcclAlgorithm::Ring || kind == CollectiveKind::AllReduce
            })
            .map(|&(algorithm, protocol)| {
                let bus = self.bus_bandwidth(algorithm, place);
                let mut bandwidth = bus * nccl::bandwidth_share(algorithm, protocol, place.nodes);
                if protocol == NcclProtocol::Ll {
                    bandwidth = bandwidth.min(nccl::ll_bandwidth_max(self.library, place.nodes));
                }
                let factor = match algorithm {
                    NcclAlgorithm::Ring => ring_factor(kind, place.members),
                    NcclAlgorithm::Tree => 2.0 / nccl::tree_correction(protocol, bytes),
                };
                self.latency_s(kind, algorithm, protocol, place) + bytes * factor / bandwidth
            })
            .fold(f64::INFINITY, f64::min)
    }

    fn latency_s(
        &self,
        kind: CollectiveKind,
        algorithm: NcclAlgorithm,
        protocol: NcclProtocol,
        place: GroupPlacement,
    ) -> f64 {
        let across = place.nodes > 1;
        let mut inside = nccl::nvlink_hop_s(algorithm, protocol);
        if across && algorithm == NcclAlgorithm::Ring {
            inside = inside.max(nccl::net_overhead_s(protocol));
        }
        // With one device a node, nothing hides the latency of a network hop.
        let exposed = if place.members_per_node == 1 { NcclAlgorithm::Tree } else { algorithm };
        let network = nccl::network_hop_s(exposed, protocol) + self.inter_node_extra_s;
        let rounds = if kind == CollectiveKind::AllReduce { 2.0 } else { 1.0 };
        let (hops, crossing) = match algorithm {
            NcclAlgorithm::Ring => (place.members - 1, place.nodes - 1),
            NcclAlgorithm::Tree => {
                let levels = u64::from(place.nodes.ilog2());
                (place.members_per_node - 1 + levels, levels)
            }
        };
        let round_s = (hops - crossing) as f64 * inside + crossing as f64 * network;
        let latency = nccl::base_latency_s(algorithm, protocol) + rounds * round_s;
        // NCCL exempts messages of less than 64 B for each channel and member; this does not.
        let plateau = across
            && kind == CollectiveKind::AllReduce
            && (algorithm, protocol) == (NcclAlgorithm::Ring, NcclProtocol::Simple);
        if plateau { latency * nccl::SIMPLE_RING_PLATEAU_ACROSS_NODES } else { latency }
    }

    fn all_to_all_s(&self, place: GroupPlacement, bytes: f64) -> f64 {
        let pair = bytes / (place.members as f64 * place.members as f64);
        let inside = pair * (place.members_per_node - 1) as f64
            / self.intra_node_bandwidth(place.members_per_node);
        let across = pair * (place.members - place.members_per_node) as f64 / self.nic_bytes_per_s;
        self.p2p_latency_s(place.nodes > 1) + inside.max(across)
    }

    /// The latency of a P2P transfer, in seconds.
    fn p2p_latency_s(&self, crosses: bool) -> f64 {
        let (ring, simple) = (NcclAlgorithm::Ring, NcclProtocol::Simple);
        match (self.library, crosses) {
            (CollectiveLibrary::SharedMemory, _) => 0.0,
            (_, false) => nccl::base_latency_s(ring, simple) + nccl::nvlink_hop_s(ring, simple),
            (_, true) => {
                let hop = nccl::network_hop_s(ring, simple) + self.inter_node_extra_s;
                nccl::base_latency_s(ring, simple) + hop
            }
        }
    }

    /// The bandwidth of the slowest link of an algorithm, in bytes per second.
    fn bus_bandwidth(&self, algorithm: NcclAlgorithm, place: GroupPlacement) -> f64 {
        let inside = if place.members_per_node > 1 {
            self.intra_node_bandwidth(place.members_per_node)
        } else {
            f64::INFINITY
        };
        let share = self.nic_bytes_per_s * place.members_per_node as f64;
        let across = match (algorithm, place.nodes) {
            (_, 0 | 1) => f64::INFINITY,
            (NcclAlgorithm::Tree, 2) => 2.0 * share,
            _ => share,
        };
        inside.min(across)
    }

    /// The bandwidth, in bytes per second, from one device to the other members of its node together.
    fn intra_node_bandwidth(&self, members_per_node: u64) -> f64 {
        let others = self.topology.devices_per_node() - 1;
        match self.wiring {
            NodeWiring::AllPairs if others > 0 => {
                let used = members_per_node.saturating_sub(1).clamp(1, others);
                self.intra_bytes_per_s * used as f64 / others as f64
            }
            NodeWiring::AllPairs | NodeWiring::Switched => self.intra_bytes_per_s,
        }
    }
}

/// Bytes through the busiest link of a ring, as a multiple of the payload.
fn ring_factor(kind: CollectiveKind, members: u64) -> f64 {
    let n = members as f64;
    match kind {
        CollectiveKind::AllReduce => 2.0 * (n - 1.0) / n,
        CollectiveKind::ReduceScatter | CollectiveKind::AllGather => (n - 1.0) / n,
        CollectiveKind::AllToAll => (n - 1.0) / (n * n),
        CollectiveKind::Shift => 1.0 / n,
    }
}
