//! Exact steps of LORO on the factor pairs of a session, between two steps of the program.
//!
//! The program has updated the moments, and left the factors as they were. The factors of one block at a time and their
//! moments become whole tensors in host memory. Of several processes, those of a stage add what each holds, compute some
//! of the pairs each, and add the results; every element has one term that is not zero, so all have the same bits. The
//! new factors are stored as a checkpoint is.

use narrows_plan::Axis;
use narrows_plan::model::{ParameterId, WeightId};
use narrows_plan::program::{Buffer, CollectiveFunction, Reduction};
use rayon::prelude::*;

use super::coordinates::MeshCoordinates;
use super::model_program::{FactorPairSite, ModelProgram};
use super::tensors::{TensorKind, local_tensors_of, stage_of};
use super::{ModelTensors, Session};
use crate::error::RunError;
use crate::loro::{FactorRateScale, FactorStep, exact_step};
use crate::optimizer::{Optimizer, StepCoefficients};
use crate::process_group::{CollectiveOperands, Communicator, GroupScope, StorageUse};

/// The processes that hold parts of the same pairs: those of one stage.
struct PairOwners {
    /// Collectives with all of them, one axis after the other.
    communicators: Vec<Box<dyn Communicator>>,
    /// Index of this process among them.
    own_index: usize,
    /// Number of processes.
    count: usize,
}

impl ModelProgram {
    /// Checks that an optimizer can train this program.
    ///
    /// # Errors
    /// [`RunError::UnsupportedOptimizer`] for LORO on a model without factor pairs, on pairs whose latents are more than x·A,
    /// on ranks above a width, and where factors with different learning rates lie in one buffer.
    pub fn check_optimizer(&self, optimizer: &Optimizer) -> Result<(), RunError> {
        let Some(loro) = optimizer.loro else { return Ok(()) };
        let refused = |reason: String, hint: &'static str| {
            Err(RunError::UnsupportedOptimizer { reason, hint })
        };
        let pairs = self.pairs();
        if pairs.is_empty() {
            return refused("the model has no factor pairs".into(), "--optimizer adamw");
        }
        for FactorPairSite { block, kind, shape, has_plain_latent } in pairs.values().flatten() {
            let width = shape.d_in.min(shape.d_out);
            if !has_plain_latent {
                let reason = format!(
                    "layer {block} {kind} has an activation or a latent crossing between its factors: an exact step moves \
                     their product and chooses the factors anew, on which such a linear depends"
                );
                return refused(reason, "--optimizer adamw, or a model such as svd-60m");
            }
            if shape.rank > width {
                let rank = shape.rank;
                let reason = format!(
                    "layer {block} {kind} has rank {rank}, which is above its width {width}"
                );
                return refused(reason, "--optimizer adamw, or a model with smaller ranks");
            }
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
        let sites = self.pairs().get(&shard.block?)?;
        let mut factors = shard.members.iter().filter_map(|member| {
            let id = ParameterId { block: shard.block, weight: member.weight };
            let site = sites.iter().find(|site| site.a() == id || site.b() == id)?;
            Some((id, site.shape.rank))
        });
        let (first, rank) = factors.next()?;
        factors.find(|(_, other)| *other != rank).map(|(second, _)| [first, second])
    }
}

