//! Step time of a GPT under a framework.
//!
//! ```text
//! pass  = ((Σ kernels of the device)ᵖ + (operators · h)ᵖ)^(1/p)
//! step  = 1F1B over the stages' passes + reductions of gradients + fixed
//! ```
//! The host needs h seconds for each operator. Where kernels are shorter, the device waits for the host.
//! [`operators`](super::operators) counts operators and their bytes.

use narrows_plan::program::{MicrobatchPass, StageSchedule};
use narrows_plan::strategy::Recompute;
use narrows_plan::{Kernel, Mesh, PipelineSchedule, Seconds};

use narrows_cost_model::profile::ProfileFile;
use narrows_cost_model::{
    Executor, PassTimes, Prices, Profile, StageTime, StepPart, schedule_time,
};

use super::operators::{MicrobatchShape, OperatorList};
use crate::measurements::{TrainedModel, TrainingStep};

/// Fitted coefficients of a framework on its host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Framework {
    /// Host seconds for each operator.
    pub operator_s: f64,
    /// Operators of a block, each pass, without counted work: views, masks, hooks.
    pub idle_operators: f64,
    /// The exponent p of (deviceᵖ + hostᵖ)^(1/p).
    pub overlap: f64,
    /// Factor on the price of element-wise operators, for traffic that is not counted.
    pub elementwise_factor: f64,
    /// Factor on the price of GEMMs, for clocks under power limits and the kernel selection of libraries.
    pub gemm_factor: f64,
    /// Factor on the price of collectives.
    pub collective_factor: f64,
    /// Fixed seconds of a step.
    pub fixed_s: f64,
    /// Fraction of the host's time that every further device of the tensor axis adds, because collectives wait for the
    /// slowest host.
    pub lockstep: f64,
}

/// Fitted to 270 steps of one framework on one to 512 A100s; five-fold cross-validated in the tests of this module.
pub(crate) const FITTED_FRAMEWORK: Framework = Framework {
    operator_s: 70e-6,
    idle_operators: 0.8033,
    overlap: 1.9815,
    elementwise_factor: 1.7411,
    gemm_factor: 1.0883,
    collective_factor: 0.3349,
    fixed_s: 5.017e-3,
    lockstep: 0.0427,
};

/// Bytes of a gradient in the reduction over replicas.
const GRADIENT_BYTES: u64 = 2;

/// The work of a step, independent of the framework: device times by kind of kernel, and numbers of launches.
#[derive(Clone, Debug)]
pub(super) struct StepWork {
    stages: Vec<StageWork>,
    schedules: Vec<Vec<MicrobatchPass>>,
    tensor_devices: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct StageWork {
    forward: PassWork,
    backward: PassWork,
    /// Seconds of a P2P transfer to the next stage.
    transfer_s: f64,
    /// Seconds of the reductions of gradients.
    reductions_s: f64,
}

/// One pass of a stage, without launch gaps, which are part of the host's time.
#[derive(Clone, Copy, Debug, Default)]
struct PassWork {
    gemm_s: f64,
    elementwise_s: f64,
    collectives_s: f64,
    operators: f64,
    /// Blocks, embeddings and heads, each with idle operators.
    segments: f64,
}

impl PassWork {
    fn of(operators: &OperatorList, prices: &Prices) -> PassWork {
        let count = operators.kernels.len() as f64;
        let mut work = PassWork { operators: count, segments: 1.0, ..PassWork::default() };
        for kernel in &operators.kernels {
            let time_s = execution_s(kernel, prices);
            match kernel {
                Kernel::Gemm(_) | Kernel::Attention(_) => work.gemm_s += time_s,
                Kernel::Fused(_) => work.elementwise_s += time_s,
                Kernel::Collective(_) | Kernel::Transfer(_) => work.collectives_s += time_s,
            }
        }
        work
    }

    fn add(&mut self, other: &PassWork, count: f64) {
        self.gemm_s += other.gemm_s * count;
        self.elementwise_s += other.elementwise_s * count;
        self.collectives_s += other.collectives_s * count;
        self.operators += other.operators * count;
        self.segments += other.segments * count;
    }

