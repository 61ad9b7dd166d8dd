//! What every backend is held against: one list of programs, each of which must compute what the
//! reference interpreter does. What the processor backend passes, every other must pass.
//!
//! A case is a model and a plan drawn from its whole space: a mesh with tensor, pipeline and data axis,
//! microbatches, ZeRO or not. It is run in three steps: loss and gradients of a batch, then two steps
//! of the optimizer. Held against the reference are the losses, every gradient, the norm of all
//! gradients, and how far every weight has moved. The reference computes in f64 with the weights as the
//! program's format holds them: summed in f32, the norm of three million gradients is off by 2e-3.
//!
//! A backend joins by a test that calls [`check_cases`] with the precision it runs, all [`CASES`], and how it makes a
//! [`Session`] of a program: tests/cpu.rs is the smallest. One whose devices are processes, each with a session of
//! its own, takes a [`Case`] in each and calls [`check_session`](Case::check_session): `tests/gpu/conformance.rs` of the CUDA backend.

use std::fmt;

use narrows_plan::lower;
use narrows_plan::model::Model;
use narrows_plan::{CheckedProgram, DType, Plan, Precision};
use narrows_reference::{Batch, Matrix, Parameters, Reference};
use narrows_runtime::CounterRng;
use narrows_runtime::session::{NamedTensors, Session, StepInput, TensorKind};
use narrows_runtime::{Optimizer, RunError};

use crate::plans::{TestRng, draw_plan, to_json};
use crate::small::{small_context, small_models};

/// What a run may differ from the reference by.
#[derive(Clone, Copy, Debug)]
struct Tolerance {
    /// Of a loss, relative.
    loss: f64,
    /// Of a gradient: the norm of its difference over its norm. Of the norm of all, relative.
    gradient: f64,
    /// Of what two steps moved a weight by: the norm of its difference over its norm.
    movement: f64,
    /// Numbers of a weight that may go the other way besides: of a gate with 16 numbers one is much.
    sign_flips: f64,
}

impl Tolerance {
    fn of(precision: Precision) -> Tolerance {
        match precision {
            // Sums in another order. A first step of AdamW moves every number by as much, whatever its
            // gradient: one that is nearly zero in both may go either way.
            Precision::Full32 => {
                Tolerance { loss: 1e-5, gradient: 1e-5, movement: 1e-2, sign_flips: 0.0 }
            }
            // Every activation is rounded to 8 bits: a relative error of 2⁻⁹ on average, some tens of
            // times on the way of a gradient, at random.
            Precision::MixedBf16 => {
                Tolerance { loss: 2e-3, gradient: 0.08, movement: 0.3, sign_flips: 2.0 }
            }
        }
    }
}

/// A model, and a plan for it.
pub struct Case {
    pub model: Model,
    pub plan: Plan,
}

/// Seeds of weights and tokens.
const SEED: u64 = 5;
const STEPS: u64 = 2;
const LEARNING_RATE: f64 = 1e-3;

/// How many cases a backend must pass, of a list that has no end: a plan of every small model.
pub const CASES: usize = 19;

/// The cases of these numbers.
pub fn cases(
    precision: Precision,
    numbers: impl IntoIterator<Item = usize>,
) -> impl Iterator<Item = Case> {
    let small = small_models();
    numbers.into_iter().map(move |number| case(&small, number, precision))
}

/// For each small model the first case of the list that so many devices can run: where there are fewer than
/// [`CASES`] want, no model is left out.
pub fn cases_on(precision: Precision, devices: u64) -> Vec<Case> {
    let count = small_models().len();
    let first = |model| {
        let fits = |case: &Case| case.plan.mesh.devices() <= devices;
        cases(precision, (model..1000 * count).step_by(count)).find(fits)
    };
    (0..count).map(|model| first(model).expect("one in 16 is for one device")).collect()
}

/// A case of the list: small models take turns.
fn case(small: &[Model], number: usize, precision: Precision) -> Case {
    assert!(CASES >= small.len(), "{} models", small.len());
    let model = small[number % small.len()].clone();
    let mut dice = TestRng::new(100 + number as u64);
    let plan = (0..200).find_map(|_| {
        let context = small_context(&mut dice, precision);
        draw_plan(&mut dice, &model, context)
    });
    let plan = plan.unwrap_or_else(|| panic!("no plan of {} was drawn", model.name));
    Case { model, plan }
}