impl Session {
    /// Replaces all factor pairs by those after the exact step. All processes must call this method.
    ///
    /// # Errors
    /// A pair without a result, or a device or process that is lost.
    pub(super) fn exact_step(
        &mut self,
        coefficients: &StepCoefficients,
        step: u64,
    ) -> Result<(), RunError> {
        let program = self.program.clone();
        let owners = self.pair_owners();
        // Processes wait for the slowest one, and others for these, in collectives and between stages.
        let _waited_for = StorageUse::begin(self.process_group.clone());
        for (block, pairs) in program.pairs() {
            if self.has_factors_of(*block) {
                self.exact_step_of_block(pairs, &owners, (coefficients, step))?;
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

    fn exact_step_of_block(
        &mut self,
        pairs: &[FactorPairSite],
        owners: &PairOwners,
        (coefficients, step): (&StepCoefficients, u64),
    ) -> Result<(), RunError> {
        let [weights, first, second] =
            [TensorKind::Weights, TensorKind::FirstMoments, TensorKind::SecondMoments]
                .map(|kind| self.whole_factors(pairs, owners, kind));
        let (weights, first, second) = (weights?, first?, second?);
        let starts: Vec<usize> = pairs
            .iter()
            .scan(0, |next, pair| {
                *next += pair.shape.elements();
                Some(*next - pair.shape.elements())
            })
            .collect();
        let of_pair = |(index, pair): (usize, &FactorPairSite)| {
            if (index + pair.block as usize) % owners.count != owners.own_index {
                return Ok(vec![0.0; pair.shape.elements()]);
            }
            let factor = |start: usize, count: usize| {
                let elements = start..start + count;
                let moments = first[elements.clone()].iter().zip(&second[elements.clone()]);
                let direction =
                    |(m, v): (&f32, &f32)| coefficients.direction(f64::from(*m), f64::from(*v));
                FactorStep {
                    weights: weights[elements].iter().map(|x| f64::from(*x)).collect(),
                    direction: moments.map(direction).collect(),
                }
            };
            let in_a = pair.shape.d_in * pair.shape.rank;
            let a = factor(starts[index], in_a);
            let b = factor(starts[index] + in_a, pair.shape.elements() - in_a);
            let [a, b] =
                exact_step(pair.shape, &a, &b, coefficients.learning_rate).map_err(|fault| {
                    RunError::ExactStep {
                        step,
                        linear: format!("layer {} {}", pair.block, pair.kind),
                        fault,
                    }
                })?;
            Ok(a.into_iter().chain(b).map(|x| x as f32).collect())
        };
        let new: Result<Vec<Vec<f32>>, RunError> =
            pairs.par_iter().enumerate().map(of_pair).collect();
        let mut new = new?.concat();
        owners.sum(&mut new)?;
        let mut remaining = &new[..];
        let mut whole = ModelTensors::new();
        for pair in pairs {
            let (a, rest) = remaining.split_at(pair.shape.d_in * pair.shape.rank);
            let (b, rest) = rest.split_at(pair.shape.d_out * pair.shape.rank);
            whole.extend([(pair.a(), a.to_vec()), (pair.b(), b.to_vec())]);
            remaining = rest;
        }
        self.load_tensors(TensorKind::Weights, &whole)
    }

    /// The tensors of the factors of some pairs, A before B, one pair after the other.
    fn whole_factors(
        &self,
        pairs: &[FactorPairSite],
        owners: &PairOwners,
        kind: TensorKind,
    ) -> Result<Vec<f32>, RunError> {
        let block = pairs.first().map(|pair| pair.block);
        let is_factor = |buffer: &Buffer| holds_factors(buffer, block);
        let local = local_tensors_of(&self.program, &*self.engine, kind, is_factor)?;
        let mut whole = vec![];
        for pair in pairs {
            for (id, width) in [(pair.a(), pair.shape.d_in), (pair.b(), pair.shape.d_out)] {
                match local.get(&id) {
                    Some(elements) => whole.extend_from_slice(elements),
                    None => whole.resize(whole.len() + width * pair.shape.rank, 0.0),
                }
            }
        }
        owners.sum(&mut whole)?;
        Ok(whole)
    }

    fn has_factors_of(&self, block: u64) -> bool {
        self.devices().any(|device| {
            let mut buffers = stage_of(&self.program, device).buffers.iter();
            buffers.any(|buffer| holds_factors(buffer, Some(block)))
        })
    }

    fn pair_owners(&self) -> PairOwners {
        let alone = PairOwners { communicators: vec![], own_index: 0, count: 1 };
        let Some(group) = self.process_group() else { return alone };
        let mesh = self.program().context.mesh;
        let own = MeshCoordinates::of_device(group.rank(), &mesh);
        let axes = [Axis::Data, Axis::Tensor].into_iter().filter(|axis| mesh.axis_size(*axis) > 1);
        let communicators = axes.filter_map(|axis| {
            let members = own.members(&mesh.group(axis), &mesh)?;
            group.communicator(&members, GroupScope::Axis(axis))
        });
        PairOwners {
            communicators: communicators.collect(),
            own_index: own.pipeline_index(&mesh) as usize,
            count: (mesh.tensor * mesh.replicas()) as usize,
        }
    }
}

impl PairOwners {
    /// Adds the elements of all owners.
    fn sum(&self, elements: &mut [f32]) -> Result<(), RunError> {
        for communicator in &self.communicators {
            let function = CollectiveFunction::AllReduce(Reduction::Sum);
            communicator.run(CollectiveOperands::InPlace(elements), function)?;
        }
        Ok(())
    }
}

/// Whether a buffer holds factors of a block.
fn holds_factors(buffer: &Buffer, block: Option<u64>) -> bool {
    buffer.shard.as_ref().is_some_and(|shard| {
        shard.block == block
            && shard
                .members
                .iter()
                .any(|member| matches!(member.weight, WeightId::FactorA(_) | WeightId::FactorB(_)))
    })
}
