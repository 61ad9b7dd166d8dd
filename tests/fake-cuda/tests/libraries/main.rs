//! The fake CUDA libraries compute correctly, return CUDA's errors, and reveal missing synchronisation.
#![allow(unsafe_code)]

mod collectives;
mod device;
mod graphs;
mod kernels;
mod matmul;
mod memory;
mod ordering;
