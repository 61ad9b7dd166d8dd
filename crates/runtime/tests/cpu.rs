//! Every plan of the search space computes the same function as the reference interpreter.

#[path = "../../plan/tests/check_support/mod.rs"]
mod check_support;

use check_support::{Dice, describe, draw_plan, models};
use narrows_plan::lower::lower;
use narrows_plan::mesh::{Mesh, Workload};
use narrows_plan::model::Model;
use narrows_plan::strategy::{Context, Zero};
use narrows_plan::{CheckedProgram, Precision};
use narrows_runtime::reference::{Batch, Parameters, Reference};
use narrows_runtime::session::{Session, StepInput, Tensors};

fn main_context(dice: &mut Dice, devices: u64) -> Context {
    let mesh = Mesh {
        tensor: devices,
        pipeline: 1 + dice.below(2) as u64,
        data: 1 + dice.below(2) as u64,
    };
    let micro_batch = [1, 2, 4][dice.below(3)];
    let microbatches = 1 + dice.below(2) as u64;
    let workload = Workload {
        global_batch: micro_batch * mesh.data * microbatches,
        sequence_length: 8,
        micro_batch,
    };
    let zero = [Zero::Off, Zero::One][dice.below(2)];
    Context { mesh, workload, precision: Precision::Full32, zero }
}

fn tokens(dice: &mut Dice, count: u64, vocab: u64) -> Vec<u32> {
    (0..count).map(|_| dice.below(vocab as usize) as u32).collect()
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt()
}

struct Difference {
    loss: f64,
    gradient: (f64, String),
}

fn compare(model: &Model, context: Context, dice: &mut Dice) -> Option<(Difference, String)> {
    let plan = draw_plan(dice, model, context)?;
    let resolved = plan.resolve(model).unwrap();
    let program = CheckedProgram::check(lower(&resolved)).unwrap();
    let mut session = Session::new(model, program, 1).unwrap();
    session.initialise(model, 5).unwrap();
    let work = context.workload;
    let count = work.global_batch * work.sequence_length;
    let (inputs, targets) = (tokens(dice, count, model.vocab), tokens(dice, count, model.vocab));
    let done = session
        .gradients_only(StepInput { tokens: &inputs, targets: &targets })
        .unwrap_or_else(|error| panic!("{error}\n{}", describe(&plan)));
    let reference = Reference::new(model, Parameters::<f32>::initial(model, 5)).unwrap();
    let batch = Batch {
        tokens: &inputs,
        targets: &targets,
        sequences: work.global_batch as usize,
        length: work.sequence_length as usize,
    };
    let (loss, gradients) = reference.loss_and_gradients(&[batch]).unwrap();
    let found = session.gather(Tensors::Gradients).unwrap();
    let mut worst = (0.0, String::new());
    for (name, wanted) in gradients.iter() {
        let wanted = wanted.elements();
        let found = found.get(name).unwrap_or_else(|| panic!("no gradient of {name}"));
        let off: Vec<f32> = found.iter().zip(wanted).map(|(a, b)| a - b).collect();
        let error = norm(&off) / norm(wanted).max(1e-12);
        if error > worst.0 || error.is_nan() {
            worst = (error, name.to_string());
        }
    }
    let loss = (done.loss - f64::from(loss)).abs() / f64::from(loss);
    Some((Difference { loss, gradient: worst }, describe(&plan)))
}

#[test]
fn drawn_plans_compute_what_the_reference_does() {
    let count: usize =
        std::env::var("NARROWS_CPU_PLANS").ok().and_then(|n| n.parse().ok()).unwrap_or(30);
    let models: Vec<Model> = models().into_iter().filter(|m| m.hidden == 256).collect();
    let mut dice = Dice(11);
    let (mut seen, mut worst) = (0, (0.0_f64, 0.0_f64));
    while seen < count {
        let model = dice.pick(&models).unwrap().clone();
        let devices = [1, 2, 4, 8][dice.below(4)];
        let context = main_context(&mut dice, devices);
        let Some((off, plan)) = compare(&model, context, &mut dice) else { continue };
        seen += 1;
        worst = (worst.0.max(off.loss), worst.1.max(off.gradient.0));
        assert!(off.loss < 1e-5, "loss {:e} of {}\n{plan}", off.loss, model.name);
        let (error, name) = &off.gradient;
        assert!(*error < 1e-5, "{name} {error:e} of {}\n{plan}", model.name);
    }
    println!("{seen} plans, loss off by {:e}, gradients by {:e}", worst.0, worst.1);
}
