//! Exact steps of LORO, whose pairs are divided among the processes.

use std::num::NonZeroU64;

use narrows_plan::model::{self, LinearKind, ParameterId, WeightId};
use narrows_plan::{Context, Mesh, Precision, Workload, Zero};
use narrows_runtime::process_group::{ClusterError, ClusterFault};
use narrows_runtime::session::{ModelTensors, Session, StepInput, TensorKind};
use narrows_runtime::{FactorRateScale, Loro, Optimizer, RunError};
use narrows_test_support::plans::{TestRng, draw_plan, to_json};

use super::{KINDS, TIMEOUTS, join, launches, program, run_processes, tokens, train_with};

const MODEL: &str = r#"{"format": "narrows-model/1", "hidden": 64, "vocab": 256, "heads": 4, "d_ff": 96,
    "blocks": {"count": 3, "default": {"product": "swiglu", "all": {"rank": 8, "activation": "identity"}}}}"#;

fn optimizer(exact_every: u64) -> Optimizer {
    let loro = Loro {
        exact_every: NonZeroU64::new(exact_every).unwrap(),
        refresh_every: 0,
        rate_scale: FactorRateScale::RankOverHidden,
    };
    Optimizer { loro: Some(loro), clip_norm: 0.1, ..Optimizer::new(1e-2, 1, 10) }
}

fn context(mesh: Mesh, zero: Zero, exact_every: u64) -> Context {
    let workload =
        Workload { global_batch: 2 * mesh.replicas(), sequence_length: 8, micro_batch: 2 };
    let loro_every = NonZeroU64::new(exact_every);
    let context = Context::new(mesh, workload, Precision::Fp32, zero);
    // Of four replicas, two share a copy of the optimizer states.
    Context { loro_every, shard_size: context.shard_size.min(2), ..context }
}

#[test]
fn exact_steps_of_processes_equal_those_of_threads_bit_for_bit() {
    let model = model::read("small", MODEL).unwrap();
    let mut rng = TestRng::new(5);
    for (tensor, pipeline, data, zero) in [
        (2, 1, 1, Zero::Off),
        (1, 3, 1, Zero::Off),
        (1, 1, 2, Zero::One),
        (1, 1, 2, Zero::Three),
        (2, 2, 2, Zero::Two),
        (1, 1, 4, Zero::Off),
        (1, 1, 4, Zero::One),
    ] {
        let mesh = Mesh { tensor, pipeline, data, context: 1 };
        let plan = (0..50).find_map(|_| draw_plan(&mut rng, &model, context(mesh, zero, 2)));
        let plan = plan.expect("a plan");
        let program = program(&plan, &model);
        let mut session = narrows_cpu::session(&model, program.clone(), 1).unwrap();
        let expected = train_with(&optimizer(2), &mut session, &model, &plan);
        let results = run_processes(&launches(mesh.devices()), |launch| {
            let neighbours = Session::peers(program.program(), launch.rank);
            let group = join(launch, &neighbours, TIMEOUTS);
            let mut session =
                narrows_cpu::session_of_process(&model, program.clone(), 1, group.clone()).unwrap();
            let result = train_with(&optimizer(2), &mut session, &model, &plan);
            group.shut_down().unwrap();
            result
        });
        for (rank, (steps, tensors)) in results.into_iter().enumerate() {
            assert_eq!(steps, expected.0, "process {rank} of\n{}", to_json(&plan));
            assert!(rank > 0 || tensors == expected.1, "of\n{}", to_json(&plan));
        }
    }
}

/// One process computes the pair; the others learn of its failure.
#[test]
fn a_pair_without_a_result_ends_all_processes() {
    let model = model::read("small", MODEL).unwrap();
    let mesh = Mesh { tensor: 2, pipeline: 1, data: 1, context: 1 };
    let mut rng = TestRng::new(1);
    let plan =
        (0..50).find_map(|_| draw_plan(&mut rng, &model, context(mesh, Zero::Off, 1))).unwrap();
    let program = program(&plan, &model);
    let errors = run_processes(&launches(2), |launch| {
        let group = join(launch, &[1 - launch.rank], TIMEOUTS);
        let mut session =
            narrows_cpu::session_of_process(&model, program.clone(), 1, group.clone()).unwrap();
        session.initialise(&model, 1).unwrap();
        let id = ParameterId { block: Some(1), weight: WeightId::FactorA(LinearKind::Q) };
        let zeros: ModelTensors = [(id, vec![0.0; 64 * 8])].into();
        session.load_tensors(KINDS[0], &zeros).unwrap();
        assert_eq!(KINDS[0], TensorKind::Weights);
        let tokens = tokens(&plan, 0, model.vocab);
        let input = StepInput { tokens: &tokens, targets: &tokens };
        session.step(&optimizer(1), input).unwrap_err()
    });
    let has_no_result = |error: &RunError| matches!(error, RunError::ExactStep { step: 1, .. });
    let is_told = |error: &RunError| match error {
        RunError::Cluster(ClusterError { fault: ClusterFault::Aborted { reason, .. }, .. }) => {
            reason.contains("layer 1 q has no result: the factor `a` has a lower rank")
        }
        _ => false,
    };
    assert!(errors.iter().any(has_no_result), "{errors:?}");
    assert!(errors.iter().all(|error| has_no_result(error) || is_told(error)), "{errors:?}");
}
