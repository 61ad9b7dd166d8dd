//! Kernels that a published program launches beyond those of a plan, or instead of them.
//!
//! A plan is a program of this runtime. Programs of others differ from it as their sources say.
//!
//! - **Separate linears.** q, k and v, or gate and up, are modules of their own. Each sums the gradient of its input over the
//!   tensor axis by itself, and autograd adds the sums. A plan adds the gradients on each device by GEMMs that accumulate, and
//!   sums them once.
//! - **Gradients.** PyTorch computes a weight's gradient in 16 bits. With fp32 gradients (`accumulate_grad_in_fp32`), a pass of
//!   10 bytes a weight adds it to them in each microbatch; otherwise microbatches after the first add it in 16 bits, 6 bytes a
//!   weight. The GEMMs of a plan add it to fp32 gradients themselves.
//! - **Update.** Bytes that a step reads and writes for each parameter, by Nanotron's optimizer:
//!
//! ```text
//!                      norm   clip   fused AdamW   copy to 16 bits   gradient to zero   sum
//! fp32 gradients          4      8            28                 6                  4    50
//! 16-bit gradients        2      4            14                                         20
//! ```
//! The norm, the clip and the copy are launched for each parameter. Without fp32 gradients, weights and optimizer states have
//! 16 bits. Gradients of norms and of the embedding's lookup are not counted.

use narrows_cost_model::{Breakdown, Prices};
use narrows_plan::kernel::{Collective, CollectiveKind, FusedKernel, FusedKind, Gemm};
use narrows_plan::program::{Action, Extent, FusedOp, GemmRole, Instr, Phase, Program};
use narrows_plan::{Axis, Bytes, DType, DeviceGroup, Kernel};

use crate::measurements::{StepLinears, TrainingStep};

/// Prices the kernels of a published step that its plan does not have, or has otherwise.
pub(super) struct PublishedProgram<'a> {
    step: &'a TrainingStep,
    program: &'a Program,
    prices: &'a Prices,
    /// Time beyond that of the plan.
    added: Breakdown,
}

impl<'a> PublishedProgram<'a> {
    /// The time of the published program beyond that of the plan of `step`, which has one stage and no replicas.
    pub(super) fn added_time(
        step: &'a TrainingStep,
        program: &'a Program,
        prices: &'a Prices,
    ) -> Breakdown {
        let mut this = PublishedProgram { step, program, prices, added: Breakdown::default() };
        for stage in &program.stages {
            for at in stage.chunk_phases() {
                let times = match at.phase {
                    Phase::Step => 1.0,
                    _ => program.context.passes() as f64,
                };
                for instr in stage.instructions(at) {
                    this.count(instr, times);
                }
            }
        }
        this.added
    }

    /// Counts the kernels in place of an instruction.
    fn count(&mut self, instr: &Instr, times: f64) {
        match (&instr.action, instr.kernel(), self.step.accumulate_grad_in_fp32) {
            (Action::Gemm(op), Kernel::Gemm(gemm), _)
                if op.role == GemmRole::InputGradient
                    && op.accumulate
                    && self.step.linears == StepLinears::Separate =>
            {
                self.separate_input_gradient(&gemm, times);
            }
            (Action::Gemm(op), Kernel::Gemm(gemm), Some(in_fp32))
                if op.role == GemmRole::WeightGradient =>
            {
                self.weight_gradient(&gemm, in_fp32, times);
            }
            (Action::Fused(FusedOp::SquareSum), kernel, Some(in_fp32)) => {
                self.added.optimizer -= times * self.time_s(&kernel);
                let parameters = instr.reads.len().saturating_sub(1) as u64;
                let elements: u64 =
                    instr.reads.iter().map(|read| read.extent.rows * read.extent.columns).sum();
                let update = update(elements.saturating_sub(1), parameters, in_fp32);
                self.added.optimizer += times * self.time_s(&update);
            }
            (Action::Fused(FusedOp::AdamW), kernel, Some(_)) => {
                self.added.optimizer -= times * self.time_s(&kernel);
            }
            _ => {}
        }
    }

