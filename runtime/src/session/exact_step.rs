//! Exact steps of LORO: the instructions of hosts in a program, on the devices of this process.
//!
//! A process drives all devices of the mesh, or one. In the first case sums over groups have nothing to add, and the process
//! decomposes all pairs. In the second it adds what each process holds; every element has one term that is not zero, so that the
//! bits do not depend on the number of processes. New factors are stored as a checkpoint is.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use narrows_plan::DeviceGroup;
use narrows_plan::model::{ParameterId, WeightId};
use narrows_plan::program::{
    Buffer, BufferId, CollectiveFunction, HostAction, OwnedPair, Reduction,
};
use rayon::prelude::*;

use super::coordinates::MeshCoordinates;
use super::model_program::ModelProgram;
use super::tensors::{StateCopies, TensorKind, local_tensors_of, stage_of};
use super::{ModelTensors, Session};
use crate::error::RunError;
use crate::loro::{FactorRateScale, FactorStep, PairShape, exact_step};
use crate::optimizer::{Optimizer, StepCoefficients};
use crate::process_group::{CollectiveOperands, GroupScope, StorageUse};
use crate::report::DeviceId;

/// Host memory of a process.
#[derive(Default)]
struct HostMemory {
    /// Transfer of factors and directions: A of each pair, then its B, one pair after the other.
    factors: FactorTensors,
    /// Transfer of new factors, in the same order.
    placed: Vec<f32>,
    /// Own pairs, by their index in the stage.
    kept: BTreeMap<usize, FactorTensors>,
    /// New factors of own pairs, by their index in the stage.
    updates: BTreeMap<usize, Vec<f32>>,
}

/// Factors of pairs, and the directions in which AdamW would change them.
#[derive(Default)]
struct FactorTensors {
    weights: Vec<f32>,
    directions: Vec<f32>,
}

impl ModelProgram {
    /// Checks that an optimizer can train this program.
    ///
    /// # Errors
    /// [`RunError::UnsupportedOptimizer`] for LORO on a program without its exact steps, and where factors with different
    /// learning rates lie in one buffer.
    pub fn check_optimizer(&self, optimizer: &Optimizer) -> Result<(), RunError> {
        let Some(loro) = optimizer.loro else { return Ok(()) };
        let refused = |reason: String, hint: &'static str| {
            Err(RunError::UnsupportedOptimizer { reason, hint })
        };
        let hint = "a plan for this optimizer: `narrows plan --loro-every`";
        match self.program().context.loro_every {
            None => return refused("the program has no exact steps".into(), hint),
            Some(every) if every != loro.exact_every => {
                let wanted = loro.exact_every;
                let reason =
                    format!("the program has exact steps every {every} steps, not {wanted}");
                return refused(reason, hint);
            }
            Some(_) => {}
        }
        if loro.rate_scale == FactorRateScale::RankOverHidden {
            for buffer in self.program().stages.iter().flat_map(|stage| &stage.buffers) {
                if let Some([first, second]) = self.factors_of_different_ranks(buffer) {
                    let reason = format!(
                        "{first} and {second} have different ranks, and so learning rates, but one buffer, which has one"
                    );
                    let hint = "--grouping off, or a number for --loro-learning-rate-scale";
                    return refused(reason, hint);
                }
            }
        }
        Ok(())
    }

    /// Two factors of a buffer whose ranks differ, if there are any.
    fn factors_of_different_ranks(&self, buffer: &Buffer) -> Option<[ParameterId; 2]> {
        let shard = buffer.shard.as_ref()?;
        let mut factors = shard.members.iter().filter_map(|member| {
            let rank = match member.weight {
                WeightId::FactorA(_) => member.columns,
                WeightId::FactorB(_) => member.rows,
                _ => return None,
            };
            Some((ParameterId { block: shard.block, weight: member.weight }, rank))
        });
        let (first, rank) = factors.next()?;
        factors.find(|(_, other)| *other != rank).map(|(second, _)| [first, second])
    }
}