/// Holds a backend against the reference in the cases of these numbers. `session` makes a session of a program whose
/// weights, gradients and moments are zeros, or none where this machine cannot run the backend at all:
/// then nothing is held.
///
/// # Panics
/// At the first number that is further from the reference than the precision allows, and where the
/// backend refuses a program.
#[track_caller]
pub fn check_cases(
    precision: Precision,
    numbers: impl IntoIterator<Item = usize>,
    mut session: impl FnMut(&Model, CheckedProgram) -> Option<Session>,
) {
    let (mut worst, mut count) = (Deviation::default(), 0);
    for case in cases(precision, numbers) {
        let program = lower(&case.plan.resolve(&case.model).expect("a drawn plan resolves"));
        let program = CheckedProgram::check(program).expect("a drawn plan is sound");
        let Some(mut session) = session(&case.model, program) else { return };
        worst.join(case.check_session(&mut session));
        count += 1;
    }
    println!("{count} programs: {worst}");
}

/// How far a run is from the reference, with the parameter that is furthest.
#[derive(Debug, Default)]
pub struct Deviation {
    loss: f64,
    gradient: (f64, String),
    movement: (f64, String),
}

impl fmt::Display for Deviation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (loss, gradient, movement) = (self.loss, self.gradient.0, self.movement.0);
        write!(
            f,
            "losses off by {loss:.1e}, gradients by {gradient:.1e}, movements by {movement:.1e}"
        )
    }
}

impl Deviation {
    #[track_caller]
    fn assert_within(&self, tolerance: Tolerance, case: &Case) {
        let of =
            || format!("of {} on {}\n{}", case.model.name, case.plan.mesh, to_json(&case.plan));
        assert!(self.loss <= tolerance.loss, "loss off by {:e} {}", self.loss, of());
        let (error, name) = &self.gradient;
        assert!(*error <= tolerance.gradient, "gradient of {name} off by {error:e} {}", of());
        let (error, name) = &self.movement;
        assert!(*error <= tolerance.movement, "movement of {name} off by {error:e} {}", of());
    }

    /// Keeps the larger of both.
    pub fn join(&mut self, other: Deviation) {
        self.loss = self.loss.max(other.loss);
        keep_larger(&mut self.gradient, other.gradient);
        keep_larger(&mut self.movement, other.movement);
    }
}

/// Keeps the larger; what is not a number is larger than all.
fn keep_larger(worst: &mut (f64, String), other: (f64, String)) {
    if other.0 > worst.0 || other.0.is_nan() {
        *worst = other;
    }
}

impl Case {
    /// Holds a session of this case's program against the reference, and says how far it is from it. Where a session
    /// is one process of several, all call it; losses are held in each, tensors in process 0.
    ///
    /// # Panics
    /// At the first number that is further from the reference than the precision allows, and where the
    /// backend refuses.
    #[track_caller]
    pub fn check_session(&self, session: &mut Session) -> Deviation {
        let tolerance = Tolerance::of(self.plan.precision);
        let deviation = self.run(session, tolerance.sign_flips);
        let deviation =
            deviation.unwrap_or_else(|error| panic!("{error}\n{}", to_json(&self.plan)));
        deviation.assert_within(tolerance, self);
        deviation
    }

