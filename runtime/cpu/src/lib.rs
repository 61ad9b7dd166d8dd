//! The processor backend: devices are threads, each with its own arena, and collectives are made
//! in memory. Or every device is a process of a cluster, with the same bits.
//!
//! | file | what it does |
//! |---|---|
//! | `processors` | the engine: allocates, runs all devices for a step |
//! | `device` | one device: its turns, its instructions |
//! | `crew`, `links` | the threads of devices, and what ties them together |
//! | `clock` | what a device's time is spent on |
//! | `execute/` | what each instruction computes, by calls of [`kernels`] |
//! | `arena`, `exchange`, `pipe`, `barrier` | memory, collectives, transfers, waiting |
//! | `memory` | what will be allocated |

mod arena;
mod barrier;
mod clock;
mod crew;
mod device;
mod exchange;
mod execute;
pub mod kernels;
mod links;
mod memory;
mod pipe;
#[cfg(test)]
mod placement_tests;
mod processors;

pub use memory::{GatheredTensors, memory_lower_bound, node_memory_lower_bound};
pub use processors::{session, session_of_process};
