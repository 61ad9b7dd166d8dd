//! Links between devices, and the slowdown of computation and collectives that run at the same time.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::provenance::{Provenance, RelativeError};
use crate::overlap::OverlapSlowdown;

/// Links between the devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LinkSpec {
    /// Devices of one node.
    pub devices_per_node: u32,
    /// The library that runs collectives.
    pub library: CollectiveLibrary,
    /// Inside a node.
    pub intra_node: IntraNodeLinks,
    /// Between nodes.
    pub inter_node: InterNodeLinks,
    /// Error of measurements relative to the price of a collective or P2P transfer inside a node.
    pub relative_error: RelativeError,
}

/// The library that runs collectives, with the column of NCCL's constants that applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CollectiveLibrary {
    /// NCCL on compute capability 8.
    NcclAmpere,
    /// NCCL on compute capability 9. NVLS is not modelled.
    NcclHopper,
    /// Threads of one process that read each other's memory.
    SharedMemory,
}

/// Wiring of the devices of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NodeWiring {
    /// Each device has an equal share of its links to each other device: a group of fewer devices
    /// than the node has uses fewer links.
    AllPairs,
    /// A switch: any two devices can use all their links.
    Switched,
}

/// Links inside a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct IntraNodeLinks {
    /// Wiring of the devices.
    pub wiring: NodeWiring,
    /// All links of one device, one direction.
    pub bandwidth_bytes_per_s: f64,
    /// Fraction of the bandwidth that a large ring collective reaches (bus bandwidth of nccl-tests). In (0, 1].
    pub efficiency: f64,
    /// Time of a large collective beyond NCCL's own latency constants.
    pub fill_s: f64,
    /// Payload at which half of `fill_s` is paid.
    pub fill_half_bytes: f64,
    /// Provenance of these numbers.
    pub provenance: Provenance,
}

/// Links between nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InterNodeLinks {
    /// Network cards of one node, shared evenly among its devices.
    pub nics_per_node: u32,
    /// One card, one direction.
    pub bandwidth_bytes_per_s: f64,
    /// Fraction of the bandwidth that a large collective reaches. In (0, 1].
    pub efficiency: f64,
    /// Latency of a message beyond NCCL's own constants: cables, switches.
    pub extra_latency_s: f64,
    /// Error of measurements relative to the price of a collective or P2P transfer between nodes.
    pub relative_error: RelativeError,
    /// Provenance of these numbers.
    pub provenance: Provenance,
}

/// Slowdown of a collective and computation that run at the same time on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OverlapSpec {
    /// Factor on the time of computation overlapped with a collective, which occupies some compute units. At least 1.
    pub compute_slowdown: f64,
    /// Factor on the time of a collective overlapped with computation, which uses memory bandwidth. At least 1.
    pub collective_slowdown: f64,
    /// Provenance of these numbers.
    pub provenance: Provenance,
}

impl OverlapSpec {
    /// The two factors.
    pub fn slowdown(&self) -> OverlapSlowdown {
        let OverlapSpec { compute_slowdown, collective_slowdown, .. } = self;
        OverlapSlowdown { compute: *compute_slowdown, collective: *collective_slowdown }
    }
}
