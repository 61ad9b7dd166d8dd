//! What tests of several crates share.
//!
//! | module | what it holds |
//! |---|---|
//! | [`plans`] | plans drawn from the whole search space, of many models, meshes and workloads |
//! | [`small`] | small models and contexts whose plans run in milliseconds |
//! | [`saved`] | plan files of small models |
//! | [`damage`] | programs damaged so that the check must refuse them |
//! | [`tables`] | cost tables drawn for solvers |
//! | [`conformance`] | the cases that every backend is compared with the reference on |
#![allow(missing_docs, reason = "names and signatures say it")]

pub mod conformance;
pub mod damage;
mod enumeration;
mod order;
pub mod plans;
pub mod saved;
pub mod small;
pub mod tables;

pub use enumeration::fastest_by_enumeration;