    /// The gradient of an input that other linears share: a GEMM that does not accumulate, a sum over the tensor axis, and an
    /// addition.
    fn separate_input_gradient(&mut self, gemm: &Gemm, times: f64) {
        let alone = Gemm { accumulate: false, ..gemm.clone() };
        self.replace_gemm(gemm, alone, times);
        let gradient = Extent { rows: gemm.m, columns: gemm.n * gemm.batch, dtype: gemm.output };
        let size = self.program.context.mesh.tensor;
        let group = DeviceGroup { axis: Axis::Tensor, size, stride: 1 };
        let sum = Collective { kind: CollectiveKind::AllReduce, payload: gradient.bytes(), group };
        self.added.collective_exposed += times * self.time_s(&Kernel::Collective(sum));
        self.added.elementwise += times * self.time_s(&addition(gradient, gradient));
    }

    /// The gradient of a weight: a GEMM with a 16-bit result, and its addition to those of other microbatches.
    fn weight_gradient(&mut self, gemm: &Gemm, in_fp32: bool, times: f64) {
        let result = Gemm { accumulate: false, output: gemm.input, ..gemm.clone() };
        self.replace_gemm(gemm, result, times);
        let of = |dtype| Extent { rows: gemm.m, columns: gemm.n * gemm.batch, dtype };
        let (sum, additions) = match in_fp32 {
            true => (of(DType::F32), times),
            false => (of(gemm.input), times - 1.0),
        };
        self.added.elementwise += additions * self.time_s(&addition(sum, of(gemm.input)));
    }

    fn replace_gemm(&mut self, planned: &Gemm, launched: Gemm, times: f64) {
        let [planned, launched] =
            [planned.clone(), launched].map(|gemm| self.time_s(&Kernel::Gemm(gemm)));
        self.added.gemm += times * (launched - planned);
    }

    fn time_s(&self, kernel: &Kernel) -> f64 {
        self.prices.kernel_time(kernel).0
    }
}

/// The addition of a tensor to a sum of the same shape.
fn addition(sum: Extent, added: Extent) -> Kernel {
    Action::Fused(FusedOp::Add).kernel(&[sum, added], &[sum])
}

