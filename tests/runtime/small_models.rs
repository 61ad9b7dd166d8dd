//! Small models, plans and sessions for them, and errors of tensors.

use narrows_cost_model::{Profile, profile};
use narrows_plan::model::{self, Model};
use narrows_plan::strategy::Baseline;
use narrows_plan::{CheckedProgram, Mesh, Plan, Zero, lower};
use narrows_planner::{Request, search};
use narrows_reference::{Batch, Float, Parameters};
use narrows_runtime::session::{ModelTensors, Session};

/// Sequences of a step.
pub const SEQUENCES: u64 = 8;
/// Tokens of a sequence.
pub const LENGTH: u64 = 8;
/// Tokens of the vocabulary.
pub const VOCAB: u64 = 64;

/// A model of width 64 with `count` blocks, given as JSON.
pub fn model(name: &str, tied: bool, kv_heads: u64, count: u64, blocks: &str) -> Model {
    let text = format!(
        r#"{{"format": "narrows-model/1", "name": "{name}", "hidden": 64, "vocab": {VOCAB},
        "heads": 8, "kv_heads": {kv_heads}, "d_ff": 96, "tied": {tied},
        "blocks": {{"count": {count}, "default": {blocks}}}}}"#
    );
    model::read(name, &text).unwrap_or_else(|defects| panic!("{defects}"))
}

/// CoLA: SiLU in the latents, a plain product of gate and up.
pub fn cola() -> Model {
    let blocks = r#"{"product": "plain", "all": {"rank": 16, "activation": "silu"}}"#;
    model("tiny-cola", false, 8, 2, blocks)
}

/// LLaMA.
pub fn dense() -> Model {
    model("tiny-llama", false, 8, 2, r#"{"product": "swiglu", "all": "dense"}"#)
}

/// Every baseline that applies to a model.
pub fn baselines(model: &Model) -> impl Iterator<Item = Baseline> {
    let low_rank = model.is_low_rank();
    Baseline::ALL.into_iter().filter(move |baseline| match baseline {
        Baseline::Auto => true,
        other => other.is_for_dense_models() != low_rank,
    })
}

/// Opens a session on the CPU.
pub fn open(model: &Model, program: CheckedProgram) -> Result<Session, narrows_runtime::RunError> {
    narrows_cpu::session(model, program, 1)
}

pub fn mesh(tensor: u64, pipeline: u64, data: u64) -> Mesh {
    Mesh { tensor, pipeline, data, context: 1 }
}

/// A request for a plan in f32 on a mesh.
pub fn request(model: &Model, mesh: Mesh) -> Request {
    Request {
        tensor: Some(mesh.tensor),
        pipeline: Some(mesh.pipeline),
        data: Some(mesh.data),
        zero: Some(Zero::Off),
        ..Request::new(model.clone(), processors(), mesh.devices(), SEQUENCES, LENGTH)
    }
}

pub fn processors() -> Profile {
    profile::preset("cpu-local").unwrap_or_else(|defects| panic!("{defects}"))
}

/// The fastest plan; `None` without any.
pub fn plan(request: &Request) -> Option<Plan> {
    search(request).best.map(|feasible| feasible.plan)
}

/// Lowers and checks a plan.
pub fn checked(plan: &Plan, model: &Model) -> CheckedProgram {
    let resolved = plan.resolve(model).unwrap_or_else(|defects| panic!("{defects}"));
    CheckedProgram::check(lower(&resolved)).unwrap_or_else(|errors| panic!("{errors}"))
}

/// A session with weights initialised from a seed.
pub fn session(plan: &Plan, model: &Model, seed: u64) -> Session {
    let program = checked(plan, model);
    let mut session =
        narrows_cpu::session(model, program, 1).unwrap_or_else(|error| panic!("{error}"));
    session.initialise(model, seed).unwrap();
    session
}

/// Inputs and targets of a step.
pub struct Tokens {
    pub inputs: Vec<u32>,
    pub targets: Vec<u32>,
}

impl Tokens {
    /// Sequences in which a token mostly determines the next one, so that the loss can fall.
    pub fn of_step(step: u64) -> Tokens {
        let mut state = step.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5DEE_CE66;
        let mut next = |end: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695);
            (state >> 33) % end
        };
        let (mut inputs, mut targets) = (vec![], vec![]);
        for _ in 0..SEQUENCES {
            let mut token = next(VOCAB);
            for _ in 0..LENGTH {
                inputs.push(token as u32);
                token = if next(8) == 0 { next(VOCAB) } else { (token * 5 + 3) % VOCAB };
                targets.push(token as u32);
            }
        }
        Tokens { inputs, targets }
    }

    /// All tokens as one microbatch of the reference interpreter.
    pub fn batch(&self) -> Batch<'_> {
        Batch {
            tokens: &self.inputs,
            targets: &self.targets,
            sequences: SEQUENCES as usize,
            length: LENGTH as usize,
        }
    }
}

/// The largest relative error of any tensor, and its parameter: see [`narrows_test_support::max_relative_error`].
pub fn max_relative_error<T: Float>(
    actual: &ModelTensors,
    expected: &Parameters<T>,
) -> (f64, String) {
    let widen = |x: &T| x.to_f64().unwrap_or(f64::NAN);
    let expected =
        expected.iter().map(|(id, tensor)| (id, tensor.elements().iter().map(widen).collect()));
    narrows_test_support::max_relative_error(actual, expected)
}
