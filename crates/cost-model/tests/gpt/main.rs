//! How well GPT steps are predicted, on rows that lie beside the repository and never in it.
//!
//! `cargo test --release -p narrows-cost-model --test gpt -- --nocapture` prints the errors;
//! `… -- --ignored --nocapture` fits [`Framework`] again and cross-validates it.

use std::path::Path;

use narrows_cost_model::gpt::{FRAMEWORK, Framework, step_s};
use narrows_cost_model::measured::{Assumed, Errors, Measured, Measurement, Source, from_rows};
use narrows_cost_model::profile::{Profile, preset};
use narrows_plan::strategy::Recompute;

/// A file of rows, what it does not say, and the bar on its mean error in percent.
const ROWS: [(&str, &str, Recompute, f64); 2] = [
    ("vtrain-a100-single-sample.csv", "a100-80gb-8", Recompute::None, 8.0),
    ("vtrain-a100-multi-sample.csv", "a100-80gb-8-4nic", Recompute::Block, 12.0),
];

fn rows(file: &str, hardware: &str, recompute: Recompute) -> Option<Vec<Measurement>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data").join(file);
    let Ok(text) = std::fs::read_to_string(&path) else {
        println!("skipped: {file} is not beside the repository");
        return None;
    };
    let source = Source { citation: file.into(), conditions: String::new() };
    let (name, hardware) = (file.into(), hardware.into());
    let assumed = Assumed { name, source, hardware, vocabulary: 51_200, recompute };
    Some(from_rows(&text, &Assumed { name: "rows".into(), ..assumed }).unwrap().measurements)
}

/// The profile of a file's rows, with the network's share replaced.
fn profile(name: &str, network: f64) -> Profile {
    let mut file = preset(name).unwrap().file().clone();
    file.links.inter_node.efficiency = network;
    file.resolve().unwrap()
}

fn predicted_s(row: &Measurement, profile: &Profile, framework: &Framework) -> f64 {
    let Measured::Step(step) = &row.measured else { panic!("rows are steps") };
    step_s(step, row.mesh, profile, framework).unwrap()
}

#[test]
fn rows_beside_the_repository_are_predicted() {
    for (file, hardware, recompute, bar) in ROWS {
        let Some(rows) = rows(file, hardware, recompute) else { continue };
        let profile = preset(hardware).unwrap();
        let pairs = rows
            .iter()
            .map(|row| (predicted_s(row, &profile, &FRAMEWORK), row.measured_s(&profile)));
        let errors = Errors::of(pairs).unwrap();
        println!("{file}: {errors:?}");
        assert!(errors.mean_absolute_percent < bar, "{file}: {errors:?}");
    }
}

/// Where a fitted number is; the last one is the network's share of its bandwidth.
const NAMES: [&str; 9] = [
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
type Numbers = [f64; NAMES.len()];

/// Where every fit starts, with each fold's too: what counting alone would say, and a host's guess.
const START: Numbers = [70e-6, 2.0, 3.0, 1.0, 1.0, 1.0, 8e-3, 0.03, 0.85];

fn framework(numbers: &Numbers) -> (Framework, f64) {
    let [
        operator_s,
        idle_operators,
        overlap,
        pass_factor,
        product_factor,
        collective_factor,
        step_s,
        lockstep,
        network,
    ] = *numbers;
    let framework = Framework {
        operator_s,
        idle_operators,
        overlap,
        pass_factor,
        product_factor,
        collective_factor,
        step_s,
        lockstep,
    };
    (framework, network)
}

/// Relative errors under these numbers.
fn errors(numbers: &Numbers, rows: &[Measurement]) -> Vec<f64> {
    let (framework, network) = framework(numbers);
    let profiles = ROWS.map(|(_, hardware, ..)| {
        let own = preset(hardware).unwrap();
        let across = hardware == ROWS[1].1;
        if across { profile(hardware, network.clamp(0.05, 1.0)) } else { own }
    });
    let error = |row: &Measurement| {
        let profile = profiles.iter().find(|profile| profile.name() == row.hardware).unwrap();
        predicted_s(row, profile, &framework) / row.measured_s(profile) - 1.0
    };
    rows.iter().map(error).collect()
}

/// The sum of the two files' mean absolute logarithmic errors: each file counts the same.
fn loss(numbers: &Numbers, rows: &[Measurement]) -> f64 {
    let all = errors(numbers, rows);
    let mean = |hardware: &str| {
        let of = rows.iter().zip(&all).filter(|(row, _)| row.hardware == hardware);
        let sizes: Vec<f64> = of.map(|(_, error)| (1.0 + error).ln().abs()).collect();
        sizes.iter().sum::<f64>() / sizes.len().max(1) as f64
    };
    ROWS.iter().map(|(_, hardware, ..)| mean(hardware)).sum()
}

/// Coordinate search with shrinking steps.
fn fit(rows: &[Measurement], start: Numbers) -> Numbers {
    let (mut best, mut least, mut step) = (start, loss(&start, rows), 0.15);
    while step > 4e-3 {
        let before = least;
        for index in 0..NAMES.len() {
            for factor in [1.0 + step, 1.0 / (1.0 + step)] {
                let mut trial = best;
                trial[index] *= factor;
                let loss = loss(&trial, rows);
                if loss < least {
                    (best, least) = (trial, loss);
                }
            }
        }
        if least > before * 0.9995 {
            step /= 1.8;
        }
    }
    best
}

fn mean_absolute_percent(hardware: &str, rows: &[Measurement], errors: &[f64]) -> f64 {
    let of = rows.iter().zip(errors).filter(|(row, _)| row.hardware == hardware);
    let sizes: Vec<f64> = of.map(|(_, error)| error.abs() * 100.0).collect();
    sizes.iter().sum::<f64>() / sizes.len() as f64
}

#[test]
#[ignore = "a tool: prints fitted numbers, and their errors in five-fold cross-validation"]
fn refit() {
    let found = ROWS.map(|(file, hardware, recompute, _)| rows(file, hardware, recompute));
    let [Some(single), Some(multi)] = found else { return };
    let rows = [single, multi].concat();
    let all = fit(&rows, START);
    for (name, number) in NAMES.iter().zip(&all) {
        println!("{name} = {number:.4e}");
    }
    let report = |what: &str, errors: &[f64]| {
        for (file, hardware, ..) in ROWS {
            let mean = mean_absolute_percent(hardware, &rows, errors);
            println!("{what}: {file}: {mean:.2} %");
        }
    };
    report("fitted to all rows", &errors(&all, &rows));
    let mut held = vec![0.0; rows.len()];
    for fold in 0..5 {
        let out = |index: &usize| index % 5 == fold;
        let rest: Vec<Measurement> =
            (0..rows.len()).filter(|index| !out(index)).map(|index| rows[index].clone()).collect();
        let numbers = fit(&rest, START);
        println!("fold {fold}: {numbers:.3?}");
        let all = errors(&numbers, &rows);
        for index in (0..rows.len()).filter(out) {
            held[index] = all[index];
        }
    }
    report("each fold by the other four", &held);
}
