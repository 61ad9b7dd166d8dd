//! Step time of a decoder under a framework's table.
//!
//! ```text
//! pass = launch queue of the segments' kernels, with what collectives of parameters add to each block
//! step = passes of all microbatches (1F1B over the stages) + reductions of gradients + update + host's step
//! ```
//! With sharded parameters, a block's weights are gathered, and its gradients reduced, beside the pass of a neighbouring
//! block, which both slow ([`OverlapSlowdown`](narrows_cost_model::OverlapSlowdown)); the first gather and the last
//! reduction of a pass run alone.

use narrows_cost_model::{
    Executor, LaunchQueue, OverlapSlowdown, PassTimes, Prices, Profile, StageTime, StepPart,
    schedule_time,
};
use narrows_plan::kernel::{CollectiveKind, Direction, Gemm, Kernel};
use narrows_plan::program::{MicrobatchPass, StageSchedule};
use narrows_plan::{Mesh, PipelineSchedule, Seconds, Zero};

use super::file::{FrameworkTable, ParameterOverlap, StageDivision};
use super::operator::Operator;
use super::shape::DecoderShape;
use crate::measurements::{DecoderModel, EmbeddingKind, StepRecompute, TrainingStep};

/// A step that is being priced.
struct DecoderStep<'a> {
    shape: DecoderShape<'a>,
    step: &'a TrainingStep,
    prices: Prices,
    slowdown: OverlapSlowdown,
}

/// The step time of a decoder in seconds.
pub(crate) fn decoder_step_time_s(
    table: &FrameworkTable,
    model: DecoderModel,
    step: &TrainingStep,
    mesh: Mesh,
    profile: &Profile,
) -> f64 {
    let shape = DecoderShape {
        table,
        model,
        mesh,
        sequences: step.workload.micro_batch,
        length: step.workload.sequence_length,
        shards_tokens: step.shards_tokens() && mesh.tensor > 1,
    };
    let prices = Prices::new(profile, Executor::Eager, &mesh);
    let slowdown = prices
        .overlap_slowdown()
        .unwrap_or(OverlapSlowdown { compute: 1.0, collective: f64::INFINITY });
    DecoderStep { shape, step, prices, slowdown }.time_s()
}

