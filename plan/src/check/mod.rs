//! Checks a program before a simulation or a run: both need a [`CheckedProgram`].
//!
//! The check sees the program alone, without plan or model, and shares no code with lowering: its errors
//! are bugs of lowering or of edits. An abstract interpretation walks each stage once, in the order in
//! which one microbatch runs, and tracks the contents of every buffer.
//!
//! # The lattice
//!
//! A buffer has no readable contents (*unwritten*; *overwritten* by another buffer in the same bytes;
//! *expired*, because other microbatches ran since) or holds a matrix with these properties:
//!
//! - **value**: a value of the forward pass, a sum of contributions to the gradient of such a value, or
//!   zeros. Values are terms: equal operations on equal inputs give equal values. So a recomputed value
//!   equals the original, and a reshard does not change a value;
//! - **rows** (tokens; input features of a weight) and **columns** (features): the whole size, and
//!   whether the tensor axis shards the side, by features, sequences or positions;
//! - **part on the context axis**: a device's positions, all positions of a part of the features, all positions, or a
//!   summand of these;
//! - **pending reduction** over the tensor axis: none, a sum or a maximum. The axis either shards one
//!   side, or leaves the matrix partial, or replicates it;
//! - **pending norm**: the statistic of the norm whose division is still pending;
//! - **packing** for a collective, and number format.
//!
//! # The transfer functions
//!
//! - *GEMMs* contract sides of equal size and equal sharding. A sharded contraction gives a partial sum; a
//!   partial operand gives a partial result where nothing else is sharded. `dW = Xᵀ·dY` contracts tokens:
//!   the result is partial over the tensor axis where tokens are sharded, and always over the data axis.
//! - *Attention* needs whole heads, replicated or sharded, and refuses tokens sharded by positions. With sharded
//!   queries and replicated keys and values, the gradients of the latter are partial. On a context axis, queries of a
//!   device's positions need keys and values of all positions, whose gradients are partial over this axis.
//! - *Fused ops* that are not linear refuse partial operands. A statistic over sharded features is
//!   partial; the online norm leaves its division pending; the latent that divides needs the reduced
//!   statistic of the same norm.
//! - *Collectives* start from the layout of their operand. The reduction of a replicated tensor is
//!   refused, as is a result that is overwritten before it is read.
//! - In the *backward pass*, an operation reads the complete gradient of its output and the inputs of its
//!   forward pass, and adds one contribution to the gradient of each input. A gradient is complete when
//!   every use of the value has contributed.
//! - *Parameters of which each replica has a part* (ZeRO-2 and ZeRO-3) are gathered before a pass reads them. The complete
//!   gradient of a microbatch is reduce-scattered, and each replica adds its part to its sum, once.
//! - In the *step phase*, every gradient is reduced once over each axis on which it is partial, its square
//!   is counted once, its weight is updated once, and the parts of a whole weight are gathered.
//! - *Casts* round gradients for their reductions over the data axis, and for nothing else: these have operands in the
//!   format of the context, and all others in fp32. The GEMM that writes the whole gradient of a microbatch may round it too.
//!
//! # Where an error is found
//!
//! | error | file |
//! |---|---|
//! | a buffer outside the arena, two live buffers in the same bytes | `memory.rs` |
//! | shards that do not tile their parameter | `shards.rs` |
//! | a microbatch that does not run, a copy that another microbatch still needs | `passes.rs` |
//! | a deadlock, an unmatched transfer | `schedule.rs` |
//! | a gradient reduced while the last pass still adds to it | `buckets.rs` |
//! | a weight gathered while the first pass of the next step already reads it | `gathers.rs` |
//! | a read of unwritten, overwritten or expired contents | `stage.rs`, `read` |
//! | an activation reduced twice | `collective.rs`, `check_operand` |
//! | a gradient contribution added twice | `values.rs`, `ForwardGraph::sum` |
//! | a missing gradient contribution | `stage.rs`, `check_gradients` |
//! | a part read as a whole weight, an incomplete gradient reduced | `stage.rs`, `read`; `sharded_parameters.rs` |
//! | a weight gradient reduced twice | `step/collective.rs`, `reshard` |
//! | a weight gradient not reduced | `step/mod.rs`, `reduced_gradient` |
//! | a gradient rounded although it is not reduced in bf16, or not widened after it | `step/rounding.rs` |
//! | a weight updated twice, or not at all | `step/update.rs` |
//! | a factor pair decomposed before it is whole, twice, or not at all | `exact_step.rs` |

mod attention;
mod buckets;
mod collective;
mod error;
mod exact_step;
mod fused;
mod gathers;
mod gemm;
mod lattice;
mod memory;
mod operands;
mod overlap;
mod passes;
mod schedule;
mod sections;
mod sharded_parameters;
mod shards;
mod stage;
mod step;
mod transfer;
mod values;
mod walk;

use std::sync::Arc;

use crate::mesh::Axis;
use crate::program::{ChunkPhase, Phase, Program};

pub use error::{CheckError, CheckErrors};
use error::{CheckFault, fault};
pub use gemm::GEMM_SIZE_MAX;
use lattice::ForwardValueId;
use stage::StageChecker;
use values::ForwardOpKind;

/// A program that has passed the check, and may be simulated and run. Clones share the program.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedProgram(Arc<Program>);

impl CheckedProgram {
    /// Checks a program.
    ///
    /// # Errors
    /// The first errors, each with its place, the reason and, where possible, a hint.
    pub fn check(program: Program) -> Result<CheckedProgram, CheckErrors> {
        match check(&program) {
            errors if errors.0.is_empty() => Ok(CheckedProgram(Arc::new(program))),
            errors => Err(errors),
        }
    }

