//! Step time of a GPT under a framework.
//!
//! ```text
//! pass  = √((Σ kernels of the device)² + (operators · h)²)
//! step  = 1F1B over the stages' passes + exposed reductions of gradients + fixed
//! ```
//! With several chunks per stage, the schedule is interleaved 1F1B, and every pass through a chunk has its transfer.
//! The host needs h seconds for each operator. Where kernels are shorter, the device waits for the host. Neither a launch
//! queue nor the longer of both times, operator by operator, predicts models that a fit left out as well as the root of
//! squares. Gradients are reduced beside the last backward passes, which both slow.
//! [`operators`](super::operators) counts operators and their bytes.

use narrows_plan::program::{MicrobatchPass, StageSchedule};
use narrows_plan::{Kernel, Mesh, PipelineSchedule, Seconds};

use narrows_cost_model::profile::ProfileFile;
use narrows_cost_model::{
    Executor, OverlapSlowdown, PassTimes, Prices, Profile, StageTime, StepPart, schedule_time,
};

use super::operators::{MicrobatchShape, OperatorList, ResidualStream};
use crate::measurements::{StepRecompute, TrainedModel, TrainingStep};
use crate::step_terms::{StepTerm, TermShare, probed_shares};

/// Fitted coefficients of a framework on its host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FrameworkModel {
    /// Host seconds for each operator.
    pub operator_s: f64,
    /// Operators of a block, each pass, without counted work: views, masks, hooks.
    pub idle_operators: f64,
    /// Factor on the price of element-wise operators, for traffic that is not counted.
    pub elementwise_factor: f64,
    /// Factor on the price of GEMMs, for clocks under power limits and the kernel selection of libraries.
    pub gemm_factor: f64,
    /// Factor on the price of collectives. Not fitted: the price of published all-reduces is unbiased.
    pub collective_factor: f64,
    /// Fixed seconds of a step.
    pub fixed_s: f64,
    /// Fraction of the host's time that every further device of the tensor axis adds, because collectives wait for the
    /// slowest host.
    pub lockstep: f64,
}

/// Fitted to 270 steps of one framework on one to 512 A100s; five-fold cross-validated in the tests of this module.
pub(crate) const FITTED_FRAMEWORK: FrameworkModel = FrameworkModel {
    operator_s: 70e-6,
    idle_operators: 0.8395,
    elementwise_factor: 1.7875,
    gemm_factor: 1.0518,
    collective_factor: 1.0,
    fixed_s: 6.0695e-3,
    lockstep: 0.03056,
};

/// Bytes of a gradient in the reduction over replicas.
const GRADIENT_BYTES: u64 = 2;

/// The work of a step, independent of the framework: device times by kind of kernel, and numbers of launches.
#[derive(Clone, Debug)]
pub(super) struct StepWork {
    stages: Vec<StageWork>,
    schedules: Vec<Vec<MicrobatchPass>>,
    tensor_devices: u64,
    slowdown: Option<OverlapSlowdown>,
}

#[derive(Clone, Debug)]
struct StageWork {
    chunks: Vec<ChunkWork>,
    /// Seconds of a P2P transfer to the next stage.
    transfer_s: f64,
    /// Seconds of the reductions of gradients.
    reductions_s: f64,
}

/// The passes of a microbatch through a chunk.
#[derive(Clone, Copy, Debug, Default)]
struct ChunkWork {
    forward: PassWork,
    backward: PassWork,
}

