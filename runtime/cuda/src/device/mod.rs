//! The device itself: a GPU that executes a program.
//!
//! | file | what it holds |
//! |---|---|
//! | `gpu` | a GPU and its memory |
//! | `modules` | kernels, loaded |
//! | `blas` | products: descriptors, the fastest algorithms |
//! | `communicators`, `communicator` | NCCL's groups, collectives, transfers |
//! | `inputs` | tokens on their way |
//! | `player` | plays a [`tape`](super::tape), as it is or captured as graphs |
//! | `laps` | when what ran |
//! | `engine` | all of it as the engine of a session |
#![allow(unsafe_code)]

mod blas;
mod communicator;
mod communicators;
mod engine;
mod gpu;
mod inputs;
mod laps;
mod modules;
mod player;

pub use engine::{GpuOptions, session};
