//! The CPU backend: each device is a group of threads with an arena of its own, and collectives go
//! through shared memory. Or each device is a process of a cluster, with bitwise equal results.
//!
//! | file | contents |
//! |---|---|
//! | `engine` | the [`Engine`](narrows_runtime::session::Engine) of a session: allocates memory, runs all devices for a step |
//! | `device` | one device during a step, and the operands of its instructions |
//! | `device_threads` | the threads of the devices |
//! | `communication` | the thread of a device that executes collectives beside computation |
//! | `device_links` | communicators and peer links of a device |
//! | `device_clock` | the time of a device by category |
//! | `execute/` | the instructions, as calls of [`kernels`] |
//! | `cached_model/` | generation: the forward pass of one sequence with a cache of keys and values |
//! | `arena` | memory of a device, and why two threads may access it |
//! | `shared_memory_group`, `stage_pipe`, `barrier`, `event_count`, `abort` | collectives, transfers and waiting within a process |
//! | `memory`, `stage_traffic` | memory that a session needs |

mod abort;
mod arena;
mod barrier;
mod cached_model;
mod communication;
mod device;
mod device_clock;
mod device_links;
mod device_threads;
mod engine;
mod event_count;
mod execute;
pub mod kernels;
mod memory;
mod shared_memory_group;
mod stage_pipe;
mod stage_traffic;

pub use cached_model::{CachedModel, SequenceError};
pub use engine::{CollectiveOrder, CpuOptions, session, session_of_process};
pub use memory::{GatheredTensors, memory_lower_bound, node_memory_lower_bound};
