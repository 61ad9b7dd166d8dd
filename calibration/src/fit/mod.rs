//! From measurements on a machine to its profile.
//!
//! The numbers of each class of kernels minimise, by coordinate descent, the mean over its measurements of
//!
//! ```text
//! |ln(measured / priced)|
//! ```
//! The measurements themselves correct what is left
//! ([`KernelMeasurements`](narrows_cost_model::profile::KernelMeasurements)), and the relative error of a class is the
//! distance within which nine measurements in ten lie of their prices by all other measurements.
//!
//! For a machine of processors ([`fit_cpu_profile`]) peak and bandwidth are the rates of the fastest GEMM and the
//! fastest fused op. For GPUs ([`fit_gpu_profile`]) they are the data sheet's.

mod class;
mod cpu;
mod gpu;
mod steps;

pub use cpu::{CpuMachine, fit_cpu_profile};
pub use gpu::{GpuMachine, GpuModel, MeasuredStep, fit_gpu_profile};
pub use steps::{STEP_GROUPS_MIN, step_error, with_step_error};
