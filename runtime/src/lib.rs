//! The core of the runtime: sessions, training, token files, checkpoints, and what backends share.
//!
//! A [`Session`] holds the memory of a program's devices and runs steps on them through an
//! [`Engine`](session::Engine). Backends are crates of their own that implement it: `narrows-cpu`
//! and `narrows-cuda`. `narrows-cluster` implements [`process_group`] for runs of many processes,
//! and `narrows-reference` is the unsharded oracle. None of these crates imports another.
//!
//! This crate depends on `narrows-plan` alone: it never sees a price, a profile or a search.

pub mod checkpoint;
pub mod data;
pub mod error;
pub mod measure;
pub mod null;
pub mod optimizer;
pub mod order;
pub mod parameters;
pub mod parts;
pub mod place;
pub mod process_group;
pub mod report;
pub mod session;
pub mod train;

pub use error::RunError;
pub use optimizer::Optimizer;
pub use report::{CollectiveCount, DeviceId, DeviceReport, StepReport};
pub use session::Session;
pub use train::Trainer;
