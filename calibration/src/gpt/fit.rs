//! The fit of a framework to steps that somebody measured.
//!
//! What is minimised is the sum, over steps within a node and steps across nodes, of the mean of
//! |ln(predicted / measured)|: both kinds count the same, however many there are of each. The search goes
//! along one number after the other with shrinking steps.

use std::collections::BTreeMap;
use std::rc::Rc;

use narrows_plan::Mesh;

use super::{Framework, StepCounts};
use crate::measurements::{TrainedModel, TrainingStep};
use narrows_cost_model::Profile;
use narrows_cost_model::interval::{Bootstrap, ResamplingUnit, bootstrap, each_alone};
use narrows_cost_model::profile::ProfileFile;

/// What is fitted: a framework, and the share that its collectives reach of the network's bandwidth.
pub type Coefficients = [f64; 9];

/// Their names.
pub const NAMES: [&str; 9] = [
    "operator_s",
    "idle_operators",
    "overlap",
    "pass_factor",
    "product_factor",
    "collective_factor",
    "step_s",
    "lockstep",
    "links.inter_node.efficiency",
];

/// Where every fit starts: what counting alone would say, and a host's guess.
pub const START: Coefficients = [70e-6, 2.0, 3.0, 1.0, 1.0, 1.0, 8e-3, 0.03, 0.85];

/// Where the network's share is.
const NETWORK: usize = 8;
/// The first step of a fit from [`START`].
const FIRST: f64 = 0.15;
/// The first step of a fit to a draw, from the fit to all.
const AGAIN: f64 = 0.08;
const LAST: f64 = 4e-3;

/// The framework among the numbers.
pub fn framework(numbers: &Coefficients) -> Framework {
    let [
        operator_s,
        idle_operators,
        overlap,
        pass_factor,
        product_factor,
        collective_factor,
        step_s,
        lockstep,
        _,
    ] = *numbers;
    Framework {
        operator_s,
        idle_operators,
        overlap,
        pass_factor,
        product_factor,
        collective_factor,
        step_s,
        lockstep,
    }
}

/// The numbers of a framework and a profile.
pub fn numbers(own: &Framework, profile: &Profile) -> Coefficients {
    [
        own.operator_s,
        own.idle_operators,
        own.overlap,
        own.pass_factor,
        own.product_factor,
        own.collective_factor,
        own.step_s,
        own.lockstep,
        profile.file().links.inter_node.efficiency,
    ]
}

/// A step that was measured.
pub struct StepRow<'a> {
    /// What ran.
    pub step: &'a TrainingStep,
    /// On which devices.
    pub mesh: Mesh,
    /// The hardware.
    pub profile: &'a Profile,
    /// How long it took.
    pub measured_s: f64,
}

impl StepRow<'_> {
    /// Whether its devices are those of more than one node.
    pub fn across(&self) -> bool {
        self.mesh.devices() > self.profile.devices_per_node()
    }

    fn counted(&self, network: f64) -> Option<Rc<StepCounts>> {
        StepCounts::of(self.step, self.mesh, &with_network(self.profile.file(), network))
            .map(Rc::new)
    }
}

/// A profile whose network reaches another share of its bandwidth.
pub(super) fn with_network(file: &ProfileFile, share: f64) -> ProfileFile {
    let mut file = file.clone();
    file.links.inter_node.efficiency = share.clamp(0.05, 1.0);
    file
}

/// Steps to fit to, counted once.
pub struct StepRows<'a> {
    rows: Vec<StepRow<'a>>,
    inside: Vec<Option<Rc<StepCounts>>>,
}

type RowWeights = Vec<Rc<StepCounts>>;

