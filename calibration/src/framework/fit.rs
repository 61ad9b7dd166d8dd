//! The fit of a framework to measured steps, and its uncertainty.
//!
//! Minimises the mean of |ln(predicted / measured)| over the steps within a node plus that over the steps across nodes,
//! by coordinate descent with shrinking steps. Both categories have the same weight whatever their numbers of steps.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use narrows_cost_model::Profile;
use narrows_cost_model::interval::thin_to_quantiles;
use narrows_cost_model::profile::Provenance;
use narrows_plan::Mesh;

use super::coefficients::{COEFFICIENT_NAMES, Coefficients, NETWORK, with_network_efficiency};
use super::interval::{BootstrapFit, IntervalModel, log_sizes, model_digest};
use super::model::{FrameworkModel, StepWork};
use crate::bootstrap::{Bootstrap, ResamplingUnit, bootstrap, independent_units};
use crate::coordinate_descent::CoordinateDescent;
use crate::measurements::{TrainedModel, TrainingStep};

/// More residuals than these are replaced by their quantiles.
const RESIDUALS_MAX: usize = 99;
/// Initial values of a fit: factors of 1 on the counted work, and an estimate of the host's time.
const START: Coefficients = [70e-6, 2.0, 1.0, 1.0, 8e-3, 0.03, 0.85];

/// Largest efficiency of the network: all-reduces of two to three nodes of eight A100s with four cards of 200 Gb/s reach
/// 86 to 96 of 100 GB/s (NVIDIA/nccl-tests, issues 119 and 175).
const NETWORK_EFFICIENCY_MAX: f64 = 0.96;

/// The relative step with which a fit from [`START`] begins.
const FIRST_STEP: f64 = 0.15;
/// The relative step with which the fit to a draw begins, starting at the fit to all rows.
const REFIT_STEP: f64 = 0.08;
/// A search ends below this step.
const LAST_STEP: f64 = 4e-3;
/// The step shrinks after a sweep that leaves more than this fraction of the loss.
const LOSS_RATIO_MIN: f64 = 0.9995;
/// Factor by which the step shrinks.
const STEP_SHRINKAGE: f64 = 1.8;

/// A measured step.
pub(crate) struct FrameworkStep<'a> {
    /// The step.
    pub step: &'a TrainingStep,
    /// The mesh that it ran on.
    pub mesh: Mesh,
    /// The hardware that it ran on.
    pub profile: &'a Profile,
    /// The measured step time in seconds.
    pub measured_s: f64,
}

impl FrameworkStep<'_> {
    /// Whether the mesh spans several nodes.
    pub fn crosses_nodes(&self) -> bool {
        self.mesh.devices() > self.profile.devices_per_node()
    }

    fn work(&self, network_efficiency: f64) -> Option<Rc<StepWork>> {
        let file = with_network_efficiency(self.profile.file(), network_efficiency);
        StepWork::from_file(self.step, self.mesh, &file).map(Rc::new)
    }
}

/// Measured steps to fit coefficients to.
pub(crate) struct StepRows<'a> {
    rows: Vec<FrameworkStep<'a>>,
    /// The work of the rows within a node, which does not depend on coefficients.
    within_node: Vec<Option<Rc<StepWork>>>,
}

/// Coefficients, and the work of all rows at their network efficiency.
#[derive(Clone)]
struct FitPoint {
    coefficients: Coefficients,
    work: Vec<Rc<StepWork>>,
}

