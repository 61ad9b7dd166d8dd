//! The step time of a full-rank GPT under a framework that launches operator by operator.
//!
//! The planner knows LLaMA-like models under its own programs. Many published step times are of
//! another architecture and another program; this room prices those, on the same [`Prices`]:
//!
//! ```text
//! pass  = ((Σ kernels of the device)ᵖ + (operators · h)ᵖ)^(1/p)
//! step  = 1F1B over the stages' passes + reductions of gradients + fixed
//! ```
//! The host needs h seconds for an operator; where kernels are shorter than that, the device waits
//! for the host. Operators are counted in [`kernels`], bytes too. What is fitted is in [`Framework`]:
//! numbers of the framework and its host, none of them indexed by a model, a mesh or a row.

pub mod kernels;

use narrows_plan::program::one_forward_one_backward;
use narrows_plan::strategy::Recompute;
use narrows_plan::{Kernel, Mesh, Seconds};

use crate::measured::{Step, Subject};
use crate::simulate::{StageTime, run_schedule};
use crate::{Executor, Prices, Profile};
use kernels::{Shape, Work};

/// What is fitted: a framework on its host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Framework {
    /// Host seconds for an operator.
    pub operator_s: f64,
    /// How many operators of a block do nothing that is counted, each pass: views, masks, hooks.
    pub idle_operators: f64,
    /// The exponent p of (deviceᵖ + hostᵖ)^(1/p): the two hide each other only while both are busy.
    pub overlap: f64,
    /// Times the counted bytes of passes: what operators move beyond the counted ones.
    pub pass_factor: f64,
    /// Times the price of products: clocks under power limits, and libraries' choices of kernels.
    pub product_factor: f64,
    /// Times the price of collectives.
    pub collective_factor: f64,
    /// Seconds a step takes whatever its size.
    pub step_s: f64,
    /// Share by which every other device of the tensor axis makes the host's time longer: collectives
    /// wait for the slowest host.
    pub lockstep: f64,
}

/// Fitted to 270 steps of one framework on one to 512 A100s; five-fold cross-validated in `tests/gpt`.
pub const FRAMEWORK: Framework = Framework {
    operator_s: 70e-6,
    idle_operators: 1.317,
    overlap: 2.212,
    pass_factor: 1.945,
    product_factor: 1.036,
    collective_factor: 0.426,
    step_s: 4.82e-3,
    lockstep: 0.038,
};

/// Bytes of a gradient when replicas add theirs up.
const GRADIENT_BYTES: u64 = 2;

/// The step's time in seconds; `None` when the step is no GPT's.
pub fn step_s(step: &Step, mesh: Mesh, profile: &Profile, framework: &Framework) -> Option<f64> {
    let Subject::Gpt(gpt) = step.model else { return None };
    let workload = step.workload;
    let (sequences, length) = (workload.micro_batch, workload.sequence_length);
    let shape = Shape { gpt, mesh, sequences, length };
    let prices = Prices::new(profile, Executor::Eager, &mesh);
    let pricer = Pricer { prices, framework, mesh };
    let recompute = step.recompute != Recompute::None;
    let stages: Vec<StageTime> =
        (0..mesh.pipeline).map(|stage| pricer.stage(&shape, stage, recompute)).collect();
    let microbatches = workload.microbatches(&mesh);
    let schedules: Vec<_> = (0..mesh.pipeline)
        .map(|stage| one_forward_one_backward(stage, mesh.pipeline, microbatches))
        .collect();
    let schedules: Vec<_> = schedules.iter().map(|turns| turns.as_slice()).collect();
    let (time, _) = run_schedule(&stages, &schedules);
    Some(time.0 + framework.step_s)
}

struct Pricer<'a> {
    prices: Prices,
    framework: &'a Framework,
    mesh: Mesh,
}

impl Pricer<'_> {
    fn device_s(&self, work: &Work) -> f64 {
        work.kernels.iter().map(|kernel| self.kernel_s(kernel)).sum()
    }

    fn host_s(&self, work: &Work) -> f64 {
        let lockstep = 1.0 + self.framework.lockstep * (self.mesh.tensor - 1) as f64;
        let operators = work.kernels.len() as f64 + self.framework.idle_operators;
        operators * self.framework.operator_s * lockstep
    }

    fn together(&self, device_s: f64, host_s: f64) -> f64 {
        let p = self.framework.overlap;
        (device_s.powf(p) + host_s.powf(p)).powf(1.0 / p)
    }

    /// The gap between kernels is the host's, which is counted on its own.
    fn kernel_s(&self, kernel: &Kernel) -> f64 {
        let busy = (self.prices.kernel(kernel) - self.prices.launch_gap()).0.max(0.0);
        busy * match kernel {
            Kernel::Gemm(_) | Kernel::Attention(_) => self.framework.product_factor,
            Kernel::Pass(_) => self.framework.pass_factor,
            Kernel::Collective(_) | Kernel::Transfer(_) => self.framework.collective_factor,
        }
    }

    fn stage(&self, shape: &Shape, stage: u64, recompute: bool) -> StageTime {
        let blocks = (shape.gpt.layers / self.mesh.pipeline) as f64;
        let (first, last) = (stage == 0, stage + 1 == self.mesh.pipeline);
        let (forward, backward) = (shape.block_forward(), shape.block_backward());
        let mut device = [self.device_s(&forward), self.device_s(&backward)];
        let mut host = [self.host_s(&forward), self.host_s(&backward)];
        if recompute {
            device[1] += device[0];
            host[1] += host[0];
        }
        let mut device = device.map(|seconds| seconds * blocks);
        let mut host = host.map(|seconds| seconds * blocks);
        if first {
            let works = [shape.embedding_forward(), shape.embedding_backward()];
            for (pass, work) in works.iter().enumerate() {
                device[pass] += self.device_s(work);
                host[pass] += self.host_s(work);
            }
        }
        if last {
            let works = [shape.head_forward(), shape.head_backward()];
            for (pass, work) in works.iter().enumerate() {
                device[pass] += self.device_s(work);
                host[pass] += self.host_s(work);
            }
        }
        let hop = self.kernel_s(&shape.transfer());
        let [forward, backward] =
            [0, 1].map(|pass| Seconds(self.together(device[pass], host[pass]) + hop));
        let reductions = self.device_s(&shape.gradient_reductions(stage, GRADIENT_BYTES));
        StageTime { forward, backward, step: Seconds(reductions) }
    }
}
