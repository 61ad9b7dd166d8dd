//! Constants of NCCL's tuner, `src/graph/tuning.cc`.
//!
//! The constants are taken from the releases that support Blackwell (2.27 and later), and were compared entry by entry
//! with the source in November 2026. A few differ from older releases: in 2.19, tree with Simple has 28 µs a hop and no base
//! latency, and LL has the same bandwidth limit on Hopper as on Ampere.
//!
//! No constant here is fitted; the profile has corrections (`links.intra_node.efficiency`, `fill_s`). Not modelled:
//! limits by channel, which do not bind with the channel counts of these machines, CollNet, and NVLS.

use crate::profile::CollectiveLibrary;

/// The route of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NcclAlgorithm {
    /// Each device sends slices to its neighbour.
    Ring,
    /// Up a double binary tree and down again; all-reduce only.
    Tree,
}

/// Synchronisation of a slice with the next device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NcclProtocol {
    /// Every eight bytes carry four bytes of flag.
    Ll,
    /// Every 128 bytes carry eight bytes of flag.
    Ll128,
    /// Whole chunks with a fence.
    Simple,
}

/// All combinations of algorithm and protocol.
pub(super) const CANDIDATES: [(NcclAlgorithm, NcclProtocol); 6] = [
    (NcclAlgorithm::Ring, NcclProtocol::Simple),
    (NcclAlgorithm::Ring, NcclProtocol::Ll128),
    (NcclAlgorithm::Ring, NcclProtocol::Ll),
    (NcclAlgorithm::Tree, NcclProtocol::Simple),
    (NcclAlgorithm::Tree, NcclProtocol::Ll128),
    (NcclAlgorithm::Tree, NcclProtocol::Ll),
];

/// `baseLat`, in seconds.
pub(super) fn base_latency_s(algorithm: NcclAlgorithm, protocol: NcclProtocol) -> f64 {
    match (algorithm, protocol) {
        (NcclAlgorithm::Tree, NcclProtocol::Ll) => 6.8e-6,
        (NcclAlgorithm::Ring, NcclProtocol::Ll) => 6.6e-6,
        (_, NcclProtocol::Ll128) => 14.0e-6,
        (_, NcclProtocol::Simple) => 8.4e-6,
    }
}

/// `hwLat` of a hop over NVLink, in seconds.
pub(super) fn nvlink_hop_s(algorithm: NcclAlgorithm, protocol: NcclProtocol) -> f64 {
    match (algorithm, protocol) {
        (_, NcclProtocol::Ll) => 0.6e-6,
        (NcclAlgorithm::Tree, NcclProtocol::Ll128) => 1.25e-6,
        (NcclAlgorithm::Tree, NcclProtocol::Simple) => 4.0e-6,
        (NcclAlgorithm::Ring, NcclProtocol::Ll128) => 1.9e-6,
        (NcclAlgorithm::Ring, NcclProtocol::Simple) => 3.4e-6,
    }
}

/// `hwLat` of a hop over the network, in seconds.
pub(super) fn network_hop_s(algorithm: NcclAlgorithm, protocol: NcclProtocol) -> f64 {
    match (algorithm, protocol) {
        (NcclAlgorithm::Tree, NcclProtocol::Ll) => 5.0e-6,
        (NcclAlgorithm::Tree, NcclProtocol::Ll128) => 8.5e-6,
        (NcclAlgorithm::Ring, NcclProtocol::Ll) => 2.7e-6,
        (NcclAlgorithm::Ring, NcclProtocol::Ll128) => 4.0e-6,
        (_, NcclProtocol::Simple) => 14.0e-6,
    }
}

/// `getNetOverhead`: lower limit of the latency of a hop of a ring across nodes, in seconds, with AMD CPUs as in
/// these machines. With other CPUs NCCL uses half of it.
pub(super) fn net_overhead_s(protocol: NcclProtocol) -> f64 {
    const OVERHEAD_S: f64 = 2.0e-6;
    if protocol == NcclProtocol::Simple { 3.0 * OVERHEAD_S } else { OVERHEAD_S }
}

/// Factor on the latency of a Simple ring all-reduce across nodes, on compute capability 8 and later.
pub(super) const SIMPLE_RING_PLATEAU_ACROSS_NODES: f64 = 1.4;

/// `llMaxBws`: the limit of LL's bus bandwidth, in bytes per second. Inside a node it depends on the GPU, across
/// nodes on the processor (AMD's).
pub(super) fn ll_bandwidth_max(library: CollectiveLibrary, nodes: u64) -> f64 {
    match (library, nodes) {
        (CollectiveLibrary::SharedMemory, _) => f64::INFINITY,
        (CollectiveLibrary::NcclAmpere, 1) => 87.7e9,
        (CollectiveLibrary::NcclHopper, 1) => 141.0e9,
        (CollectiveLibrary::NcclAmpere | CollectiveLibrary::NcclHopper, 2) => 22.5e9,
        (CollectiveLibrary::NcclAmpere | CollectiveLibrary::NcclHopper, _) => 19.0e9,
    }
}

/// The fraction of a link's bandwidth that carries payload.
pub(super) fn bandwidth_share(algorithm: NcclAlgorithm, protocol: NcclProtocol, nodes: u64) -> f64 {
    match (algorithm, protocol) {
        (NcclAlgorithm::Ring, NcclProtocol::Simple) => 1.0,
        (NcclAlgorithm::Ring, NcclProtocol::Ll128) => 0.92,
        (NcclAlgorithm::Ring, NcclProtocol::Ll) => 0.5,
        (NcclAlgorithm::Tree, NcclProtocol::Simple) => 0.92,
        (NcclAlgorithm::Tree, NcclProtocol::Ll128) if nodes == 1 => 0.92 * 7.0 / 9.0,
        (NcclAlgorithm::Tree, NcclProtocol::Ll128) => 0.92 * 120.0 / 128.0,
        (NcclAlgorithm::Tree, NcclProtocol::Ll) => 0.92 / 3.8,
    }
}

/// `treeCorrectionFactor`: the fraction of a tree's bandwidth that is reached, by power of two from 64 B.
///
/// NCCL looks the power up; this interpolates between powers, because with a step from .4 to .5 one byte more would
/// be a fifth faster.
pub(super) fn tree_correction(protocol: NcclProtocol, bytes: f64) -> f64 {
    let table = &TREE_CORRECTION[protocol as usize];
    let position = (bytes / 64.0).max(1.0).log2();
    let index = position as usize;
    let Some(&high) = table.get(index + 1) else { return table[table.len() - 1] };
    table[index] + (high - table[index]) * (position - index as f64)
}

/// In the order of [`NcclProtocol`].
const TREE_CORRECTION: [[f64; 24]; 3] = [
    [
        1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8,
        0.9, 1.0, 1.0, 1.0, 1.0, 1.0,
    ],
    [
        1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9,
        0.9, 0.9, 0.9, 1.0, 1.0, 1.0,
    ],
    [
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8,
        0.7, 0.7, 0.8, 0.9, 0.9, 0.9,
    ],
];
