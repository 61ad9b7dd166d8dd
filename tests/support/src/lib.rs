//! Test support shared by several crates.
//!
//! | module | contents |
//! |---|---|
//! | [`plans`] | random plans of the whole search space: many models, meshes and workloads |
//! | [`small_models`] | small models and contexts, whose plans run in milliseconds |
//! | [`plan_files`] | plan files of small models |
//! | [`damage`] | damaged copies of files |
//! | [`mutations`] | mutations of programs that the check must reject |
//! | [`rows`] | the folder of measurements that are not part of the repository |
//! | [`conformance`] | cases in which every backend must agree with the reference |
#![allow(missing_docs, reason = "names and signatures document most items")]

pub mod conformance;
pub mod damage;
mod instruction_order;
pub mod mutations;
pub mod plan_files;
pub mod plans;
mod ports;
mod random_elements;
mod random_seed;
mod relative_errors;
pub mod rows;
pub mod small_models;

pub use ports::free_port;
pub use random_elements::uniform_f32;
pub use random_seed::random_seed;
pub use relative_errors::{max_relative_error, relative_error};