/// One pass through a chunk, without launch gaps, which are part of the host's time.
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
        let count = (operators.kernels.len() + operators.overlapped.len()) as f64;
        let mut work = PassWork { operators: count, segments: 1.0, ..PassWork::default() };
        for kernel in &operators.kernels {
            let time_s = execution_s(kernel, prices);
            match kernel {
                Kernel::Gemm(_) | Kernel::Attention(_) => work.gemm_s += time_s,
                Kernel::Fused(_) => work.elementwise_s += time_s,
                Kernel::Collective(_) | Kernel::Transfer(_) => work.collectives_s += time_s,
            }
        }
        for overlapped in &operators.overlapped {
            let hidden_s = execution_s(&overlapped.gemm, prices);
            let exposed_s = execution_s(&overlapped.collective, prices) - hidden_s;
            work.collectives_s += exposed_s.max(0.0);
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

    fn time_s(&self, tensor_devices: u64, framework: &FrameworkModel) -> f64 {
        let device = self.gemm_s * framework.gemm_factor
            + self.elementwise_s * framework.elementwise_factor
            + self.collectives_s * framework.collective_factor;
        let lockstep = 1.0 + framework.lockstep * (tensor_devices - 1) as f64;
        let operators = self.operators + self.segments * framework.idle_operators;
        let host = operators * framework.operator_s * lockstep;
        device.hypot(host)
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
        // Without a tensor axis the framework turns sequence parallelism off.
        let residual = match step.shards_tokens() && mesh.tensor > 1 {
            true => ResidualStream::Sharded,
            false => ResidualStream::Replicated,
        };
        let shape = MicrobatchShape { gpt, mesh, sequences, length, residual };
        let prices = Prices::from_file(file, Executor::Eager, &mesh);
        let (stages, chunks) = (mesh.pipeline, step.interleaving);
        let schedule = match chunks {
            1 => PipelineSchedule::OneForwardOneBackward,
            _ => PipelineSchedule::Interleaved,
        };
        let microbatches = workload.microbatches(&mesh);
        Some(StepWork {
            stages: (0..mesh.pipeline)
                .map(|stage| StageWork::of(&shape, stage, step, &prices))
                .collect(),
            schedules: (0..mesh.pipeline)
                .map(|stage| {
                    StageSchedule { schedule, stage, stages, chunks, microbatches }.passes(false)
                })
                .collect(),
            tensor_devices: mesh.tensor,
            slowdown: prices.overlap_slowdown(),
        })
    }

    /// The step time in seconds.
    pub fn step_time_s(&self, framework: &FrameworkModel) -> f64 {
        let time = |stage: &StageWork| {
            let transfer_s = stage.transfer_s * framework.collective_factor;
            let passes = |chunk: &ChunkWork| {
                let [forward, backward] = [chunk.forward, chunk.backward]
                    .map(|work| Seconds(work.time_s(self.tensor_devices, framework) + transfer_s));
                PassTimes { forward, backward, weight_gradient: Seconds(0.0) }
            };
            let chunks: Vec<PassTimes> = stage.chunks.iter().map(passes).collect();
            let beside = chunks.iter().map(|chunk| chunk.backward).sum();
            let alone = Seconds(stage.reductions_s * framework.collective_factor);
            let exposed = self.slowdown.map_or(alone, |slowdown| slowdown.exposed(alone, beside));
            let step_phase = vec![StepPart::Local(exposed)];
            StageTime { chunks, step_phase, overlap: None }
        };
        let stages: Vec<StageTime> = self.stages.iter().map(time).collect();
        let schedules: Vec<_> = self.schedules.iter().map(|passes| passes.as_slice()).collect();
        schedule_time(&stages, &schedules).0 + framework.fixed_s
    }
}

impl StageWork {
    fn of(shape: &MicrobatchShape, stage: u64, step: &TrainingStep, prices: &Prices) -> StageWork {
        let chunks = 0..step.interleaving;
        let reductions = shape.gradient_reductions(stage, GRADIENT_BYTES);
        StageWork {
            chunks: chunks
                .map(|chunk| ChunkWork::of(shape, [stage, chunk], step, prices))
                .collect(),
            transfer_s: PassWork::of(&shape.transfer(), prices).collectives_s,
            reductions_s: PassWork::of(&reductions, prices).collectives_s,
        }
    }
}

impl ChunkWork {
    fn of(
        shape: &MicrobatchShape,
        [stage, chunk]: [u64; 2],
        step: &TrainingStep,
        prices: &Prices,
    ) -> ChunkWork {
        let blocks = (shape.gpt.layers / (shape.mesh.pipeline * step.interleaving)) as f64;
        let first = stage == 0 && chunk == 0;
        let last = stage + 1 == shape.mesh.pipeline && chunk + 1 == step.interleaving;
        let work = |operators: OperatorList| PassWork::of(&operators, prices);
        let (mut forward, mut backward) = (PassWork::default(), PassWork::default());
        forward.add(&work(shape.block_forward()), blocks);
        backward.add(&work(shape.block_backward()), blocks);
        match step.recompute {
            StepRecompute::Block => backward.add(&work(shape.block_forward()), blocks),
            StepRecompute::Selective => backward.add(&work(shape.attention_core()), blocks),
            StepRecompute::Auto
            | StepRecompute::None
            | StepRecompute::Latents
            | StepRecompute::SelectiveLayers
            | StepRecompute::SelectiveOps => {}
        }
        if first {
            forward.add(&work(shape.embedding_forward()), 1.0);
            backward.add(&work(shape.embedding_backward()), 1.0);
        }
        if last {
            forward.add(&work(shape.head_forward()), 1.0);
            backward.add(&work(shape.head_backward()), 1.0);
        }
        ChunkWork { forward, backward }
    }
}

/// The shares of a step time that its terms have; `None` for a model that is not a GPT.
pub(crate) fn term_shares(
    step: &TrainingStep,
    mesh: Mesh,
    profile: &Profile,
    framework: &FrameworkModel,
) -> Option<Vec<TermShare>> {
    let work = StepWork::new(step, mesh, profile)?;
    let scaled_time_s = |term: StepTerm, factor: f64| {
        let mut scaled = *framework;
        match term {
            StepTerm::Gemm => scaled.gemm_factor *= factor,
            // The GEMMs and the softmax of attention are terms of their kinds.
            StepTerm::Attention => {}
            StepTerm::Memory => scaled.elementwise_factor *= factor,
            StepTerm::Collective => scaled.collective_factor *= factor,
            StepTerm::Host => {
                scaled.operator_s *= factor;
                scaled.fixed_s *= factor;
            }
        }
        work.step_time_s(&scaled)
    };
    Some(probed_shares(work.step_time_s(framework), scaled_time_s))
}

/// The step time in seconds; `None` for a model that is not a GPT.
pub(crate) fn step_time_s(
    step: &TrainingStep,
    mesh: Mesh,
    profile: &Profile,
    framework: &FrameworkModel,
) -> Option<f64> {
    Some(StepWork::new(step, mesh, profile)?.step_time_s(framework))
}