impl DecoderStep<'_> {
    fn table(&self) -> &FrameworkTable {
        self.shape.table
    }

    fn time_s(&self) -> f64 {
        let microbatches = self.step.workload.microbatches(&self.shape.mesh);
        let stages = self.shape.mesh.pipeline;
        let time = if stages == 1 {
            let [forward, backward] = self.passes(0, 0);
            let passes = forward.then(backward).repeated(microbatches);
            passes.time_s() + self.step_phase_s(0, backward.device_s())
        } else {
            self.pipeline_s(microbatches)
        };
        time + self.table().host.step_s
    }

    /// The time of all passes and step phases of a pipeline.
    fn pipeline_s(&self, microbatches: u64) -> f64 {
        let (stages, chunks) = (self.shape.mesh.pipeline, self.step.interleaving);
        let transfer_s: f64 =
            self.shape.transfer().iter().map(|kernel| self.device_s(kernel)).sum();
        let schedule = match chunks {
            1 => PipelineSchedule::OneForwardOneBackward,
            _ => PipelineSchedule::Interleaved,
        };
        let stage_time = |stage: u64| {
            let passes = |chunk: u64| {
                let [forward, backward] =
                    self.passes(stage, chunk).map(|pass| Seconds(pass.time_s() + transfer_s));
                PassTimes { forward, backward, weight_gradient: Seconds(0.0) }
            };
            let chunks: Vec<PassTimes> = (0..chunks).map(passes).collect();
            let backward_s = chunks.iter().map(|chunk| chunk.backward.0).sum();
            let step_phase = vec![StepPart::Local(Seconds(self.step_phase_s(stage, backward_s)))];
            StageTime { chunks, step_phase, overlap: None }
        };
        let times: Vec<StageTime> = (0..stages).map(stage_time).collect();
        let schedule = |stage: u64| {
            StageSchedule { schedule, stage, stages, chunks, microbatches }.passes(false)
        };
        let schedules: Vec<Vec<MicrobatchPass>> = (0..stages).map(schedule).collect();
        let schedules: Vec<_> = schedules.iter().map(|passes| passes.as_slice()).collect();
        schedule_time(&times, &schedules).0
    }

    /// The forward and the backward pass through a chunk of a stage.
    fn passes(&self, stage: u64, chunk: u64) -> [LaunchQueue; 2] {
        let (shape, step) = (&self.shape, self.step);
        let (first, last) = self.ends(stage, chunk);
        let blocks = self.blocks(stage);
        let (gather_s, reduce_s) = self.block_collectives_s();
        let block = self.segment(shape.block_forward());
        let mut forward = LaunchQueue::default();
        if first {
            forward = forward.then(self.segment(shape.embedding_forward()));
        }
        forward = forward
            .then(device(gather_s.forward))
            .then(self.beside(block, gather_s.forward).repeated(blocks));
        if last {
            forward = forward.then(self.segment(shape.head_forward()));
        }
        let mut backward = LaunchQueue::default();
        if last {
            backward = backward.then(self.segment(shape.head_backward()));
        }
        let gradients = self.segment(shape.block_backward());
        let again = self.segment(shape.recomputed_block());
        let repeating = |again: LaunchQueue| again.then(gradients);
        let beside = |block: LaunchQueue| self.beside(block, gather_s.backward + reduce_s);
        let run = match step.recompute {
            StepRecompute::Block => beside(repeating(again)).repeated(blocks),
            StepRecompute::SelectiveOps => {
                beside(repeating(self.segment(shape.recomputed_ops()))).repeated(blocks)
            }
            StepRecompute::Selective => {
                beside(repeating(self.segment(shape.attention_core()))).repeated(blocks)
            }
            StepRecompute::SelectiveLayers => {
                let pair = beside(repeating(again)).then(beside(gradients));
                pair.repeated(blocks / 2).then(beside(gradients).repeated(blocks % 2))
            }
            StepRecompute::Auto | StepRecompute::None | StepRecompute::Latents => {
                beside(gradients).repeated(blocks)
            }
        };
        backward = backward.then(device(gather_s.backward)).then(run).then(device(reduce_s));
        if first {
            backward = backward.then(self.segment(shape.embedding_backward()));
        }
        [forward, backward]
    }

    /// Whether a chunk of a stage has the embedding, and whether it has the head.
    fn ends(&self, stage: u64, chunk: u64) -> (bool, bool) {
        let last_stage = stage + 1 == self.shape.mesh.pipeline;
        (stage == 0 && chunk == 0, last_stage && chunk + 1 == self.step.interleaving)
    }

    /// Blocks of each chunk of a stage.
    fn blocks(&self, stage: u64) -> u64 {
        let (layers, stages) = (self.shape.model.layers, self.shape.mesh.pipeline);
        if self.table().stages == StageDivision::EqualBlocks || self.step.interleaving > 1 {
            return layers / (stages * self.step.interleaving);
        }
        let (block, logits) = (self.shape.block_weights(), self.shape.embedding_weights());
        let total = block * layers + logits;
        // A block belongs to the stage in whose share of the weights it ends.
        let stage_of =
            |index: u64| (((index + 1) * block * stages).div_ceil(total) - 1).min(stages - 1);
        (0..layers).filter(|index| stage_of(*index) == stage).count() as u64
    }

    /// A segment's operators, with the host's time for the segment.
    fn segment(&self, operators: Vec<Operator>) -> LaunchQueue {
        let host = &self.table().host;
        let lockstep = 1.0 + host.lockstep * (self.shape.mesh.tensor - 1) as f64;
        let begin = LaunchQueue::operator(host.block_s * lockstep, 0.0);
        operators.into_iter().fold(begin, |run, operator| {
            let device_s = match operator {
                Operator::Kernel(kernel) => self.device_s(&kernel),
                Operator::Beside { collective, gemm } => {
                    let [collective_s, gemm_s] =
                        [Kernel::Collective(collective), Kernel::Gemm(gemm)]
                            .map(|kernel| self.device_s(&kernel));
                    (collective_s - gemm_s).max(0.0)
                }
            };
            let device_s = device_s + self.table().device.operator_s;
            run.then(LaunchQueue::operator(host.operator_s * lockstep, device_s))
        })
    }

    /// The device's time of a kernel in seconds.
    fn device_s(&self, kernel: &Kernel) -> f64 {
        let time_s = self.price_s(kernel);
        let FrameworkTable { attention, factors, .. } = self.table();
        match kernel {
            Kernel::Gemm(gemm) if is_aligned(gemm) => time_s * factors.gemm,
            Kernel::Gemm(_) => time_s * factors.gemm * factors.unaligned_gemm,
            Kernel::Attention(of) if of.direction == Direction::Forward => {
                time_s / attention.forward
            }
            Kernel::Attention(_) => time_s / attention.backward,
            Kernel::Fused(_) => time_s * factors.memory,
            Kernel::Collective(_) | Kernel::Transfer(_) => time_s * factors.collective,
        }
    }

    /// The price of a kernel without the launch gap, in seconds.
    fn price_s(&self, kernel: &Kernel) -> f64 {
        (self.prices.kernel_time(kernel) - self.prices.launch_gap()).0.max(0.0)
    }

    /// A block's pass beside collectives of parameters that take this time alone.
    fn beside(&self, block: LaunchQueue, collectives_s: f64) -> LaunchQueue {
        let computation = Seconds(block.device_s());
        let added = match self.table().parameters.overlap {
            ParameterOverlap::Blocks if collectives_s > 0.0 => {
                self.slowdown.exposed(Seconds(collectives_s), computation).0
            }
            ParameterOverlap::Blocks | ParameterOverlap::None => collectives_s,
        };
        block.then(device(added))
    }

    /// Times of the gathers of a block's weights and of the reduction of its gradients.
    fn block_collectives_s(&self) -> (Gathers, f64) {
        let parameters = &self.table().parameters;
        let weights = self.shape.block_weights();
        let time = |kind, bytes| self.device_s(&self.shape.over_replicas(kind, weights, bytes));
        let gather = time(CollectiveKind::AllGather, parameters.weight_bytes);
        let reduce = time(CollectiveKind::ReduceScatter, parameters.gradient_bytes);
        match self.step.zero {
            Zero::Off | Zero::One => (Gathers::default(), 0.0),
            Zero::Two => (Gathers { forward: gather, backward: 0.0 }, reduce),
            Zero::Three => (Gathers { forward: gather, backward: gather }, reduce),
        }
    }

    /// Reductions that passes do not contain, and the update. The last backward pass takes `backward_s`.
    fn step_phase_s(&self, stage: u64, backward_s: f64) -> f64 {
        let (shape, parameters) = (&self.shape, &self.table().parameters);
        let last_chunk = self.step.interleaving - 1;
        let (first, last) = (self.ends(stage, 0).0, self.ends(stage, last_chunk).1);
        let blocks = self.blocks(stage) * self.step.interleaving * shape.block_weights();
        let mut tables = if first { shape.embedding_weights() } else { 0 };
        if last {
            // The last of several stages has a copy of a tied table.
            tables += if shape.mesh.pipeline > 1 {
                shape.embedding_weights()
            } else {
                shape.head_weights()
            };
        }
        let time = |kind, weights, bytes| self.device_s(&shape.over_replicas(kind, weights, bytes));
        let gathered = |weights| time(CollectiveKind::AllGather, weights, parameters.weight_bytes);
        let scattered =
            |weights| time(CollectiveKind::ReduceScatter, weights, parameters.gradient_bytes);
        let collectives_s = match self.step.zero {
            Zero::Off => {
                time(CollectiveKind::AllReduce, blocks + tables, parameters.gradient_bytes)
            }
            Zero::One => scattered(blocks + tables) + gathered(blocks + tables),
            Zero::Two | Zero::Three => scattered(tables) + gathered(tables),
        };
        let is_tied = shape.model.embedding == EmbeddingKind::Tied && shape.mesh.pipeline > 1;
        let tied =
            (is_tied && (first || last)).then(|| shape.tied_table(parameters.gradient_bytes));
        let collectives_s = collectives_s + tied.map_or(0.0, |kernel| self.device_s(&kernel));
        let exposed_s = match parameters.overlap {
            ParameterOverlap::Blocks if collectives_s > 0.0 => {
                self.slowdown.exposed(Seconds(collectives_s), Seconds(backward_s)).0
            }
            ParameterOverlap::Blocks | ParameterOverlap::None => collectives_s,
        };
        let replicas = if self.step.zero == Zero::Off { 1 } else { shape.mesh.data };
        // The bytes of an update are counted, and it has no operators of its own.
        exposed_s + self.price_s(&shape.update((blocks + tables) / replicas))
    }
}

/// Times of the gathers of a block's weights in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Gathers {
    forward: f64,
    backward: f64,
}

/// Elements of 16 bits in the 16 bytes that aligned loads of a GEMM move.
const ALIGNED_ELEMENTS: u64 = 8;

/// Whether the rows of a GEMM's operands begin at multiples of 16 bytes.
fn is_aligned(gemm: &Gemm) -> bool {
    gemm.k.is_multiple_of(ALIGNED_ELEMENTS) && gemm.n.is_multiple_of(ALIGNED_ELEMENTS)
}

/// Work of the device alone.
fn device(time_s: f64) -> LaunchQueue {
    LaunchQueue::operator(0.0, time_s)
}
