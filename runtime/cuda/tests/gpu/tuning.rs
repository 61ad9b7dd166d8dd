//! Selection of matmul algorithms, as the log of the fake CUDA libraries shows it.

use std::collections::BTreeMap;
use std::path::Path;
use std::{env, fs};

use narrows_plan::{Mesh, Precision};
use narrows_runtime::session::TensorKind;

use super::training::{cache_folder, options, program};
use super::{device_choice, plans};

const LOG: &str = "NARROWS_FAKE_CUDA_LOG";

/// Runs of a shape, which several matmuls may share.
#[derive(Debug, Default)]
struct ShapeRuns<'a> {
    by_algorithm: BTreeMap<&'a str, usize>,
    /// Those whose first factor is zero.
    of_zeros: usize,
}

fn matmul_runs(log: &str) -> BTreeMap<&str, ShapeRuns<'_>> {
    let mut shapes: BTreeMap<&str, ShapeRuns> = BTreeMap::new();
    for line in log.lines() {
        let Some((before, matmul)) = line.split_once("matmul ") else { continue };
        let (shape, algorithm) = matmul.split_once(" algorithm=").expect("an algorithm");
        let runs = shapes.entry(shape).or_default();
        match before.ends_with("zeros in ") {
            true => runs.of_zeros += 1,
            false => *runs.by_algorithm.entry(algorithm).or_default() += 1,
        }
    }
    shapes
}

/// Opens a session and returns the log of what that ran.
fn log_of_opening(folder: &Path) -> String {
    let mesh = Mesh { tensor: 1, pipeline: 1, data: 1, context: 1 };
    let (model, plan) = plans(mesh, 1, Precision::MixedBf16, 3, 1).remove(0);
    let log = env::var(LOG).expect("a log file");
    let before = fs::read_to_string(&log).unwrap_or_default().len();
    let options = options(folder, 0, true);
    let mut warn = |warning: &str| panic!("{warning}");
    let session =
        narrows_cuda::session(&model, program(&plan, &model), &options, None, &mut warn).unwrap();
    let all = fs::read_to_string(&log).unwrap();
    for (id, tensor) in session.gather_tensors(TensorKind::Weights).unwrap() {
        assert!(tensor.iter().all(|weight| *weight == 0.0), "{id:?} is not zero at first");
    }
    all[before..].to_owned()
}

#[test]
fn algorithms_are_timed_in_rounds_on_data_other_than_zeros() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let test = "tuning::algorithms_are_timed_in_rounds_on_data_other_than_zeros";
    device_choice::on_fake_gpus(test, &[(LOG, log.to_str().unwrap())], || {
        let cache = cache_folder().join("tuning");
        let log = log_of_opening(&cache);
        let shapes = matmul_runs(&log);
        assert!(shapes.len() > 5, "{shapes:?}");
        for (shape, runs) in shapes {
            // Each matmul runs on zeros once: when it is prepared, after the matrices were cleared.
            assert!(runs.of_zeros > 0 && runs.by_algorithm.len() > 1, "{shape}: {runs:?}");
            for count in runs.by_algorithm.values() {
                // One run that loads the kernel, three that select finalists, five rounds of three.
                assert!(*count >= 19 * runs.of_zeros, "{shape}: {runs:?}");
            }
        }
        // Algorithms of the file are not timed again.
        let log = log_of_opening(&cache);
        let shapes = matmul_runs(&log);
        assert!(shapes.len() > 5, "{shapes:?}");
        for (shape, runs) in shapes {
            assert_eq!(runs.by_algorithm.values().sum::<usize>(), runs.of_zeros, "{shape}");
        }
    });
}
