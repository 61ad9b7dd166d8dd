//! Small models, random plans, and training on random tokens.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use narrows_plan::model::{self, LinearKind, Model, ParameterId, WeightId};
use narrows_plan::{CheckedProgram, Context, Mesh, Plan, Precision, Workload, Zero, lower};
use narrows_runtime::checkpoint::Checkpoint;
use narrows_runtime::data::{Cursor, Sampler, SamplerConfig, TargetRule, TokenFile};
use narrows_runtime::session::{Session, StepInput};
use narrows_runtime::{Optimizer, Trainer};

use narrows_test_support::plans::{TestRng, draw_plan};

pub const SEED: u64 = 5;

pub const EMBEDDING: ParameterId = ParameterId { block: None, weight: WeightId::Embedding };
pub const HEAD: ParameterId = ParameterId { block: None, weight: WeightId::Head };
/// The dense matrix of o in block 1.
pub const DENSE_O: ParameterId =
    ParameterId { block: Some(1), weight: WeightId::Dense(LinearKind::O) };
/// The first factor of k in block 2.
pub const FACTOR_K: ParameterId =
    ParameterId { block: Some(2), weight: WeightId::FactorA(LinearKind::K) };

/// A model with every kind of parameter: factors, dense matrices, crossings with all kinds of gates.
pub fn small_model(tied: bool) -> Model {
    let text = format!(
        r#"{{"format": "narrows-model/1", "hidden": 32, "vocab": 64, "heads": 4, "kv_heads": 2,
        "d_ff": 64, "tied": {tied},
        "blocks": {{"count": 3, "default": {{"product": "swiglu",
            "all": {{"rank": 16, "activation": "silu",
                "crossing": {{"form": "released", "gate": {{"tensor": {{"a": 4, "b": 4}}}}}}}},
            "up": {{"crossing": {{"form": "paper", "gate": "dense"}}}}, "o": "dense"}}}}}}"#
    );
    model::read("small.json", &text).expect("a valid model")
}

/// A mesh by its tensor, pipeline and data axes.
pub fn mesh(tensor: u64, pipeline: u64, data: u64) -> Mesh {
    Mesh { tensor, pipeline, data, context: 1 }
}

/// A random plan for a batch of eight sequences.
pub fn plan(model: &Model, seed: u64, mesh: Mesh, zero: Zero) -> Plan {
    let workload = Workload { global_batch: 8, sequence_length: 8, micro_batch: 2 };
    let context = Context::new(mesh, workload, Precision::Fp32, zero);
    let mut rng = TestRng::new(seed);
    (0..1000).find_map(|_| draw_plan(&mut rng, model, context)).expect("a plan for the mesh")
}

/// A session under a plan, with weights of zero.
pub fn session(model: &Model, plan: &Plan) -> Session {
    let program = CheckedProgram::check(lower(&plan.resolve(model).unwrap())).unwrap();
    narrows_cpu::session(model, program, 1).unwrap()
}

/// A session under a plan, with initial weights.
pub fn initialised_session(model: &Model, plan: &Plan) -> Session {
    let mut session = session(model, plan);
    session.initialise(model, SEED).unwrap();
    session
}

pub fn optimizer() -> Optimizer {
    Optimizer::new(1e-2, 3, 40)
}

/// Trains on tokens that depend on the step number alone. Returns the losses.
pub fn train(session: &mut Session, steps: u64) -> Vec<f64> {
    let step = |_| {
        let mut rng = TestRng::new(1000 + session.steps());
        let work = session.program().context.workload;
        let count = work.global_batch * work.sequence_length;
        // Targets equal the tokens, so that the model can learn.
        let tokens: Vec<u32> = (0..count).map(|_| rng.below(64) as u32).collect();
        session.step(&optimizer(), StepInput { tokens: &tokens, targets: &tokens }).unwrap().loss
    };
    (0..steps).map(step).collect()
}

pub fn checkpoint_of(session: &Session, model: &Model) -> Checkpoint {
    let cursor = Cursor {
        next_sequence: session.steps() * 8,
        seed: u64::MAX,
        sequence_length: 8,
        tokens_sha256: "ab".repeat(32),
        targets: TargetRule::default(),
    };
    Checkpoint::of_session(session, model, &optimizer(), cursor, SEED).unwrap().unwrap()
}

/// A checkpoint after two steps on one device.
pub fn trained(model: &Model) -> Checkpoint {
    let mut session = initialised_session(model, &plan(model, 1, mesh(1, 1, 1), Zero::Off));
    train(&mut session, 2);
    checkpoint_of(&session, model)
}

pub fn keep(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).unwrap()
}

/// A run on a text, of which every byte is a token below 64.
pub fn trainer(model: &Model, plan: &Plan, text: &[u8]) -> Trainer {
    let text: Vec<u8> = text.iter().map(|byte| byte % 64).collect();
    let file = Arc::new(TokenFile::from_text(Path::new("text"), &text).unwrap());
    let targets = TargetRule::default();
    let config = SamplerConfig { sequence_length: 8, vocabulary: 256, seed: 9, targets };
    let sampler = Sampler::new(file, config).unwrap();
    Trainer::new(initialised_session(model, plan), sampler, optimizer()).unwrap()
}
