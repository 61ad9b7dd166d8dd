//! The stand-ins are what they say, and find what they are for.
#![allow(unsafe_code)]

mod collectives;
mod gpu;
mod graphs;
mod kernels;
mod memory;
mod order;
mod products;