impl<'a> StepRows<'a> {
    /// Counts the work of rows. Rows whose model is not a GPT are dropped.
    pub fn new(rows: Vec<FrameworkStep<'a>>) -> StepRows<'a> {
        let rows: Vec<FrameworkStep> =
            rows.into_iter().filter(|row| row.work(1.0).is_some()).collect();
        let within_node =
            rows.iter().map(|row| if row.crosses_nodes() { None } else { row.work(1.0) });
        StepRows { within_node: within_node.collect(), rows }
    }

    /// The rows.
    pub fn rows(&self) -> &[FrameworkStep<'a>] {
        &self.rows
    }

    /// The work of all rows at a network efficiency. The work of rows within a node is shared.
    fn work(&self, network_efficiency: f64) -> Vec<Rc<StepWork>> {
        let work = |(row, within_node): (&FrameworkStep, &Option<Rc<StepWork>>)| {
            within_node.clone().or_else(|| row.work(network_efficiency))
        };
        self.rows.iter().zip(&self.within_node).filter_map(work).collect()
    }

    /// ln(measured / predicted) of every row.
    pub fn residuals(&self, coefficients: &Coefficients) -> Vec<f64> {
        let work = self.work(coefficients[NETWORK]);
        let framework = FrameworkModel::from_coefficients(coefficients);
        let residual = |(row, work): (&FrameworkStep, &Rc<StepWork>)| {
            (row.measured_s / work.step_time_s(&framework)).ln()
        };
        self.rows.iter().zip(&work).map(residual).collect()
    }

    fn loss(&self, point: &FitPoint, counts: &[f64]) -> f64 {
        let framework = FrameworkModel::from_coefficients(&point.coefficients);
        let mut sums = [(0.0, 0.0); 2];
        for ((row, work), count) in self.rows.iter().zip(&point.work).zip(counts) {
            if *count > 0.0 {
                let (sum, rows) = &mut sums[usize::from(row.crosses_nodes())];
                *sum += count * (row.measured_s / work.step_time_s(&framework)).ln().abs();
                *rows += count;
            }
        }
        sums.iter().map(|(sum, rows)| sum / f64::max(*rows, 1.0)).sum()
    }

    /// The fit to all rows.
    pub fn fit(&self) -> Coefficients {
        self.fit_from(START, FIRST_STEP, &vec![1.0; self.rows.len()])
    }

    /// The fit from `start`, in which row i counts `counts[i]` times.
    fn fit_from(&self, start: Coefficients, mut step: f64, counts: &[f64]) -> Coefficients {
        let start = FitPoint { coefficients: start, work: self.work(start[NETWORK]) };
        let loss = |point: &FitPoint| self.loss(point, counts);
        let scale = |point: &mut FitPoint, index: usize, factor: f64| {
            point.coefficients[index] *= factor;
            if index == NETWORK {
                let efficiency = &mut point.coefficients[NETWORK];
                *efficiency = efficiency.min(NETWORK_EFFICIENCY_MAX);
                point.work = self.work(*efficiency);
            }
        };
        let mut search = CoordinateDescent::new(start, loss);
        while step > LAST_STEP {
            let before = search.loss;
            let factors = [1.0 + step, 1.0 / (1.0 + step)];
            search.sweep(COEFFICIENT_NAMES.len(), factors, 1, scale, loss);
            if search.loss > before * LOSS_RATIO_MIN {
                step /= STEP_SHRINKAGE;
            }
        }
        search.best.coefficients
    }

    /// Bootstrap of the rows: fits to draws, each starting at `fitted`, and residuals of the rows that a draw left out.
    pub fn bootstrap(
        &self,
        hold_out: HoldOut,
        fitted: Coefficients,
        draws: usize,
        seed: u64,
    ) -> Bootstrap<Coefficients> {
        let with_residuals = |fit: Coefficients| (fit, self.residuals(&fit));
        let fit = |counts: &[f64]| with_residuals(self.fit_from(fitted, REFIT_STEP, counts));
        let residual = |(_, residuals): &(Coefficients, Vec<f64>), row: usize| residuals[row];
        let fitted = with_residuals(fitted);
        let strata = match hold_out {
            HoldOut::Rows => independent_units(self.rows.len()),
            HoldOut::Models => [false, true].map(|across| self.models(across)).to_vec(),
        };
        let Bootstrap { draws, residuals } =
            bootstrap(&strata, draws, seed, &fitted, fit, residual);
        Bootstrap { draws: draws.into_iter().map(|(fit, _)| fit).collect(), residuals }
    }

    /// The rows of each model, within a node or across nodes.
    fn models(&self, across: bool) -> Vec<ResamplingUnit> {
        let mut models: BTreeMap<_, ResamplingUnit> = BTreeMap::new();
        for (index, row) in self.rows.iter().enumerate() {
            if row.crosses_nodes() != across {
                continue;
            }
            let TrainedModel::Gpt(gpt) = row.step.model else { continue };
            models.entry((gpt.hidden, gpt.layers, gpt.heads)).or_default().push(index);
        }
        models.into_values().collect()
    }
}

/// Resampling unit of a bootstrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HoldOut {
    /// Single rows, for predictions of measured models.
    Rows,
    /// All rows of a model, for predictions of unseen models.
    Models,
}

impl BootstrapFit {
    fn of(
        rows: &StepRows,
        fitted: &Coefficients,
        bootstrap: &Bootstrap<Coefficients>,
    ) -> BootstrapFit {
        let ratios = |draw: &Coefficients| std::array::from_fn(|index| draw[index] / fitted[index]);
        let residuals = |across: bool| {
            let residuals = bootstrap.residuals.iter();
            let own = residuals.filter(|(row, _)| rows.rows()[*row].crosses_nodes() == across);
            thin_to_quantiles(own.map(|(_, residual)| *residual).collect(), RESIDUALS_MAX)
        };
        BootstrapFit {
            draws: bootstrap.draws.iter().map(ratios).collect(),
            within_a_node: residuals(false),
            across_nodes: residuals(true),
        }
    }
}

impl IntervalModel {
    /// The uncertainty of `fitted`, from the rows of the fit and their bootstraps by row and by model.
    pub fn of(
        rows: &StepRows,
        fitted: &Coefficients,
        by_row: &Bootstrap<Coefficients>,
        by_model: &Bootstrap<Coefficients>,
        provenance: Provenance,
    ) -> IntervalModel {
        let mut log_size_ranges = vec![[f64::INFINITY, f64::NEG_INFINITY]; 7];
        let (mut hardware, mut models) = (BTreeSet::new(), [BTreeSet::new(), BTreeSet::new()]);
        let mut recomputed = [vec![], vec![]];
        for row in rows.rows() {
            let sizes = log_sizes(row.step, row.mesh).into_iter().flatten();
            for (range, size) in log_size_ranges.iter_mut().zip(sizes) {
                *range = [range[0].min(size), range[1].max(size)];
            }
            if let TrainedModel::Gpt(gpt) = &row.step.model {
                models[usize::from(row.crosses_nodes())].insert(model_digest(gpt));
            }
            let recomputed = &mut recomputed[usize::from(row.crosses_nodes())];
            if !recomputed.contains(&row.step.recompute) {
                recomputed.push(row.step.recompute);
            }
            hardware.insert(row.profile.name().to_owned());
        }
        let [recomputed_within_a_node, recomputed_across_nodes] = recomputed;
        let [models_within_a_node, models_across_nodes] = models;
        IntervalModel {
            provenance,
            hardware,
            models_within_a_node,
            models_across_nodes,
            recomputed_within_a_node,
            recomputed_across_nodes,
            by_row: BootstrapFit::of(rows, fitted, by_row),
            by_model: BootstrapFit::of(rows, fitted, by_model),
            log_size_ranges,
        }
    }
}
