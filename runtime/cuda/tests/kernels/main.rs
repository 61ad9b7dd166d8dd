//! Tests of the CUDA kernels and their launches without a GPU: the shim runs the kernels on the CPU, where they are
//! compared with those of the CPU backend; where NVRTC is installed, it compiles them.

mod attention;
mod bias;
mod bounds_check;
mod case;
#[cfg(unix)]
mod compile;
mod conformance;
mod coverage;
mod crossing;
#[cfg(unix)]
mod cudnn;
mod elementwise;
mod embedding;
mod formats;
mod gated;
mod latent;
mod layout;
mod loss;
mod matmul_lowering;
mod norm;
#[cfg(unix)]
mod nvrtc;
mod optimizer;
mod probes;
mod qk_norm;
mod reference_matmul;
mod ring;
mod rotary;
mod shim;
mod shim_collectives;
mod shim_engine;
