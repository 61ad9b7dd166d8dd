//! Measured kernels as kernels of the cost model, and measured values as seconds.

use narrows_cost_model::{Prices, Profile};
use narrows_plan::kernel::{Collective, CollectiveKind, Gemm, Kernel};
use narrows_plan::model::Activation;
use narrows_plan::program::{Action, Extent, FusedOp};
use narrows_plan::strategy::NormRule;
use narrows_plan::{Axis, Bytes, DType, DeviceGroup, Mesh, Seconds};

use super::file::{KernelRun, MeasuredQuantity, Measurement, MeasurementUnit, NormRun};

/// The kernels of `runs` on this mesh, in order, each with its number of launches. `input` is the format in which the
/// hardware computes in training.
pub fn priced_kernels(runs: &[KernelRun], mesh: Mesh, input: DType) -> Vec<(Kernel, f64)> {
    let kernels = |run: &KernelRun| match run {
        KernelRun::Gemm(run) => {
            let (m, n, k, batch) = (run.m, run.n, run.k, run.batch);
            let gemm =
                Gemm { m, n, k, batch, accumulate: false, residual: false, input, output: input };
            vec![(Kernel::Gemm(gemm), run.times as f64)]
        }
        KernelRun::AllReduce(run) => {
            vec![(all_reduce(run.payload_bytes, mesh), run.times as f64)]
        }
        KernelRun::Norm(run) => {
            norm(run, mesh, input).into_iter().map(|kernel| (kernel, run.times as f64)).collect()
        }
    };
    runs.iter().flat_map(kernels).collect()
}

fn all_reduce(payload: Bytes, mesh: Mesh) -> Kernel {
    let group = DeviceGroup { axis: Axis::Tensor, size: mesh.tensor, stride: 1 };
    Kernel::Collective(Collective { kind: CollectiveKind::AllReduce, payload, group })
}

/// The kernels of a norm, as `emit` generates them. The statistic of an online norm is part of the all-reduce of the
/// latents, which is measured apart.
fn norm(run: &NormRun, mesh: Mesh, input: DType) -> Vec<Kernel> {
    let extent = |columns: u64, dtype: DType| Extent { rows: run.rows, columns, dtype };
    let shard = extent(run.features / mesh.tensor, input);
    let (scale, statistic) = (Extent { rows: 1, ..shard }, extent(1, DType::F32));
    let fused = |op, reads: &[Extent], writes: &[Extent]| Action::Fused(op).kernel(reads, writes);
    if run.norm == NormRule::Sync {
        return vec![
            fused(FusedOp::NormStatistic, &[shard], &[statistic]),
            all_reduce(statistic.bytes(), mesh),
            fused(FusedOp::NormApply, &[shard, scale, statistic], &[shard]),
        ];
    }
    let mut kernels = vec![fused(FusedOp::NormOnline, &[shard, scale], &[shard, statistic])];
    if run.latents > 0 {
        let latents = extent(run.latents, input);
        let recover = FusedOp::LatentRecover { activation: Activation::Identity };
        kernels.push(fused(recover, &[latents, statistic], &[latents]));
    }
    kernels
}

/// Predicted times in seconds of kernels that are launched over and over.
pub(crate) struct KernelTimes {
    /// The time with launch gaps, and at least that of the host's launches.
    pub time_s: f64,
    /// The time of the host's launches.
    pub host_s: f64,
}

/// The predicted times of `runs`.
pub(crate) fn predicted_times(
    measurement: &Measurement,
    runs: &[KernelRun],
    profile: &Profile,
) -> KernelTimes {
    let prices = Prices::new(profile, measurement.executor, &measurement.mesh);
    let kernels = priced_kernels(runs, measurement.mesh, profile.precision().compute_dtype());
    let total_s = |price: &dyn Fn(&Kernel) -> Seconds| -> f64 {
        kernels.iter().map(|(kernel, times)| price(kernel).0 * times).sum()
    };
    let device_s = total_s(&|kernel| prices.kernel_time(kernel));
    let host_s = total_s(&|kernel| prices.host_time(kernel));
    KernelTimes { time_s: device_s.max(host_s), host_s }
}

impl Measurement {
    /// The measured time in seconds. A percentage refers to the peak of the profile. A memory-to-time ratio of
    /// recomputation becomes the time per 10⁹ freed bytes.
    pub fn measured_s(&self, profile: &Profile) -> f64 {
        match (self.unit, &self.measured) {
            (MeasurementUnit::S, _) => self.value,
            (MeasurementUnit::Ms, _) => self.value * 1e-3,
            (MeasurementUnit::Us, _) => self.value * 1e-6,
            (MeasurementUnit::MbPerMs, _) => 1.0 / self.value,
            (
                MeasurementUnit::PercentOfPeak,
                MeasuredQuantity::Step(_) | MeasuredQuantity::Recomputation(_),
            ) => f64::NAN,
            (MeasurementUnit::PercentOfPeak, MeasuredQuantity::Kernels(runs)) => {
                let flops = |(kernel, times): &(Kernel, f64)| match kernel {
                    Kernel::Gemm(gemm) => gemm.flops().0 * times,
                    _ => 0.0,
                };
                let input = profile.precision().compute_dtype();
                let total: f64 = priced_kernels(runs, self.mesh, input).iter().map(flops).sum();
                total / (profile.peak_flops_per_s(input) * self.value / 100.0)
            }
        }
    }
}
