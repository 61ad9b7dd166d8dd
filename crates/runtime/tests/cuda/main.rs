//! The CUDA kernels without a GPU: on processors through the shim, held against the processor
//! backend's kernels; and compiled by NVRTC where there is one.

mod case;
mod elementwise;
mod gated;
mod latent;
mod norm;
mod numbers;
mod nvrtc;
mod probes;
mod shim;
