//! Proves a program before anything runs it: [`CheckedProgram`] is the only way to a simulation or
//! a run.
//!
//! A program is an object file that lowering wrote, and perhaps a bug or a careless edit since. The
//! check believes nothing but the program itself: it knows no plan and no model, and is simpler
//! than what it checks. It walks each stage once, in the order in which one microbatch runs, and
//! keeps for every buffer what it holds.
//!
//! # The lattice
//!
//! A buffer holds nothing (*unwritten*, *overwritten* by another buffer's bytes, or *expired*
//! because other microbatches ran since) or a matrix, of which is known:
//!
//! - its **meaning**: a value of the forward pass, a sum of contributions to the gradient of such a
//!   value, or zeros. Values are terms: equal operations on equal values are one value, so that
//!   redoing makes the same value again, and a reshard does not change it;
//! - its **sides**, rows (tokens; a weight's input features) and columns (features): the whole
//!   size, and whether the tensor axis cuts it, by features, by sequences or by positions;
//! - the **sum** owed over the tensor axis: none, summands, or candidates for a maximum. One axis
//!   leaves one mark: a matrix is cut on one side, or owed, or neither;
//! - whether a norm's division is **owed**, and by which statistic;
//! - whether it is **packed** for a collective, and its number format.
//!
//! # The transfer functions
//!
//! - *Products* contract sides of equal size and equal cut; cut contractions leave a sum owed, and
//!   a partial operand stays partial where nothing else is cut. `dW = Xᵀ·dY` contracts tokens: its
//!   sum is owed over the tensor axis where tokens are split, and over the data axis always.
//! - *Attention* has as many heads as its operands hold, whole or cut as they are; it refuses
//!   tokens cut by positions, and with whole keys and split queries leaves their gradients owed.
//! - *Passes* that are not linear refuse sums that are owed. A statistic over split features is
//!   partial; the online norm leaves its division owed; the latent that recovers it needs that
//!   statistic, whole.
//! - *Collectives* begin in the layout the operand has and end in the one they name. Adding up
//!   what is whole is refused, and so is a result that is overwritten before anything read it.
//! - *Backward*, an operation takes the complete gradient of its own output, the very inputs it
//!   had, and makes one contribution to the gradient of each input. Adding a contribution twice,
//!   adding gradients of different values or of different layouts is refused. A sum is complete
//!   when every use in the forward pass has contributed.
//! - *The step phase* (`step`) reduces every gradient over the axes it is owed on, counts its
//!   square once, updates its weight once, and gathers what ZeRO-1 parted.
//!
//! Places of buffers are checked in `memory`, shards of parameters in `shards`, the schedules
//! and all that stages do together in `schedule`.

mod attention;
mod collective;
mod error;
mod fused;
mod gemm;
mod lattice;
mod memory;
mod operands;
mod schedule;
mod sections;
mod shards;
mod stage;
mod step;
mod transfer;
mod values;
mod walk;

use crate::mesh::Axis;
use crate::program::{Phase, Program};

pub use error::{CheckError, CheckErrors};
use error::{CheckFault, fault};
use lattice::SymbolId;
use stage::StageChecker;
use values::ForwardOpKind;

/// A program that was proved: it can be simulated and run.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedProgram(Program);

impl CheckedProgram {
    /// Proves a program, from nothing but the program.
    ///
    /// # Errors
    /// The first few reasons why it may not run: what, where, why, and what to try.
    pub fn check(program: Program) -> Result<CheckedProgram, CheckErrors> {
        match check(&program) {
            errors if errors.0.is_empty() => Ok(CheckedProgram(program)),
            errors => Err(errors),
        }
    }

    /// The program.
    pub fn program(&self) -> &Program {
        &self.0
    }

    /// The program, no longer known to be proved once it is changed.
    pub fn into_inner(self) -> Program {
        self.0
    }
}

fn check(program: &Program) -> CheckErrors {
    let mut errors = CheckErrors::default();
    if let Err(fault) = check_context(program) {
        errors.of_all(fault);
        return errors;
    }
    let microbatches = program.context.workload.microbatches(&program.context.mesh);
    for (index, stage) in program.stages.iter().enumerate() {
        memory::check_places(index, stage, &mut errors);
        shards::check_shards(index, stage, &program.context, &mut errors);
        if let Err(fault) = schedule::check_passes(stage, microbatches) {
            errors.of_stage(index, fault);
        }
    }
    // The walk indexes by what was just checked.
    if !errors.0.is_empty() {
        return errors;
    }
    schedule::check_matched(program, &mut errors);
    if errors.0.is_empty() {
        schedule::check_progress(program, &mut errors);
    }
    schedule::check_pipeline_order(program, &mut errors);
    walk(program, &mut errors);
    errors
}

fn check_context(program: &Program) -> Result<(), CheckFault> {
    let context = &program.context;
    let (mesh, work) = (context.mesh, context.workload);
    let sizes = [mesh.tensor, mesh.pipeline, mesh.data, work.micro_batch, work.sequence_length];
    if sizes.into_iter().chain([work.global_batch]).any(|size| size == 0 || size > 1 << 24) {
        return fault(format!(
            "every size of the mesh {mesh} and of the workload must be between 1 and 16777216"
        ));
    }
    if !work.global_batch.is_multiple_of(mesh.data * work.micro_batch) {
        return fault(format!(
            "{} sequences do not divide into microbatches of {} on {} replicas",
            work.global_batch, work.micro_batch, mesh.data
        ));
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

/// Walks all stages: forward from the first, backward from the last, then the step phase.
fn walk(program: &Program, errors: &mut CheckErrors) {
    let mut stages: Vec<StageChecker> = program
        .stages
        .iter()
        .enumerate()
        .map(|(index, stage)| StageChecker::new(&program.context, stage, index, program.tied))
        .collect();
    let mut in_transfer = std::collections::VecDeque::new();
    for stage in &mut stages {
        stage.incoming = std::mem::take(&mut in_transfer);
        stage.walk(Phase::Forward, true);
        in_transfer = std::mem::take(&mut stage.outgoing);
    }
    in_transfer.clear();
    for stage in stages.iter_mut().rev() {
        stage.incoming = std::mem::take(&mut in_transfer);
        let back_to_back = schedule::back_to_back(stage.stage);
        stage.walk(Phase::Backward, back_to_back);
        in_transfer = std::mem::take(&mut stage.outgoing);
    }
    let last = stages.len() - 1;
    for (index, stage) in stages.iter_mut().enumerate() {
        if stage.errors.0.is_empty() {
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

/// The weight that embedding and head share, on a stage that holds it while another does too.
fn tied_weight(
    program: &Program,
    stage: &StageChecker,
    index: usize,
    last: usize,
) -> Option<SymbolId> {
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
