//! Conformance of backends: random plans must compute what the reference interpreter computes.
//!
//! A case is a small model and a random plan of its search space: a mesh with tensor, pipeline and data axis,
//! microbatches, with ZeRO-1 or without. It runs three batches: loss and gradients of the first, then two
//! optimizer steps, some with ignored targets; models whose latents are plain take the second as an exact step of LORO. Compared with the reference are the losses, every gradient, the norm of
//! all gradients, and the change of every weight, but for biases of keys in bf16. Before each step the batch is evaluated by the forward passes alone,
//! with the same bits of the loss. The reference computes in f64, with weights in the program's format: in f32, the norm
//! of three million gradients has an error of 2e-3.
//!
//! A backend takes part with a test that calls [`check_cases`] with its precision, all [`CASES`] and a function that
//! opens a [`Session`] (`runtime/cpu/tests/cpu.rs`). A backend whose devices are processes calls
//! [`check_session`](ConformanceCase::check_session) in every process (`runtime/cuda/tests/gpu/conformance.rs`).

use std::fmt;
use std::num::NonZeroU64;

use narrows_plan::model::{LinearKind, Model, ParameterId, WeightId};
use narrows_plan::{CheckedProgram, DType, Plan, Precision, lower};
use narrows_reference::{Batch, Matrix, Parameters, Reference};
use narrows_runtime::session::{ModelTensors, Session, StepInput, TensorKind};
use narrows_runtime::{
    CounterRng, DecayedWeights, FactorRateScale, IGNORED_TARGET, Loro, Optimizer, RunError,
    random_stream_name,
};

use crate::plans::{TestRng, draw_plan, to_json};
use crate::relative_errors::{
    keep_larger, relative_distance, relative_distance_beyond, relative_error,
};
use crate::small_models::{small_context, small_models};

/// Largest differences from the reference.
#[derive(Clone, Copy, Debug)]
struct DeviationLimits {
    /// Relative error of a loss.
    loss: f64,
    /// Error of a gradient, ‖actual − expected‖/‖expected‖; relative error of the norm of all gradients.
    gradient: f64,
    /// Error of the change of a weight over two steps, ‖actual − expected‖/‖expected‖.
    weight_change: f64,
    /// Number of elements of a weight that may change with the wrong sign, beyond the error above: one element
    /// is much of a gate with 16 elements.
    sign_flips: f64,
}

impl DeviationLimits {
    fn of(precision: Precision) -> DeviationLimits {
        match precision {
            // The order of summation differs. The first step of AdamW changes every element by about the
            // learning rate, whatever its gradient: where it is nearly zero, rounding decides the sign.
            Precision::Fp32 => {
                DeviationLimits { loss: 1e-5, gradient: 1e-5, weight_change: 1e-2, sign_flips: 0.0 }
            }
            // Every activation is rounded to 8 bits, with a relative error of 2⁻⁹ on average. A gradient
            // depends on some tens of independent roundings.
            Precision::MixedBf16 => {
                DeviationLimits { loss: 2e-3, gradient: 0.08, weight_change: 0.3, sign_flips: 2.0 }
            }
        }
    }
}

/// A model, and a plan for it.
pub struct ConformanceCase {
    pub model: Model,
    pub plan: Plan,
}

/// Seeds of weights and tokens.
const SEED: u64 = 5;
const STEPS: u64 = 2;
const LEARNING_RATE: f64 = 1e-3;

/// Number of cases that a backend must pass: one plan of every small model.
pub const CASES: usize = 19;

/// Cases of an unlimited list, by number.
pub fn cases(
    precision: Precision,
    numbers: impl IntoIterator<Item = usize>,
) -> impl Iterator<Item = ConformanceCase> {
    let small = small_models();
    numbers.into_iter().map(move |number| case(&small, number, precision))
}

/// Returns for each small model the first case of several sequences that needs at most `devices` devices. In bf16 the
/// rounding errors of eight tokens hardly average: losses of correct kernels are off by up to 2.5e-3, gradients by 9 %.
pub fn cases_on(precision: Precision, devices: u64) -> Vec<ConformanceCase> {
    let count = small_models().len();
    let first = |model| {
        let fits = |case: &ConformanceCase| {
            case.plan.mesh.devices() <= devices && case.plan.workload.global_batch > 1
        };
        cases(precision, (model..1000 * count).step_by(count)).find(fits)
    };
    (0..count).map(|model| first(model).expect("one in 16 is for one device")).collect()
}

/// The case with a number: its model is `number` modulo the number of small models.
fn case(small: &[Model], number: usize, precision: Precision) -> ConformanceCase {
    assert!(CASES >= small.len(), "{} models", small.len());
    let model = small[number % small.len()].clone();
    let mut rng = TestRng::new(100 + number as u64);
    let plan = (0..200).find_map(|_| {
        let context = small_context(&mut rng, precision);
        draw_plan(&mut rng, &model, context)
    });
    let plan = plan.unwrap_or_else(|| panic!("no plan of {} was drawn", model.name));
    ConformanceCase { model, plan }
}