/// The update of parameters with their norm and clip.
fn update(elements: u64, parameters: u64, in_fp32: bool) -> Kernel {
    let (bytes, launches) = if in_fp32 { (50, 3) } else { (20, 2) };
    let traffic = Bytes(bytes * elements);
    Kernel::Fused(FusedKernel {
        kind: FusedKind::Optimizer,
        traffic,
        unfused_traffic: traffic,
        unfused_launches: launches,
        parameters,
    })
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::{Executor, Profile, profile};
    use narrows_plan::model::presets;
    use narrows_plan::strategy::{Baseline, Rules};
    use narrows_plan::{CheckedProgram, PipelineSchedule, Workload};
    use narrows_planner::{GroupingRule, MemoryLimit, Request, search};

    use super::*;
    use crate::measurements::{MeasuredQuantity, shipped};

    const BLOCKS: f64 = 32.0;
    const TOKENS: u64 = 4096;
    const MICROBATCHES: u64 = 4;

    fn preset() -> Profile {
        profile::preset("a100-80gb").expect("a preset")
    }

    /// A step of LLaMA-7B with four microbatches of one sequence on four devices, and its plan.
    fn planned(linears: StepLinears) -> (TrainingStep, CheckedProgram, Prices) {
        let file = shipped().expect("measurements").remove(0);
        let mut steps = file.measurements.into_iter().filter_map(|it| match it.measured {
            MeasuredQuantity::Step(step) => Some(*step),
            _ => None,
        });
        let mut step = steps.next().expect("a step");
        step.workload = Workload { global_batch: 4, sequence_length: TOKENS, micro_batch: 1 };
        (step.linears, step.accumulate_grad_in_fp32) = (linears, None);
        let request = Request {
            tensor: Some(4),
            micro_batch: Some(1),
            schedule: Some(PipelineSchedule::OneForwardOneBackward),
            overlap_tensor_collectives: false,
            overlap_microbatch_pairs: false,
            rules: Rules { baseline: Baseline::FullrankTp, ..Rules::ALL },
            grouping: GroupingRule::Off,
            memory_limit: MemoryLimit::None,
            executor: Executor::Eager,
            ..Request::new(presets::find("llama-7b").expect("a model"), preset(), 4, 4, TOKENS)
        };
        let best = search(&request).best.expect("a plan");
        let prices = Prices::new(&preset(), Executor::Eager, &best.decisions.context.mesh);
        (step, best.program, prices)
    }

    fn added(step: &TrainingStep, program: &CheckedProgram, prices: &Prices) -> Breakdown {
        PublishedProgram::added_time(step, program.program(), prices)
    }

    #[test]
    fn a_step_that_states_nothing_has_the_time_of_its_plan() {
        let (step, program, prices) = planned(StepLinears::Any);
        assert_eq!(added(&step, &program, &prices), Breakdown::default());
    }

    /// Of q, k and v two more gradients of the input are summed than by a plan, of gate and up one.
    #[test]
    fn each_separate_linear_sums_the_gradient_of_its_input() {
        let (step, program, prices) = planned(StepLinears::Separate);
        let added = added(&step, &program, &prices);
        let group = DeviceGroup { axis: Axis::Tensor, size: 4, stride: 1 };
        let payload = Bytes(TOKENS * 4096 * 2);
        let sum = Collective { kind: CollectiveKind::AllReduce, payload, group };
        let sums = 3.0 * BLOCKS * MICROBATCHES as f64;
        let expected = sums * prices.kernel_time(&Kernel::Collective(sum)).0;
        assert!((added.collective_exposed / expected - 1.0).abs() < 1e-9, "{added:?}");
        assert!(added.elementwise > 0.0 && added.gemm < 0.0 && added.optimizer == 0.0, "{added:?}");
    }

    /// fp32 gradients take 4 more bytes of a weight in a microbatch after the first, 10 in the first, and 30 of a parameter in
    /// an update.
    #[test]
    fn gradients_in_16_bits_are_added_and_updated_faster() {
        let (mut step, program, prices) = planned(StepLinears::Any);
        let [in_fp32, in_16_bits] = [true, false].map(|in_fp32| {
            step.accumulate_grad_in_fp32 = Some(in_fp32);
            added(&step, &program, &prices)
        });
        let model = presets::find("llama-7b").expect("a model");
        let blocks: u64 =
            (0..model.blocks.len()).map(|layer| model.block_macs_per_token(layer)).sum();
        let weights = (blocks + model.vocab * model.hidden) as f64 / 4.0;
        let preset = preset();
        let file = preset.file();
        let bytes_per_s = file.device.memory_bandwidth_bytes_per_s * file.fused.efficiency;
        let bytes = |time_s: f64| time_s * bytes_per_s / weights;
        let passes = bytes(in_fp32.elementwise - in_16_bits.elementwise);
        let counted = 10.0 + 4.0 * (MICROBATCHES - 1) as f64;
        // Launches take time too: one more for each weight, and for each parameter.
        assert!((counted..counted + 2.0).contains(&passes), "{passes} bytes for {counted}");
        let update = bytes(in_fp32.optimizer - in_16_bits.optimizer);
        assert!((30.0..34.0).contains(&update), "{update} bytes");
        assert!(in_fp32.gemm == in_16_bits.gemm && in_fp32.gemm < 0.0, "{in_fp32:?}");
    }
}
