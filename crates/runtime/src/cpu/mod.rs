//! The processor backend.

pub mod kernels;