/// Compares a backend with the reference in the cases with these numbers. `session` opens a session of a
/// program, with zero weights, gradients and moments; it returns `None` where this machine cannot run the
/// backend, and nothing is checked.
///
/// # Panics
/// At the first difference beyond the limits of the precision, and when the backend rejects a program.
#[track_caller]
pub fn check_cases(
    precision: Precision,
    numbers: impl IntoIterator<Item = usize>,
    mut session: impl FnMut(&Model, CheckedProgram) -> Option<Session>,
) {
    let (mut worst, mut count) = (Deviation::default(), 0);
    for case in cases(precision, numbers) {
        let program = lower(&case.plan.resolve(&case.model).expect("a drawn plan resolves"));
        let program = CheckedProgram::check(program).expect("a drawn plan passes the check");
        let Some(mut session) = session(&case.model, program) else { return };
        worst.join(case.check_session(&mut session));
        count += 1;
    }
    println!("{count} programs: {worst}");
}

/// Largest errors of a run, each with its parameter.
#[derive(Debug, Default)]
pub struct Deviation {
    loss: f64,
    gradient: (f64, String),
    weight_change: (f64, String),
}

impl fmt::Display for Deviation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (loss, gradient, weight_change) = (self.loss, self.gradient.0, self.weight_change.0);
        write!(
            f,
            "losses off by {loss:.1e}, gradients by {gradient:.1e}, weight changes by \
             {weight_change:.1e}"
        )
    }
}

impl Deviation {
    #[track_caller]
    fn assert_within(&self, limits: DeviationLimits, case: &ConformanceCase) {
        let of =
            || format!("of {} on {}\n{}", case.model.name, case.plan.mesh, to_json(&case.plan));
        assert!(self.loss <= limits.loss, "loss off by {:e} {}", self.loss, of());
        let (error, name) = &self.gradient;
        assert!(*error <= limits.gradient, "gradient of {name} off by {error:e} {}", of());
        let (error, name) = &self.weight_change;
        assert!(*error <= limits.weight_change, "change of {name} off by {error:e} {}", of());
    }

    /// Keeps the larger errors.
    pub fn join(&mut self, other: Deviation) {
        self.loss = self.loss.max(other.loss);
        keep_larger(&mut self.gradient, other.gradient);
        keep_larger(&mut self.weight_change, other.weight_change);
    }
}

impl ConformanceCase {
    /// Compares a session of this case's program with the reference. In a run of many processes all must call
    /// this method; losses are compared in every process, tensors in process 0.
    ///
    /// # Panics
    /// At the first difference beyond the limits of the precision, and when a step fails.
    #[track_caller]
    pub fn check_session(&self, session: &mut Session) -> Deviation {
        let limits = DeviationLimits::of(self.plan.precision);
        let deviation = self.run(session, limits.sign_flips);
        let deviation =
            deviation.unwrap_or_else(|error| panic!("{error}\n{}", to_json(&self.plan)));
        deviation.assert_within(limits, self);
        deviation
    }

    fn run(&self, session: &mut Session, sign_flips: f64) -> Result<Deviation, RunError> {
        let model = &self.model;
        let weights = self.weights();
        session.load_tensors(TensorKind::Weights, &weights)?;
        let parameters = Parameters::<f64>::from_fn(model, |parameter| {
            let (elements, columns) = (&weights[&parameter.id], parameter.columns as usize);
            move |row, column| f64::from(elements[row * columns + column])
        });
        let mut reference = Reference::new(model, parameters).expect("parameters of the model");
        let mut deviation = Deviation::default();

        let (tokens, targets) = self.tokens(0);
        let batch = self.batch(&tokens, &targets);
        let (loss, gradients) = reference.loss_and_gradients(&[batch]).expect("a batch");
        let actual_loss =
            session.compute_gradients(StepInput { tokens: &tokens, targets: &targets })?.loss;
        // An evaluation leaves the gradients as they are.
        session.evaluate(StepInput { tokens: &targets_as_inputs(&targets), targets: &targets })?;
        let actual = session.gather_tensors(TensorKind::Gradients)?;
        let is_rank_0 = session.devices().start == 0;
        deviation.loss = relative_error(actual_loss, loss);
        for (id, expected) in gradients.iter().filter(|_| is_rank_0) {
            let actual = actual[&id].iter().copied().map(f64::from);
            let error = relative_distance(actual, expected.elements());
            keep_larger(&mut deviation.gradient, (error, id.to_string()));
        }
        session.clear_gradients()?;

        let loro = loro_of(session);
        for step in 1..=STEPS {
            let decayed = if step == 1 { DecayedWeights::Matrices } else { DecayedWeights::All };
            let base = Optimizer::new(LEARNING_RATE, 0, 2 * STEPS);
            let optimizer = Optimizer { decayed, loro, ..base };
            let (tokens, targets) = self.tokens(step);
            let batch = self.batch(&tokens, &targets);
            let expected = reference.step(&optimizer, &[batch]).expect("a batch");
            let input = StepInput { tokens: &tokens, targets: &targets };
            let evaluated = session.evaluate(input)?;
            let actual = session.step(&optimizer, input)?;
            assert_eq!(evaluated.loss.to_bits(), actual.loss.to_bits(), "forward passes alone");
            deviation.loss = deviation.loss.max(relative_error(actual.loss, expected.loss));
            let norm = relative_error(actual.gradient_norm, expected.gradient_norm);
            keep_larger(&mut deviation.gradient, (norm, "all parameters".into()));
        }
        let actual = session.gather_tensors(TensorKind::Weights)?;
        for (id, after) in reference.parameters().iter().filter(|_| is_rank_0) {
            let before = weights[&id].iter().copied().map(f64::from);
            let expected = after.elements().iter().zip(before.clone());
            let expected: Vec<f64> = expected.map(|(to, from)| to - from).collect();
            let actual = actual[&id].iter().zip(before).map(|(to, from)| f64::from(*to) - from);
            // A step of AdamW changes an element by about ± the learning rate.
            let allowance = sign_flips * (2.0 * LEARNING_RATE * STEPS as f64).powi(2);
            let error = relative_distance_beyond(allowance, actual, &expected);
            if !self.is_decided_by_rounding(id) {
                keep_larger(&mut deviation.weight_change, (error, id.to_string()));
            }
        }
        Ok(deviation)
    }