    fn run(&self, session: &mut Session, turned: f64) -> Result<Deviation, RunError> {
        let model = &self.model;
        let weights = self.weights();
        session.load_tensors(TensorKind::Weights, &weights)?;
        let parameters = Parameters::<f64>::from_fn(model, |parameter| {
            let (numbers, columns) = (&weights[&parameter.name], parameter.columns as usize);
            move |row, column| f64::from(numbers[row * columns + column])
        });
        let mut reference = Reference::new(model, parameters).expect("parameters of the model");
        let mut deviation = Deviation::default();

        let (tokens, targets) = self.tokens(0);
        let batch = self.batch(&tokens, &targets);
        let (loss, gradients) = reference.loss_and_gradients(&[batch]).expect("a batch");
        let done = session.compute_gradients(StepInput { tokens: &tokens, targets: &targets })?;
        let actual = session.gather_tensors(TensorKind::Gradients)?;
        let first = session.devices().start == 0;
        deviation.loss = relative_error(done.loss, loss);
        for (name, expected) in gradients.iter().filter(|_| first) {
            let actual = actual[name].iter().copied().map(f64::from);
            keep_larger(
                &mut deviation.gradient,
                (relative_distance(actual, expected.elements()), name.to_string()),
            );
        }
        session.clear_gradients()?;

        let optimizer = Optimizer::new(LEARNING_RATE, 0, 2 * STEPS);
        for step in 1..=STEPS {
            let (tokens, targets) = self.tokens(step);
            let batch = self.batch(&tokens, &targets);
            let expected = reference.step(&optimizer, &[batch]).expect("a batch");
            let actual =
                session.step(&optimizer, StepInput { tokens: &tokens, targets: &targets })?;
            deviation.loss = deviation.loss.max(relative_error(actual.loss, expected.loss));
            let norm = relative_error(actual.gradient_norm, expected.gradient_norm);
            keep_larger(&mut deviation.gradient, (norm, "all parameters together".into()));
        }
        let actual = session.gather_tensors(TensorKind::Weights)?;
        for (name, after) in reference.parameters().iter().filter(|_| first) {
            let before = weights[name].iter().copied().map(f64::from);
            let expected = after.elements().iter().zip(before.clone());
            let expected: Vec<f64> = expected.map(|(to, from)| to - from).collect();
            let actual = actual[name].iter().zip(before).map(|(to, from)| f64::from(*to) - from);
            // AdamW moves a number by about the learning rate a step, one way or the other.
            let turned = turned * (2.0 * LEARNING_RATE * STEPS as f64).powi(2);
            let actual = relative_distance_less(turned, actual, &expected);
            keep_larger(&mut deviation.movement, (actual, name.to_string()));
        }
        Ok(deviation)
    }

    /// Weights at which nothing is special, also where a run begins with ones and zeros, in the format
    /// that the program computes with.
    fn weights(&self) -> NamedTensors {
        let compute = self.plan.precision.compute_dtype();
        let noisy = |(name, of): (&str, &Matrix<f32>)| {
            let noise = CounterRng::new(SEED, &format!("{name} off"));
            let numbers = of.elements().iter().zip(0..);
            let numbers = numbers.map(|(x, n)| x + 0.02 * noise.normal(n) as f32);
            (name.to_string(), numbers.map(|x| rounded(compute, x)).collect())
        };
        Parameters::<f32>::initial(&self.model, SEED).iter().map(noisy).collect()
    }

    /// Inputs and targets of a step.
    fn tokens(&self, step: u64) -> (Vec<u32>, Vec<u32>) {
        let work = self.plan.workload;
        let mut dice = TestRng::new(SEED + step);
        let mut ids = || {
            let count = work.global_batch * work.sequence_length;
            (0..count).map(|_| dice.below(self.model.vocab as usize) as u32).collect()
        };
        (ids(), ids())
    }

    fn batch<'a>(&self, tokens: &'a [u32], targets: &'a [u32]) -> Batch<'a> {
        let work = self.plan.workload;
        let (sequences, length) = (work.global_batch as usize, work.sequence_length as usize);
        Batch { tokens, targets, sequences, length }
    }
}

/// The nearest number of a format, ties to even.
fn rounded(format: DType, x: f32) -> f32 {
    let bits = x.to_bits();
    match format {
        DType::Bf16 => f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000),
        _ => x,
    }
}

fn relative_error(actual: f64, expected: f64) -> f64 {
    let error = (actual - expected).abs() / expected.abs();
    // A comparison with NaN must fail.
    if error.is_nan() { f64::INFINITY } else { error }
}

/// ‖actual − expected‖/‖expected‖.
fn relative_distance(actual: impl Iterator<Item = f64>, expected: &[f64]) -> f64 {
    relative_distance_less(0.0, actual, expected)
}

/// The same, with so much taken deviation ‖actual − expected‖².
fn relative_distance_less(
    squared: f64,
    actual: impl Iterator<Item = f64>,
    expected: &[f64],
) -> f64 {
    let squares = |of: &mut dyn Iterator<Item = f64>| of.map(|x| x * x).sum::<f64>();
    let deviation = squares(&mut actual.zip(expected).map(|(actual, expected)| actual - expected));
    // Not `max`, which would hide what is not a number.
    let deviation = if deviation < squared { 0.0 } else { deviation - squared };
    (deviation / squares(&mut expected.iter().copied()).max(1e-24)).sqrt()
}
