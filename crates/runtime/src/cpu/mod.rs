//! The processor backend: devices are threads, each with its own arena, and collectives are made
//! in memory. Or every device is a process of a [`cluster`](crate::cluster), with the same bits.
//!
//! A [`Session`] holds the arenas of all devices of a program and runs steps on them. It is given
//! weights by logical name and gives them back so; what lies where is the program's business alone.
//!
//! | file | what it does |
//! |---|---|
//! | [`session`] | allocates, runs all devices for a step |
//! | `share` | what came of it, here and in other processes |
//! | `device` | one device: its turns, its instructions |
//! | `crew`, `links` | the threads of devices, and what ties them together |
//! | `clock` | what a device's time is spent on |
//! | `execute/` | what each instruction computes, by calls of [`kernels`] |
//! | `arena`, `exchange`, `pipe`, `barrier` | memory, collectives, transfers, waiting |
//! | [`memory`] | what will be allocated |
//! | [`tensors`] | whole parameters, gradients and moments, in and out |
//! | `weights` | which element of which logical parameter lies where |

mod arena;
mod barrier;
mod clock;
mod crew;
mod device;
mod exchange;
mod execute;
pub mod kernels;
mod links;
pub mod memory;
mod pipe;
pub mod session;
mod share;
pub mod tensors;
mod weights;

pub use clock::Lap;
pub(crate) use exchange::{Kind, Moved};
pub use session::{Done, Session, StepInput};
pub use tensors::{Tensors, Whole};