    /// Whether rounding decides the signs of most elements of a gradient. A bias of keys has a gradient only because
    /// keys are rotated: without, it adds the same to all logits of a query. Where they rotate slowly, the terms of its
    /// gradient cancel, and what remains in bf16 is their rounding.
    fn is_decided_by_rounding(&self, id: ParameterId) -> bool {
        self.plan.precision == Precision::MixedBf16 && id.weight == WeightId::Bias(LinearKind::K)
    }

    /// Initial weights plus noise, so that none is 0 or 1, rounded to the program's format.
    fn weights(&self) -> ModelTensors {
        let compute = self.plan.precision.compute_dtype();
        let noisy = |(id, initial): (ParameterId, &Matrix<f32>)| {
            let noise = CounterRng::new(SEED, &format!("{} off", random_stream_name(id)));
            let elements = initial.elements().iter().zip(0..);
            let elements = elements.map(|(x, n)| x + 0.02 * noise.normal(n) as f32);
            (id, elements.map(|x| rounded(compute, x)).collect())
        };
        Parameters::<f32>::initial(&self.model, SEED).iter().map(noisy).collect()
    }

    /// Inputs and targets of a step. In all but step 1, a quarter of the targets is ignored.
    fn tokens(&self, step: u64) -> (Vec<u32>, Vec<u32>) {
        let work = self.plan.workload;
        let mut rng = TestRng::new(SEED + step);
        let count = work.global_batch * work.sequence_length;
        let mut ids = || -> Vec<u32> {
            (0..count).map(|_| rng.below(self.model.vocab as usize) as u32).collect()
        };
        let (tokens, mut targets) = (ids(), ids());
        if step != 1 {
            // At least one target is left.
            for target in &mut targets[1..] {
                if rng.below(4) == 0 {
                    *target = IGNORED_TARGET;
                }
            }
        }
        (tokens, targets)
    }

    fn batch<'a>(&self, tokens: &'a [u32], targets: &'a [u32]) -> Batch<'a> {
        let work = self.plan.workload;
        let (sequences, length) = (work.global_batch as usize, work.sequence_length as usize);
        Batch { tokens, targets, sequences, length }
    }
}

/// LORO with an exact second step where it can train the program.
fn loro_of(session: &Session) -> Option<Loro> {
    let exact_every = NonZeroU64::new(STEPS)?;
    [FactorRateScale::RankOverHidden, FactorRateScale::Constant(0.5)]
        .map(|rate_scale| Loro { exact_every, refresh_every: STEPS, rate_scale })
        .into_iter()
        .find(|loro| {
            let optimizer = Optimizer::new(LEARNING_RATE, 0, 2 * STEPS);
            session
                .model_program()
                .check_optimizer(&Optimizer { loro: Some(*loro), ..optimizer })
                .is_ok()
        })
}

/// Ids that are other inputs than those of the batch.
fn targets_as_inputs(targets: &[u32]) -> Vec<u32> {
    targets.iter().map(|target| if *target == IGNORED_TARGET { 0 } else { *target }).collect()
}

/// The nearest value of a format, ties to even.
fn rounded(format: DType, x: f32) -> f32 {
    let bits = x.to_bits();
    match format {
        DType::Bf16 => f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000),
        _ => x,
    }
}