    fn time_s(&self, tensor_devices: u64, framework: &Framework) -> f64 {
        let device = self.gemm_s * framework.gemm_factor
            + self.elementwise_s * framework.elementwise_factor
            + self.collectives_s * framework.collective_factor;
        let lockstep = 1.0 + framework.lockstep * (tensor_devices - 1) as f64;
        let operators = self.operators + self.segments * framework.idle_operators;
        let host = operators * framework.operator_s * lockstep;
        let p = framework.overlap;
        (device.powf(p) + host.powf(p)).powf(1.0 / p)
    }
}

/// The time of a kernel without the launch gap, in seconds.
fn execution_s(kernel: &Kernel, prices: &Prices) -> f64 {
    (prices.kernel_time(kernel) - prices.launch_gap()).0.max(0.0)
}

impl StepWork {
    /// Counts the work of a step; `None` for a model that is not a GPT.
    pub fn new(step: &TrainingStep, mesh: Mesh, profile: &Profile) -> Option<StepWork> {
        StepWork::from_file(step, mesh, profile.file())
    }

    /// Counts the work of a step on a validated profile file.
    pub fn from_file(step: &TrainingStep, mesh: Mesh, file: &ProfileFile) -> Option<StepWork> {
        let TrainedModel::Gpt(gpt) = step.model else { return None };
        let workload = step.workload;
        let (sequences, length) = (workload.micro_batch, workload.sequence_length);
        let shape = MicrobatchShape { gpt, mesh, sequences, length };
        let prices = Prices::from_file(file, Executor::Eager, &mesh);
        let recompute = step.recompute != Recompute::None;
        let microbatches = workload.microbatches(&mesh);
        Some(StepWork {
            stages: (0..mesh.pipeline)
                .map(|stage| StageWork::of(&shape, stage, recompute, &prices))
                .collect(),
            schedules: (0..mesh.pipeline)
                .map(|stage| {
                    let (schedule, stages) = (PipelineSchedule::default(), mesh.pipeline);
                    StageSchedule { schedule, stage, stages, chunks: 1, microbatches }.passes(false)
                })
                .collect(),
            tensor_devices: mesh.tensor,
        })
    }

    /// The step time in seconds.
    pub fn step_time_s(&self, framework: &Framework) -> f64 {
        let time = |stage: &StageWork| {
            let transfer_s = stage.transfer_s * framework.collective_factor;
            let [forward, backward] = [stage.forward, stage.backward]
                .map(|work| Seconds(work.time_s(self.tensor_devices, framework) + transfer_s));
            let step = Seconds(stage.reductions_s * framework.collective_factor);
            let step_phase = vec![StepPart::Local(step)];
            let passes = PassTimes { forward, backward, weight_gradient: Seconds(0.0) };
            StageTime { chunks: vec![passes], step_phase, overlap: None }
        };
        let stages: Vec<StageTime> = self.stages.iter().map(time).collect();
        let schedules: Vec<_> = self.schedules.iter().map(|passes| passes.as_slice()).collect();
        schedule_time(&stages, &schedules).0 + framework.fixed_s
    }
}

impl StageWork {
    fn of(shape: &MicrobatchShape, stage: u64, recompute: bool, prices: &Prices) -> StageWork {
        let blocks = (shape.gpt.layers / shape.mesh.pipeline) as f64;
        let (first, last) = (stage == 0, stage + 1 == shape.mesh.pipeline);
        let work = |operators: OperatorList| PassWork::of(&operators, prices);
        let (mut forward, mut backward) = (PassWork::default(), PassWork::default());
        forward.add(&work(shape.block_forward()), blocks);
        backward.add(&work(shape.block_backward()), blocks);
        if recompute {
            backward.add(&work(shape.block_forward()), blocks);
        }
        if first {
            forward.add(&work(shape.embedding_forward()), 1.0);
            backward.add(&work(shape.embedding_backward()), 1.0);
        }
        if last {
            forward.add(&work(shape.head_forward()), 1.0);
            backward.add(&work(shape.head_backward()), 1.0);
        }
        let reductions = work(shape.gradient_reductions(stage, GRADIENT_BYTES));
        let (transfer_s, reductions_s) =
            (execution_s(&shape.transfer(), prices), reductions.collectives_s);
        StageWork { forward, backward, transfer_s, reductions_s }
    }
}

/// The step time in seconds; `None` for a model that is not a GPT.
pub(crate) fn step_time_s(
    step: &TrainingStep,
    mesh: Mesh,
    profile: &Profile,
    framework: &Framework,
) -> Option<f64> {
    Some(StepWork::new(step, mesh, profile)?.step_time_s(framework))
}
