//! Whole programs with every pass run by the CUDA kernels compute what the reference does.

use narrows_plan::lower::lower;
use narrows_plan::mesh::{Mesh, Workload};
use narrows_plan::model::Model;
use narrows_plan::strategy::{Context, Zero};
use narrows_plan::{CheckedProgram, Layout, Precision};
use narrows_runtime::reference::{Batch, Parameters, Reference};

use super::check_support::{Dice, describe, draw_plan, models};
use super::machine::{Machine, Whole};
use super::numbers::rounded;

/// How far a run is from the reference: of the loss, and of the gradients, each a parameter's
/// difference in norm over its norm.
struct Off {
    loss: f64,
    gradients: Vec<(f64, String)>,
    plan: String,
}

fn context(dice: &mut Dice, precision: Precision) -> Context {
    let mesh = Mesh { tensor: [1, 2, 4][dice.below(3)], pipeline: 1, data: 1 };
    let micro_batch = [1, 2, 4][dice.below(3)];
    let global_batch = micro_batch * (1 + dice.below(2) as u64);
    let workload = Workload { global_batch, sequence_length: 8, micro_batch };
    Context { mesh, workload, precision, zero: Zero::Off }
}

fn norm(of: impl Iterator<Item = f32>) -> f64 {
    of.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// `None` where no plan is drawn, or nothing compiles kernels for processors.
fn compare(model: &Model, context: Context, dice: &mut Dice) -> Option<Off> {
    let plan = draw_plan(dice, model, context)?;
    let program = CheckedProgram::check(lower(&plan.resolve(model).unwrap())).unwrap();
    let program = program.program();
    // The reference computes in f32 with the weights as the program's format holds them.
    let mut parameters = Parameters::<f32>::initial(model, 5);
    let names: Vec<String> = parameters.iter().map(|(name, _)| name.to_string()).collect();
    for name in names {
        let of = parameters.get_mut(&name).expect("a parameter").elements_mut();
        of.copy_from_slice(&rounded(context.compute(), of.to_vec()));
    }
    let weights: Whole =
        parameters.iter().map(|(name, of)| (name.to_string(), of.elements().to_vec())).collect();
    let work = context.workload;
    let count = work.global_batch * work.sequence_length;
    let mut ids = || (0..count).map(|_| dice.below(model.vocab as usize) as u32).collect();
    let (tokens, targets): (Vec<u32>, Vec<u32>) = (ids(), ids());
    let mut machine = Machine::new(program, &weights);
    machine.run(&tokens, &targets)?;

    let batch = Batch {
        tokens: &tokens,
        targets: &targets,
        sequences: work.global_batch as usize,
        length: work.sequence_length as usize,
    };
    let reference = Reference::new(model, parameters).unwrap();
    let (loss, wanted) = reference.loss_and_gradients(&[batch]).unwrap();
    let found = machine.gradients(&weights);
    let gradients = wanted.iter().map(|(name, wanted)| {
        let (found, wanted) = (&found[name], wanted.elements());
        let off = norm(found.iter().zip(wanted).map(|(a, b)| a - b));
        (off / norm(wanted.iter().copied()).max(1e-12), name.to_string())
    });
    // Where tokens are split, each device has the loss of its own.
    let devices = machine.losses.len() as f64;
    let sum: f64 = machine.losses.iter().map(|[loss]| loss).sum();
    let loss = f64::from(loss);
    let off = |found: f64| (found - loss).abs() / loss;
    let split = program.stages[0].buffers.iter().any(|buffer| {
        buffer.name == "targets" && buffer.extent.rows < context.rows(Layout::Replicated)
    });
    let loss = off(if split { sum } else { sum / devices });
    Some(Off { loss, gradients: gradients.collect(), plan: describe(&plan) })
}

fn check(precision: Precision, seed: u64, loss_max: f64, gradient_max: f64) {
    let models: Vec<Model> = models().into_iter().filter(|model| model.hidden == 256).collect();
    let mut dice = Dice(seed);
    let (mut loss, mut gradient, mut runs) = (0.0f64, 0.0f64, 0);
    for _ in 0..10 {
        let model = dice.pick(&models).unwrap().clone();
        let context = context(&mut dice, precision);
        let Some(off) = compare(&model, context, &mut dice) else { continue };
        runs += 1;
        assert!(off.loss <= loss_max, "loss {:e} of {}\n{}", off.loss, model.name, off.plan);
        loss = loss.max(off.loss);
        for (error, name) in off.gradients {
            let within = error <= gradient_max;
            assert!(within, "{name} {error:e} of {}\n{}", model.name, off.plan);
            gradient = gradient.max(error);
        }
    }
    println!("{runs} programs: loss off by {loss:e}, gradients by {gradient:e}");
}

/// As near as the processor backend.
#[test]
fn in_f32_they_are_the_reference() {
    check(Precision::Full32, 3, 1e-5, 1e-5);
}

/// Every activation is rounded to 8 bits: a relative error of 2⁻⁹ on average, some tens of times on the
/// way of a gradient, at random.
#[test]
fn in_bf16_they_are_near_the_reference() {
    check(Precision::MixedBf16, 4, 2e-3, 0.08);
}
