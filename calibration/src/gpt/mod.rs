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

pub mod fit;
pub mod fitted;
pub mod interval;
pub mod kernels;

use narrows_plan::program::{MicrobatchPass, one_forward_one_backward};
use narrows_plan::strategy::Recompute;
use narrows_plan::{Kernel, Mesh, Seconds};

use crate::measurements::{TrainedModel, TrainingStep};
use kernels::{MicrobatchShape, OperatorList};
use narrows_cost_model::profile::ProfileFile;
use narrows_cost_model::simulate::{StageTime, StepPart, schedule_time};
use narrows_cost_model::{Executor, Prices, Profile};

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
    idle_operators: 0.8033,
    overlap: 1.9815,
    pass_factor: 1.7411,
    product_factor: 1.0883,
    collective_factor: 0.3349,
    step_s: 5.017e-3,
    lockstep: 0.0427,
};

/// Bytes of a gradient when replicas add theirs up.
const GRADIENT_BYTES: u64 = 2;

/// What a step takes under any framework: its device's times by kind of kernel, and what is launched.
#[derive(Clone, Debug)]
pub struct StepCounts {
    stages: Vec<StageCounts>,
    schedules: Vec<Vec<MicrobatchPass>>,
    tensor: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct StageCounts {
    forward: PassTimes,
    backward: PassTimes,
    /// Seconds of a transfer to the next stage.
    hop_s: f64,
    /// Seconds of the reductions of gradients.
    reductions_s: f64,
}

/// One pass of a stage, launch gaps left out: those are the host's, which is counted on its own.
#[derive(Clone, Copy, Debug, Default)]
struct PassTimes {
    products_s: f64,
    passes_s: f64,
    collectives_s: f64,
    operators: f64,
    /// Blocks and the like, each with operators that are not counted.
    works: f64,
}

impl PassTimes {
    fn of(work: &OperatorList, prices: &Prices) -> PassTimes {
        let mut sums =
            PassTimes { operators: work.kernels.len() as f64, works: 1.0, ..PassTimes::default() };
        for kernel in &work.kernels {
            let busy = busy_s(kernel, prices);
            match kernel {
                Kernel::Gemm(_) | Kernel::Attention(_) => sums.products_s += busy,
                Kernel::Fused(_) => sums.passes_s += busy,
                Kernel::Collective(_) | Kernel::Transfer(_) => sums.collectives_s += busy,
            }
        }
        sums
    }

    fn add(&mut self, other: &PassTimes, times: f64) {
        self.products_s += other.products_s * times;
        self.passes_s += other.passes_s * times;
        self.collectives_s += other.collectives_s * times;
        self.operators += other.operators * times;
        self.works += other.works * times;
    }

    fn time_s(&self, tensor: u64, framework: &Framework) -> f64 {
        let device = self.products_s * framework.product_factor
            + self.passes_s * framework.pass_factor
            + self.collectives_s * framework.collective_factor;
        let lockstep = 1.0 + framework.lockstep * (tensor - 1) as f64;
        let operators = self.operators + self.works * framework.idle_operators;
        let host = operators * framework.operator_s * lockstep;
        let p = framework.overlap;
        (device.powf(p) + host.powf(p)).powf(1.0 / p)
    }
}

fn busy_s(kernel: &Kernel, prices: &Prices) -> f64 {
    (prices.kernel(kernel) - prices.launch_gap()).0.max(0.0)
}

impl StepCounts {
    /// Counts a step; `None` when it is no GPT's.
    pub fn new(step: &TrainingStep, mesh: Mesh, profile: &Profile) -> Option<StepCounts> {
        StepCounts::of(step, mesh, profile.file())
    }

    /// The same for numbers that were checked.
    pub(crate) fn of(step: &TrainingStep, mesh: Mesh, file: &ProfileFile) -> Option<StepCounts> {
        let TrainedModel::Gpt(gpt) = step.model else { return None };
        let workload = step.workload;
        let (sequences, length) = (workload.micro_batch, workload.sequence_length);
        let shape = MicrobatchShape { gpt, mesh, sequences, length };
        let prices = Prices::of(file, Executor::Eager, &mesh);
        let recompute = step.recompute != Recompute::None;
        let microbatches = workload.microbatches(&mesh);
        Some(StepCounts {
            stages: (0..mesh.pipeline)
                .map(|stage| StageCounts::of(&shape, stage, recompute, &prices))
                .collect(),
            schedules: (0..mesh.pipeline)
                .map(|stage| one_forward_one_backward(stage, mesh.pipeline, microbatches))
                .collect(),
            tensor: mesh.tensor,
        })
    }

    /// The step's time in seconds.
    pub fn step_s(&self, framework: &Framework) -> f64 {
        let time = |stage: &StageCounts| {
            let hop = stage.hop_s * framework.collective_factor;
            let [forward, backward] = [stage.forward, stage.backward]
                .map(|sums| Seconds(sums.time_s(self.tensor, framework) + hop));
            let step = Seconds(stage.reductions_s * framework.collective_factor);
            StageTime { forward, backward, step: vec![StepPart::Alone(step)] }
        };
        let stages: Vec<StageTime> = self.stages.iter().map(time).collect();
        let schedules: Vec<_> = self.schedules.iter().map(|turns| turns.as_slice()).collect();
        schedule_time(&stages, &schedules).0 + framework.step_s
    }
}

impl StageCounts {
    fn of(shape: &MicrobatchShape, stage: u64, recompute: bool, prices: &Prices) -> StageCounts {
        let blocks = (shape.gpt.layers / shape.mesh.pipeline) as f64;
        let (first, last) = (stage == 0, stage + 1 == shape.mesh.pipeline);
        let count = |work: OperatorList| PassTimes::of(&work, prices);
        let (mut forward, mut backward) = (PassTimes::default(), PassTimes::default());
        forward.add(&count(shape.block_forward()), blocks);
        backward.add(&count(shape.block_backward()), blocks);
        if recompute {
            backward.add(&count(shape.block_forward()), blocks);
        }
        if first {
            forward.add(&count(shape.embedding_forward()), 1.0);
            backward.add(&count(shape.embedding_backward()), 1.0);
        }
        if last {
            forward.add(&count(shape.head_forward()), 1.0);
            backward.add(&count(shape.head_backward()), 1.0);
        }
        let reductions = count(shape.gradient_reductions(stage, GRADIENT_BYTES));
        let (hop_s, reductions_s) = (busy_s(&shape.transfer(), prices), reductions.collectives_s);
        StageCounts { forward, backward, hop_s, reductions_s }
    }
}

/// The step's time in seconds; `None` when the step is no GPT's.
pub fn step_s(
    step: &TrainingStep,
    mesh: Mesh,
    profile: &Profile,
    framework: &Framework,
) -> Option<f64> {
    Some(StepCounts::new(step, mesh, profile)?.step_s(framework))
}
