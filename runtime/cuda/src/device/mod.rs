//! Execution of a device's schedule on a GPU.
//!
//! | file | contents |
//! |---|---|
//! | `gpu` | a GPU and its memory |
//! | `modules` | loaded kernels |
//! | `cublaslt` | matmuls: descriptors and selection of algorithms |
//! | `communicators`, `communicator` | NCCL communicators, collectives and transfers |
//! | `inputs` | token ids of a step |
//! | `graph_executor` | executes a [`schedule`](super::schedule), launch by launch or as captured graphs |
//! | `timers` | spans of instructions |
//! | `engine` | the engine of a session |
#![allow(unsafe_code)]

mod communicator;
mod communicators;
mod cublaslt;
mod cudnn;
mod engine;
mod gpu;
mod graph_executor;
mod inputs;
mod modules;
mod timers;

pub use cudnn::attention_workspace_without_gpu;
pub use engine::{AttentionKernels, GpuOptions, session};
