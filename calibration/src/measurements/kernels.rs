//! Measured kernels as priced ones, and measured values as seconds.

use narrows_plan::kernel::{Collective, CollectiveKind, Gemm, Kernel};
use narrows_plan::mesh::{Axis, DeviceGroup};
use narrows_plan::model::Activation;
use narrows_plan::program::{Action, Extent, FusedOp};
use narrows_plan::strategy::NormRule;
use narrows_plan::{Bytes, DType, Mesh};

use super::{KernelRun, MeasuredQuantity, Measurement, MeasurementUnit, NormRun};
use narrows_cost_model::{Prices, Profile};

/// The kernels of a run on this mesh in their order, each with how often it runs. Inputs have the format
/// that training computes in on the hardware.
pub fn kernels(runs: &[KernelRun], mesh: Mesh, input: DType) -> Vec<(Kernel, f64)> {
    let one = |run: &KernelRun| match run {
        KernelRun::Product(run) => {
            let (m, n, k, batch) = (run.m, run.n, run.k, run.batch);
            let gemm = Gemm { m, n, k, batch, accumulate: false, input, output: input };
            vec![(Kernel::Gemm(gemm), run.times as f64)]
        }
        KernelRun::AllReduce(run) => {
            vec![(all_reduce(run.payload_bytes, mesh), run.times as f64)]
        }
        KernelRun::Norm(run) => {
            norm(run, mesh, input).into_iter().map(|kernel| (kernel, run.times as f64)).collect()
        }
    };
    runs.iter().flat_map(one).collect()
}

fn all_reduce(payload: Bytes, mesh: Mesh) -> Kernel {
    let group = DeviceGroup { axis: Axis::Tensor, size: mesh.tensor, stride: 1 };
    Kernel::Collective(Collective { kind: CollectiveKind::AllReduce, payload, group })
}

/// The instructions of a norm: those that `emit` has for it. The all-reduce that an online norm's
/// statistic rides with is the latents'.
fn norm(run: &NormRun, mesh: Mesh, input: DType) -> Vec<Kernel> {
    let of = |columns: u64, dtype: DType| Extent { rows: run.rows, columns, dtype };
    let shard = of(run.features / mesh.tensor, input);
    let (scale, statistic) = (Extent { rows: 1, ..shard }, of(1, DType::F32));
    let pass = |op, reads: &[Extent], writes: &[Extent]| Action::Fused(op).kernel(reads, writes);
    if run.norm == NormRule::Sync {
        return vec![
            pass(FusedOp::NormStatistic, &[shard], &[statistic]),
            all_reduce(statistic.bytes(), mesh),
            pass(FusedOp::NormApply, &[shard, scale, statistic], &[shard]),
        ];
    }
    let mut kernels = vec![pass(FusedOp::NormOnline, &[shard, scale], &[shard, statistic])];
    if run.latents > 0 {
        let latents = of(run.latents, input);
        let recover = FusedOp::LatentRecover { activation: Activation::Identity };
        kernels.push(pass(recover, &[latents, statistic], &[latents]));
    }
    kernels
}

/// What kernels should take on this hardware, launch gaps included, in seconds.
pub fn predicted_s(measurement: &Measurement, runs: &[KernelRun], profile: &Profile) -> f64 {
    let prices = Prices::new(profile, measurement.executor, &measurement.mesh);
    let price = |(kernel, times): &(Kernel, f64)| prices.kernel(kernel).0 * times;
    kernels(runs, measurement.mesh, profile.precision().compute()).iter().map(price).sum()
}

impl Measurement {
    /// The measured time in seconds. A share of the peak needs to know whose; what recomputation frees
    /// for its time becomes the time for 10⁹ bytes.
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
                let input = profile.precision().compute();
                let all: f64 = kernels(runs, self.mesh, input).iter().map(flops).sum();
                all / (profile.peak_flops_per_s(input) * self.value / 100.0)
            }
        }
    }
}
