//! Measured kernels as priced ones, and measured values as seconds.

use narrows_plan::kernel::{Collective, CollectiveKind, Gemm, Kernel};
use narrows_plan::mesh::{Axis, Group};
use narrows_plan::{DType, Mesh};

use super::{KernelRun, Measured, Measurement, Unit};
use crate::{Prices, Profile};

/// The kernels of a run on this mesh, in their order.
pub fn kernels(runs: &[KernelRun], mesh: Mesh) -> Vec<Kernel> {
    let one = |run: &KernelRun| match run {
        KernelRun::Product(run) => {
            let (input, output) = (DType::Bf16, DType::Bf16);
            let (m, n, k, batch) = (run.m, run.n, run.k, run.batch);
            let gemm = Gemm { m, n, k, batch, accumulate: false, input, output };
            vec![Kernel::Gemm(gemm); run.times as usize]
        }
        KernelRun::AllReduce(run) => {
            let group = Group { axis: Axis::Tensor, size: mesh.tensor, stride: 1 };
            let (kind, payload) = (CollectiveKind::AllReduce, run.payload_bytes);
            vec![Kernel::Collective(Collective { kind, payload, group }); run.times as usize]
        }
    };
    runs.iter().flat_map(one).collect()
}

/// What kernels should take on this hardware, launch gaps included, in seconds.
pub fn predicted_s(measurement: &Measurement, runs: &[KernelRun], profile: &Profile) -> f64 {
    let prices = Prices::new(profile, measurement.executor, &measurement.mesh);
    kernels(runs, measurement.mesh).iter().map(|kernel| prices.kernel(kernel).0).sum()
}

impl Measurement {
    /// The measured time in seconds. A share of the peak needs to know whose.
    pub fn measured_s(&self, profile: &Profile) -> f64 {
        match (self.unit, &self.measured) {
            (Unit::S, _) => self.value,
            (Unit::Ms, _) => self.value * 1e-3,
            (Unit::Us, _) => self.value * 1e-6,
            (Unit::PercentOfPeak, Measured::Step(_)) => f64::NAN,
            (Unit::PercentOfPeak, Measured::Kernels(runs)) => {
                let flops = |kernel: &Kernel| match kernel {
                    Kernel::Gemm(gemm) => gemm.flops().0,
                    _ => 0.0,
                };
                let all: f64 = kernels(runs, self.mesh).iter().map(flops).sum();
                all / (profile.peak_flops_per_s(DType::Bf16) * self.value / 100.0)
            }
        }
    }
}
