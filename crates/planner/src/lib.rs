//! placeholder
pub mod solve;
