//! Executes checked programs.
//!
//! A [`Backend`] executes one step of a [`CheckedProgram`](narrows_plan::CheckedProgram) on every
//! device of its mesh and says in a [`Report`] what it did. The [`order`] in which a device meets
//! its instructions, and the [`place`] of an operand in its arena, are the same for every backend.
//!
//! [`NullBackend`] computes nothing and counts everything. What computes is the engine of a
//! [`mod@session`]: [`mod@cpu`] on processors, [`mod@cuda`] on a GPU, and [`mod@train`] trains with it. The
//! oracle that they are held against is [`mod@reference`], and what they must agree on lies in
//! [`mod@parameters`] and [`mod@optimizer`].
//!
//! This crate depends on `narrows-plan` alone: it never sees a price, a profile or a search.

pub mod backend;
pub mod checkpoint;
pub mod cluster;
pub mod cpu;
pub mod cuda;
pub mod data;
pub mod measure;
pub mod null;
pub mod numeric;
pub mod optimizer;
pub mod order;
pub mod parameters;
pub mod parts;
pub mod place;
pub mod reference;
pub mod report;
pub mod session;
pub mod train;

pub use backend::{Backend, RunError};
pub use null::NullBackend;
pub use optimizer::Optimizer;
pub use report::{CollectiveCount, DeviceId, DeviceReport, Report};
pub use session::Session;
pub use train::Trainer;
