//! The CUDA kernels without a GPU: on processors through the shim, held against the processor
//! backend's kernels; and compiled by NVRTC where there is one.

mod attention;
mod bounds;
mod case;
#[cfg(unix)]
mod compile;
mod copies;
mod crossing;
mod elementwise;
mod ends;
mod gated;
mod latent;
mod machine;
mod matmul;
mod norm;
mod numbers;
#[cfg(unix)]
mod nvrtc;
mod probes;
mod products;
mod programs;
mod shim;
mod step;
mod whole;
