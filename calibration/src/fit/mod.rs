//! Fits hardware profiles to measurements of a machine.
//!
//! The coefficients of each kernel class minimise, by coordinate descent, the mean over its measurements of
//!
//! ```text
//! |ln(measured / priced)|
//! ```
//! The measurements themselves correct the remaining errors
//! ([`KernelMeasurements`](narrows_cost_model::profile::KernelMeasurements)). The relative error of a class is the 90th
//! percentile of its leave-one-out errors.
//!
//! The peak rate and bandwidth of a CPU ([`fit_cpu_profile`]) are the rates of the fastest GEMM and the fastest fused op;
//! those of GPUs ([`fit_gpu_profile`]) are from the data sheet.

mod class;
mod cpu;
mod gpu;
mod steps;

pub use cpu::{CpuMachine, fit_cpu_profile, with_bf16_rate};
pub use gpu::{GpuMachine, GpuModel, MeasuredStep, fit_gpu_profile};
pub(crate) use steps::STEP_GROUPS_MIN;
pub use steps::{step_error, with_step_error};
