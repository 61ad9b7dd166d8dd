//! Execution of a device's schedule, launch by launch or as captured CUDA graphs.
//!
//! Both modes enqueue the same work on the same streams with the same waits, so they compute the same bits. The
//! first step is always launched instruction by instruction: NCCL and the driver create resources on first use,
//! which is not allowed while a graph is being captured.
//!
//! The host does not wait within a step. It enqueues the whole step, then waits for its end (`wait`), and meanwhile
//! checks that the GPU makes progress and that the other processes are alive.

mod executor;
mod p2p_stream;
mod queue_limit;
mod resources;
mod segment;
mod transfer;
mod wait;

pub(crate) use executor::GraphExecutor;
pub(crate) use resources::ExecutorResources;