    /// The program.
    pub fn program(&self) -> &Program {
        &self.0
    }

    /// The program itself, which a caller may change.
    pub fn into_inner(self) -> Program {
        Arc::unwrap_or_clone(self.0)
    }
}

fn check(program: &Program) -> CheckErrors {
    let mut errors = CheckErrors::default();
    if let Err(fault) = check_context(program) {
        errors.push_program(fault);
        return errors;
    }
    for (index, stage) in program.stages.iter().enumerate() {
        memory::check_placement(index, stage, &program.context, &mut errors);
        shards::check_shards(index, stage, &program.context, &mut errors);
        if let Err(fault) = passes::check_passes(stage, &program.context) {
            errors.push_stage(index, fault);
        }
        passes::check_weight_gradient_pass(index, stage, &mut errors);
    }
    // The walk indexes by buffer and microbatch ids, which must be valid.
    if !errors.0.is_empty() {
        return errors;
    }
    for (index, stage) in program.stages.iter().enumerate() {
        for check in [buckets::check_buckets, gathers::check_gather_buckets] {
            if let Err(fault) = check(stage) {
                errors.push_stage(index, fault);
            }
        }
        overlap::check_overlaps(index, stage, &mut errors);
        if let Err(fault) = exact_step::check_exact_step(stage, &program.context) {
            errors.push_stage(index, fault);
        }
    }
    schedule::check_transfers_match(program, &mut errors);
    if errors.0.is_empty() {
        schedule::check_deadlock_free(program, &mut errors);
    }
    schedule::check_pipeline_order(program, &mut errors);
    walk(program, &mut errors);
    errors
}

fn check_context(program: &Program) -> Result<(), CheckFault> {
    let context = &program.context;
    let (mesh, work) = (context.mesh, context.workload);
    let sizes = [mesh.tensor, mesh.context, mesh.pipeline, mesh.data].into_iter().chain([
        work.micro_batch,
        work.sequence_length,
        work.global_batch,
    ]);
    if sizes.into_iter().any(|size| size == 0 || size > 1 << 24) {
        return fault(format!(
            "every size of the mesh {mesh} and of the workload must be between 1 and 16777216"
        ));
    }
    if let Some(problem) = work.indivisible_batch(&mesh) {
        return fault(problem);
    }
    if !work.microbatches(&mesh).is_multiple_of(context.pass_microbatches()) {
        return fault(format!(
            "{} microbatches of a replica do not divide into pairs",
            work.microbatches(&mesh)
        ));
    }
    let parts = context.context_attention.position_parts(&mesh);
    if !work.sequence_length.is_multiple_of(parts) {
        return fault(format!(
            "{} positions of a sequence do not divide into {parts} parts over {} devices of the context axis",
            work.sequence_length, mesh.context
        ));
    }
    let has_chunks = context.schedule.has_chunks();
    if context.chunks == 0 || context.chunks > 1 << 24 || (context.chunks > 1) != has_chunks {
        return fault(format!(
            "the {} schedule cannot have {} chunks per stage",
            context.schedule.name(),
            context.chunks
        ));
    }
    if !context.grad_reduce_dtype.suits(context.precision) {
        return fault("gradients cannot be reduced in bf16 where weights are fp32");
    }
    if program.stages.len() as u64 != mesh.pipeline {
        return fault(format!(
            "the program has {} stages, but the mesh has {}",
            program.stages.len(),
            mesh.pipeline
        ));
    }
    Ok(())
}

/// Walks all virtual stages: forward from the first, backward from the last with the weight-gradient passes; then the step
/// phase of each stage.
fn walk(program: &Program, errors: &mut CheckErrors) {
    let mut stages: Vec<StageChecker> = program
        .stages
        .iter()
        .enumerate()
        .map(|(index, stage)| StageChecker::new(&program.context, stage, index, program.tied))
        .collect();
    let mut in_transfer = std::collections::VecDeque::new();
    let context = &program.context;
    let virtual_stages = || (0..context.virtual_stages()).map(|at| context.stage_and_chunk(at));
    for (stage, chunk) in virtual_stages() {
        let stage = &mut stages[stage];
        stage.incoming = std::mem::take(&mut in_transfer);
        stage.walk(ChunkPhase { chunk, phase: Phase::Forward });
        in_transfer = std::mem::take(&mut stage.outgoing);
    }
    in_transfer.clear();
    for (stage, chunk) in virtual_stages().rev() {
        let stage = &mut stages[stage];
        stage.incoming = std::mem::take(&mut in_transfer);
        stage.walk(ChunkPhase { chunk, phase: Phase::Backward });
        in_transfer = std::mem::take(&mut stage.outgoing);
        stage.walk(ChunkPhase { chunk, phase: Phase::WeightGradient });
    }
    let last = stages.len() - 1;
    for (index, stage) in stages.iter_mut().enumerate() {
        if stage.errors.0.is_empty() {
            stage.check_microbatches();
            stage.check_gradients();
        }
        if stage.errors.0.is_empty() {
            let tied = tied_weight(program, stage, index, last);
            step::walk(stage, tied);
        }
        for error in std::mem::take(&mut stage.errors.0) {
            errors.push(error);
        }
    }
}

/// The weight of this stage that is tied to one on another stage, if any.
fn tied_weight(
    program: &Program,
    stage: &StageChecker,
    index: usize,
    last: usize,
) -> Option<ForwardValueId> {
    if !program.tied || program.context.axis_size(Axis::Pipeline) == 1 {
        return None;
    }
    if index == 0 {
        stage.weight_used_by(|kind| kind == ForwardOpKind::Gather)
    } else if index == last {
        stage.weight_of_logits()
    } else {
        None
    }
}