impl Session {
    /// Executes the exact step of the program. All processes must call this method.
    ///
    /// # Errors
    /// A pair without a result, or a device or process that is lost.
    pub(super) fn exact_step(
        &mut self,
        coefficients: &StepCoefficients,
        step: u64,
    ) -> Result<(), RunError> {
        let program = self.program.clone();
        // Processes wait for the slowest one, and others for these, in collectives and between stages.
        let _waited_for = StorageUse::begin(self.process_group.clone());
        let mesh = program.program().context.mesh;
        let own_stages: BTreeSet<usize> =
            self.devices().map(|device| DeviceId(device).stage(&mesh)).collect();
        for stage in own_stages {
            let exact_step = &program.program().stages[stage].exact_step;
            let mut memory = HostMemory::default();
            for instr in &exact_step.instrs {
                let pairs = exact_step.pairs_of(instr);
                match &instr.action {
                    HostAction::Read(buffers) => {
                        memory.factors = self.read_factors(stage, pairs, buffers, coefficients)?;
                    }
                    HostAction::SumFactors(group) => {
                        let FactorTensors { weights, directions } = &mut memory.factors;
                        self.sum(group, weights)?;
                        self.sum(group, directions)?;
                    }
                    HostAction::Keep => {
                        let FactorTensors { weights, directions } = &memory.factors;
                        for (index, range) in self.own_pairs(instr.pairs.start, pairs) {
                            let [weights, directions] =
                                [weights, directions].map(|tensor| tensor[range.clone()].to_vec());
                            memory.kept.insert(index, FactorTensors { weights, directions });
                        }
                    }
                    HostAction::Decompose => {
                        let kept = std::mem::take(&mut memory.kept);
                        memory.updates = decompose(&exact_step.pairs, kept, (coefficients, step))?;
                    }
                    HostAction::Place => {
                        memory.placed = vec![0.0; elements_of(pairs)];
                        for (index, range) in self.own_pairs(instr.pairs.start, pairs) {
                            if let Some(update) = memory.updates.remove(&index) {
                                memory.placed[range].copy_from_slice(&update);
                            }
                        }
                    }
                    HostAction::SumUpdates(group) => self.sum(group, &mut memory.placed)?,
                    HostAction::Write(_) => {
                        let whole = whole_factors(pairs, &memory.placed);
                        self.load_tensors(TensorKind::Weights, &whole)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Sets all moments to zero.
    ///
    /// # Errors
    /// When a device is lost.
    pub(super) fn clear_moments(&mut self) -> Result<(), RunError> {
        let program = self.program.clone();
        for device in self.engine.devices() {
            let stage = stage_of(&program, device);
            for kind in [TensorKind::FirstMoments, TensorKind::SecondMoments] {
                kind.buffers(stage)
                    .try_for_each(|buffer| self.engine.zero_buffer(device, buffer))?;
            }
        }
        Ok(())
    }

    /// Factors and directions in which AdamW would change them, as far as the devices of this process provide them.
    fn read_factors(
        &self,
        stage: usize,
        pairs: &[OwnedPair],
        buffers: &[BufferId],
        coefficients: &StepCoefficients,
    ) -> Result<FactorTensors, RunError> {
        let buffers: BTreeSet<BufferId> = buffers.iter().copied().collect();
        let is_read = |of_stage, buffer| of_stage == stage && buffers.contains(&buffer);
        let read = |kind| {
            let local =
                local_tensors_of(&self.program, &*self.engine, (kind, StateCopies::Each), is_read)?;
            let mut all = Vec::with_capacity(elements_of(pairs));
            for (id, elements) in pairs.iter().flat_map(factors_of) {
                match local.get(&id) {
                    Some(tensor) => all.extend_from_slice(tensor),
                    None => all.resize(all.len() + elements, 0.0),
                }
            }
            Ok::<Vec<f32>, RunError>(all)
        };
        let weights = read(TensorKind::Weights)?;
        let mut directions = read(TensorKind::FirstMoments)?;
        let second = read(TensorKind::SecondMoments)?;
        directions.par_iter_mut().zip(second).for_each(|(first, second)| {
            // Zero for the elements that other devices provide, whose moments are zero.
            if *first != 0.0 {
                *first = coefficients.direction(f64::from(*first), f64::from(second)) as f32;
            }
        });
        Ok(FactorTensors { weights, directions })
    }

    /// The pairs of consecutive ones, of which the first has this index, that devices of this process own: index and elements.
    fn own_pairs<'a>(
        &self,
        first: usize,
        pairs: &'a [OwnedPair],
    ) -> impl Iterator<Item = (usize, Range<usize>)> + use<'a> {
        let own_index = self.process_group().map(|group| {
            let mesh = self.program().context.mesh;
            MeshCoordinates::of_device(group.rank(), &mesh).pipeline_index(&mesh)
        });
        let starts = pairs.iter().scan(0, |next, pair| {
            *next += pair.elements() as usize;
            Some(*next - pair.elements() as usize)
        });
        let owned = move |(index, (pair, start)): (usize, (&OwnedPair, usize))| {
            let is_own = own_index.is_none_or(|own| own == pair.owner);
            is_own.then(|| (index, start..start + pair.elements() as usize))
        };
        (first..).zip(pairs.iter().zip(starts)).filter_map(owned)
    }

    /// Adds the elements of the processes of a group.
    fn sum(&self, group: &DeviceGroup, tensor: &mut [f32]) -> Result<(), RunError> {
        let Some(processes) = self.process_group() else { return Ok(()) };
        let mesh = self.program().context.mesh;
        let scope = match *group == mesh.group(group.axis) {
            true => GroupScope::Axis(group.axis),
            false => GroupScope::ShardGroup,
        };
        let own = MeshCoordinates::of_device(processes.rank(), &mesh);
        let members = own.members(group, &mesh);
        let communicator = members.and_then(|members| processes.communicator(&members, scope));
        let Some(communicator) = communicator else { return Ok(()) };
        let function = CollectiveFunction::AllReduce(Reduction::Sum);
        communicator.run(CollectiveOperands::InPlace(tensor), function)?;
        Ok(())
    }
}

/// The new factors of pairs of a stage, by their index.
fn decompose(
    pairs: &[OwnedPair],
    kept: BTreeMap<usize, FactorTensors>,
    (coefficients, step): (&StepCoefficients, u64),
) -> Result<BTreeMap<usize, Vec<f32>>, RunError> {
    let of_pair = |(index, pair): (usize, FactorTensors)| {
        let FactorTensors { weights, directions } = pair;
        let OwnedPair { block, linear, d_in, rank, d_out, .. } = pairs[index];
        let [d_in, rank, d_out] = [d_in, rank, d_out].map(|size| size as usize);
        let in_f64 = |elements: &[f32]| elements.iter().map(|x| f64::from(*x)).collect();
        let factor = |range: Range<usize>| FactorStep {
            weights: in_f64(&weights[range.clone()]),
            direction: in_f64(&directions[range]),
        };
        let (a, b) = (factor(0..d_in * rank), factor(d_in * rank..weights.len()));
        let shape = PairShape { d_in, rank, d_out };
        let [a, b] = exact_step(shape, &a, &b, coefficients.learning_rate).map_err(|fault| {
            RunError::ExactStep { step, linear: format!("layer {block} {linear}"), fault }
        })?;
        Ok((index, a.into_iter().chain(b).map(|x| x as f32).collect()))
    };
    kept.into_par_iter().map(of_pair).collect()
}

/// Elements of both factors of pairs.
fn elements_of(pairs: &[OwnedPair]) -> usize {
    pairs.iter().map(|pair| pair.elements() as usize).sum()
}

/// The factors of a pair with their elements: A and B.
fn factors_of(pair: &OwnedPair) -> [(ParameterId, usize); 2] {
    let id = |weight| ParameterId { block: Some(pair.block), weight };
    [
        (id(WeightId::FactorA(pair.linear)), (pair.d_in * pair.rank) as usize),
        (id(WeightId::FactorB(pair.linear)), (pair.rank * pair.d_out) as usize),
    ]
}

/// The factors of a transfer as tensors.
fn whole_factors(pairs: &[OwnedPair], mut elements: &[f32]) -> ModelTensors {
    let mut whole = ModelTensors::new();
    for (id, count) in pairs.iter().flat_map(factors_of) {
        let (factor, rest) = elements.split_at(count);
        whole.insert(id, factor.to_vec());
        elements = rest;
    }
    whole
}
