//! The fit of a framework to measured steps.
//!
//! Minimises the sum, over steps within a node and steps across nodes, of the mean of |ln(predicted / measured)|: both
//! kinds have the same weight, however many steps there are of each. The search is a coordinate descent with shrinking
//! steps.

use std::collections::BTreeMap;
use std::rc::Rc;

use narrows_cost_model::Profile;
use narrows_cost_model::profile::ProfileFile;
use narrows_plan::Mesh;

use super::model::{Framework, StepWork};
use crate::bootstrap::{Bootstrap, ResamplingUnit, bootstrap, independent_units};
use crate::coordinate_descent::CoordinateDescent;
use crate::measurements::{TrainedModel, TrainingStep};

/// The fitted numbers, in the order of [`COEFFICIENT_NAMES`]: those of a framework, and the fraction of the network's
/// bandwidth that collectives reach.
pub type Coefficients = [f64; 9];

/// The names of [`Coefficients`].
pub const COEFFICIENT_NAMES: [&str; 9] = [
    "operator_s",
    "idle_operators",
    "overlap",
    "elementwise_factor",
    "gemm_factor",
    "collective_factor",
    "fixed_s",
    "lockstep",
    "links.inter_node.efficiency",
];

/// Where every fit starts: counted work alone, and a guess of the host.
const START: Coefficients = [70e-6, 2.0, 3.0, 1.0, 1.0, 1.0, 8e-3, 0.03, 0.85];

/// The index of the network's efficiency.
pub(super) const NETWORK: usize = 8;
/// The relative step with which a fit from [`START`] begins.
const FIRST_STEP: f64 = 0.15;
/// The relative step with which the fit to a draw begins, from the fit to all rows.
const REFIT_STEP: f64 = 0.08;
/// A search ends below this step.
const LAST_STEP: f64 = 4e-3;
/// A sweep that reduces the loss by less than this fraction makes the step smaller
const LEAST_GAIN: f64 = 0.9995;
/// by this factor.
const STEP_SHRINKAGE: f64 = 1.8;

impl Framework {
    /// The framework among fitted coefficients.
    pub fn from_coefficients(coefficients: &Coefficients) -> Framework {
        let [
            operator_s,
            idle_operators,
            overlap,
            elementwise_factor,
            gemm_factor,
            collective_factor,
            fixed_s,
            lockstep,
            _,
        ] = *coefficients;
        Framework {
            operator_s,
            idle_operators,
            overlap,
            elementwise_factor,
            gemm_factor,
            collective_factor,
            fixed_s,
            lockstep,
        }
    }

    /// The coefficients of this framework on a profile.
    pub fn coefficients(&self, profile: &Profile) -> Coefficients {
        [
            self.operator_s,
            self.idle_operators,
            self.overlap,
            self.elementwise_factor,
            self.gemm_factor,
            self.collective_factor,
            self.fixed_s,
            self.lockstep,
            profile.file().links.inter_node.efficiency,
        ]
    }
}

/// A measured step.
pub struct StepRow<'a> {
    /// The step.
    pub step: &'a TrainingStep,
    /// Its devices.
    pub mesh: Mesh,
    /// Their hardware.
    pub profile: &'a Profile,
    /// Its time in seconds.
    pub measured_s: f64,
}

impl StepRow<'_> {
    /// Whether its devices lie in more than one node.
    pub fn crosses_nodes(&self) -> bool {
        self.mesh.devices() > self.profile.devices_per_node()
    }

    fn work(&self, network_efficiency: f64) -> Option<Rc<StepWork>> {
        let file = with_network_efficiency(self.profile.file(), network_efficiency);
        StepWork::from_file(self.step, self.mesh, &file).map(Rc::new)
    }
}

/// A profile whose network reaches another fraction of its bandwidth.
pub(super) fn with_network_efficiency(file: &ProfileFile, efficiency: f64) -> ProfileFile {
    let mut file = file.clone();
    file.links.inter_node.efficiency = efficiency.clamp(0.05, 1.0);
    file
}

/// Steps to fit to, with the work of those within a node.
pub struct StepRows<'a> {
    rows: Vec<StepRow<'a>>,
    within_node: Vec<Option<Rc<StepWork>>>,
}

/// Coefficients, and the work of all rows on a network of their efficiency.
#[derive(Clone)]
struct FitPoint {
    coefficients: Coefficients,
    work: Vec<Rc<StepWork>>,
}

impl<'a> StepRows<'a> {
    /// Counts the work of rows; those whose model is not a GPT are left out.
    pub fn new(rows: Vec<StepRow<'a>>) -> StepRows<'a> {
        let rows: Vec<StepRow> = rows.into_iter().filter(|row| row.work(1.0).is_some()).collect();
        let within_node =
            rows.iter().map(|row| if row.crosses_nodes() { None } else { row.work(1.0) });
        StepRows { within_node: within_node.collect(), rows }
    }

    /// The rows.
    pub fn rows(&self) -> &[StepRow<'a>] {
        &self.rows
    }

    /// The work of all rows on a network of this efficiency; that of rows within a node is shared.
    fn work(&self, network_efficiency: f64) -> Vec<Rc<StepWork>> {
        let work = |(row, within_node): (&StepRow, &Option<Rc<StepWork>>)| {
            within_node.clone().or_else(|| row.work(network_efficiency))
        };
        self.rows.iter().zip(&self.within_node).filter_map(work).collect()
    }

    /// ln(measured / predicted) of every row.
    pub fn residuals(&self, coefficients: &Coefficients) -> Vec<f64> {
        let work = self.work(coefficients[NETWORK]);
        let framework = Framework::from_coefficients(coefficients);
        let residual = |(row, work): (&StepRow, &Rc<StepWork>)| {
            (row.measured_s / work.step_time_s(&framework)).ln()
        };
        self.rows.iter().zip(&work).map(residual).collect()
    }

    fn loss(&self, point: &FitPoint, counts: &[f64]) -> f64 {
        let framework = Framework::from_coefficients(&point.coefficients);
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

    /// The fit from `start`, with every row counted so many times.
    fn fit_from(&self, start: Coefficients, mut step: f64, counts: &[f64]) -> Coefficients {
        let start = FitPoint { coefficients: start, work: self.work(start[NETWORK]) };
        let loss = |point: &FitPoint| self.loss(point, counts);
        let scale = |point: &mut FitPoint, index: usize, factor: f64| {
            point.coefficients[index] *= factor;
            if index == NETWORK {
                point.work = self.work(point.coefficients[NETWORK]);
            }
        };
        let mut search = CoordinateDescent::new(start, loss);
        while step > LAST_STEP {
            let before = search.loss;
            let factors = [1.0 + step, 1.0 / (1.0 + step)];
            search.sweep(COEFFICIENT_NAMES.len(), factors, 1, scale, loss);
            if search.loss > before * LEAST_GAIN {
                step /= STEP_SHRINKAGE;
            }
        }
        search.best.coefficients
    }

    /// Bootstrap of the rows: fits to draws of them, each from `fitted`, and residuals of the rows that a draw left
    /// out.
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

/// What a bootstrap draw leaves out whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldOut {
    /// Single rows: the next row is of a model of which other rows were measured.
    Rows,
    /// All rows of a model: the next row is of an unseen model.
    Models,
}