impl<'a> StepRows<'a> {
    /// Counts the rows; those that are no GPT's are left out.
    pub fn new(rows: Vec<StepRow<'a>>) -> StepRows<'a> {
        let rows: Vec<StepRow> =
            rows.into_iter().filter(|row| row.counted(1.0).is_some()).collect();
        let inside = rows.iter().map(|row| if row.across() { None } else { row.counted(1.0) });
        StepRows { inside: inside.collect(), rows }
    }

    /// The rows.
    pub fn rows(&self) -> &[StepRow<'a>] {
        &self.rows
    }

    /// Counts for a network; those that no network touches are shared.
    fn counts(&self, network: f64) -> RowWeights {
        let count = |(row, known): (&StepRow, &Option<Rc<StepCounts>>)| {
            known.clone().or_else(|| row.counted(network))
        };
        self.rows.iter().zip(&self.inside).filter_map(count).collect()
    }

    /// ln(measured / predicted) of every row.
    pub fn residuals(&self, numbers: &Coefficients) -> Vec<f64> {
        let counts = self.counts(numbers[NETWORK]);
        let own = framework(numbers);
        let residual =
            |(row, count): (&StepRow, &Rc<StepCounts>)| (row.measured_s / count.step_s(&own)).ln();
        self.rows.iter().zip(&counts).map(residual).collect()
    }

    fn loss(&self, numbers: &Coefficients, counts: &RowWeights, times: &[f64]) -> f64 {
        let own = framework(numbers);
        let mut sums = [(0.0, 0.0); 2];
        for ((row, count), times) in self.rows.iter().zip(counts).zip(times) {
            if *times > 0.0 {
                let (sum, many) = &mut sums[usize::from(row.across())];
                *sum += times * (row.measured_s / count.step_s(&own)).ln().abs();
                *many += times;
            }
        }
        sums.iter().map(|(sum, many)| sum / f64::max(*many, 1.0)).sum()
    }

    /// The fit to all rows.
    pub fn fit(&self) -> Coefficients {
        self.fit_to(&vec![1.0; self.rows.len()], START, FIRST)
    }

    /// The fit, with every row counted so many times.
    fn fit_to(&self, times: &[f64], start: Coefficients, mut step: f64) -> Coefficients {
        let (mut best, mut counts) = (start, self.counts(start[NETWORK]));
        let mut least = self.loss(&best, &counts, times);
        while step > LAST {
            let before = least;
            for index in 0..NAMES.len() {
                for factor in [1.0 + step, 1.0 / (1.0 + step)] {
                    let mut trial = best;
                    trial[index] *= factor;
                    let other = (index == NETWORK).then(|| self.counts(trial[NETWORK]));
                    let loss = self.loss(&trial, other.as_ref().unwrap_or(&counts), times);
                    if loss < least {
                        (best, least) = (trial, loss);
                        counts = other.unwrap_or(counts);
                    }
                }
            }
            if least > before * 0.9995 {
                step /= 1.8;
            }
        }
        best
    }

    /// Fits to draws of the rows, each from `fitted`; [`interval`](narrows_cost_model::interval) says what for.
    pub fn bootstrap(
        &self,
        drawn: HoldOut,
        fitted: Coefficients,
        draws: usize,
        seed: u64,
    ) -> Bootstrap<Coefficients> {
        let with_residuals = |numbers: Coefficients| (numbers, self.residuals(&numbers));
        let fit = |times: &[f64]| with_residuals(self.fit_to(times, fitted, AGAIN));
        let residual = |(_, residuals): &(Coefficients, Vec<f64>), row: usize| residuals[row];
        let own = with_residuals(fitted);
        let strata = match drawn {
            HoldOut::Rows => each_alone(self.rows.len()),
            HoldOut::Models => [false, true].map(|across| self.models(across)).to_vec(),
        };
        let Bootstrap { draws, residuals } = bootstrap(&strata, draws, seed, &own, fit, residual);
        Bootstrap { draws: draws.into_iter().map(|(numbers, _)| numbers).collect(), residuals }
    }

    /// The rows of each model, on one node or on several.
    fn models(&self, across: bool) -> Vec<ResamplingUnit> {
        let mut models: BTreeMap<_, ResamplingUnit> = BTreeMap::new();
        for (index, row) in self.rows.iter().enumerate().filter(|(_, row)| row.across() == across) {
            let TrainedModel::Gpt(gpt) = row.step.model else { continue };
            models.entry((gpt.hidden, gpt.layers, gpt.heads)).or_default().push(index);
        }
        models.into_values().collect()
    }
}

/// What a draw leaves out whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldOut {
    /// Rows: the next one is of a model that others of its rows were seen of.
    Rows,
    /// Models: the next row is of a model that nobody saw.
    Models,
}
