//! The stand-ins are what they say, and find what they are for.
#![allow(unsafe_code)]

mod child;
mod gpu;
mod memory;
