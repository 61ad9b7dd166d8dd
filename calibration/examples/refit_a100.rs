//! Fits the kernel prices of `profiles/a100-80gb.json` to the published measurements again, and prints coefficients, draws and
//! residuals.
//!
//! ```sh
//! cargo run --release -p narrows-calibration --example refit_a100
//! ```

#[path = "../tests/published/kernel_fit.rs"]
mod kernel_fit;
#[path = "../tests/published/times.rs"]
mod times;

use kernel_fit::{
    GEMM, LINKS, Parameter, distance_octaves, kernels_of, mean, prices, search, tables,
};
use narrows_calibration::{Bootstrap, bootstrap, independent_units};
use narrows_cost_model::interval::{quantile, small_sample_factor};
use narrows_cost_model::profile::{ProfileFile, preset};
use narrows_cost_model::{MeasuredShapes, error_scale};
use narrows_plan::Kernel;
use serde_json::json;
use times::{PublishedTime, load};

/// First relative step of a fit to all measurements.
const FIRST_STEP: f64 = 0.2;

fn main() {
    let published = load();
    let tables = tables(&published);
    for (parameters, tables) in [(&GEMM[..], &tables[..3]), (&LINKS[..], &tables[3..])] {
        let all: Vec<&PublishedTime> = tables.iter().copied().flatten().collect();
        let mut file = search(FIRST_STEP, parameters, &all, &vec![1.0; all.len()]);
        for (name, parameter) in parameters {
            println!("{name} = {:.4e}", parameter(&mut file));
        }
        let mut errors = absolute_errors(&file, &all);
        errors.sort_by(f64::total_cmp);
        let high = errors[errors.len() * 9 / 10] * 100.0;
        println!("mean {:.2} %, 90th percentile {high:.2} %", mean(&errors) * 100.0);
        println!("held out, mean {:.2} %", held_out_error(parameters, &all) * 100.0);
        let bootstrap = refit_draws(parameters, &all);
        let coefficients = bootstrap.draws.iter().map(|file| {
            let value = |parameter: &Parameter| short(*parameter.1(&mut file.clone()));
            parameters.iter().map(value).collect::<Vec<f64>>()
        });
        println!("draws {}", json!(coefficients.collect::<Vec<_>>()));
        let residuals = bootstrap.residuals.iter().map(|(_, residual)| short(*residual));
        println!("residuals {}", json!(residuals.collect::<Vec<_>>()));
        let mut kernels: Vec<&Kernel> = all.iter().flat_map(kernels_of).collect();
        kernels.sort_by_key(|kernel| format!("{kernel:?}"));
        kernels.dedup();
        println!("kernels {}\n", json!(kernels));
    }
    let all: Vec<&PublishedTime> = tables[..3].iter().copied().flatten().collect();
    println!("growth of the errors of GEMMs for each octave {:.2}", growth_per_octave(&all));
}

/// Strategies, each with the prefixes of all measurements that share its shapes.
const STRATEGIES: [&[&str]; 3] = [&["fullrank"], &["vanilla"], &["btp", "qkv", "gate_up"]];

/// The growth with which nine errors in ten of strategies that a fit leaves out, widened for their number, lie within the
/// error of measured shapes times its growth.
fn growth_per_octave(all: &[&PublishedTime]) -> f64 {
    let half_width = preset("a100-80gb").unwrap().file().gemm.relative_error.half_width_90.ln_1p();
    let widening = small_sample_factor(STRATEGIES.len());
    let of_strategy = |prefixes: &[&str]| {
        let is_of =
            |row: &&&PublishedTime| prefixes.iter().any(|prefix| row.name.starts_with(prefix));
        let (held_out, rest): (Vec<&PublishedTime>, Vec<&PublishedTime>) =
            all.iter().partition(is_of);
        let fit = search(FIRST_STEP, &GEMM, &rest, &vec![1.0; rest.len()]);
        let prices = prices(&fit.resolve().unwrap());
        let shapes = MeasuredShapes::from_kernels(rest.iter().flat_map(kernels_of));
        let growth = move |row: &&PublishedTime| {
            let distances = kernels_of(row).map(|kernel| shapes.distance_octaves(kernel, 1));
            let error = (1.0 + row.error(&prices)).ln().abs() * widening;
            (error / half_width - 1.0) / distances.fold(0.0, f64::max)
        };
        held_out.iter().map(growth).collect::<Vec<f64>>()
    };
    let mut growths: Vec<f64> =
        STRATEGIES.iter().flat_map(|prefixes| of_strategy(prefixes)).collect();
    growths.sort_by(f64::total_cmp);
    quantile(&growths, 0.9)
}

/// Rounds to four significant digits.
fn short(number: f64) -> f64 {
    format!("{number:.3e}").parse().unwrap()
}

/// Draws of a bootstrap.
const DRAWS: usize = 32;

/// The fit, repeated on draws of the measurements.
fn refit_draws(parameters: &[Parameter], all: &[&PublishedTime]) -> Bootstrap<ProfileFile> {
    let fit = |counts: &[f64]| search(0.1, parameters, all, counts);
    let own = preset("a100-80gb").unwrap().file().clone();
    bootstrap(&independent_units(all.len()), DRAWS, 1, &own, fit, |file, index| {
        let prices = prices(&file.clone().resolve().unwrap());
        -(1.0 + all[index].error(&prices)).ln() / error_scale(distance_octaves(all, index))
    })
}

/// Mean error of the measurements of each strategy by a fit to the measurements of all other strategies.
fn held_out_error(parameters: &[Parameter], all: &[&PublishedTime]) -> f64 {
    let strategies = ["fullrank", "vanilla", "btp", "qkv", "gate_up"];
    let errors = strategies.iter().flat_map(|strategy| {
        let (held_out, rest): (Vec<&PublishedTime>, Vec<&PublishedTime>) =
            all.iter().partition(|row| row.name.starts_with(strategy));
        let errors = absolute_errors(
            &search(FIRST_STEP, parameters, &rest, &vec![1.0; rest.len()]),
            &held_out,
        );
        println!("  {strategy} held out: mean {:.2} %", mean(&errors) * 100.0);
        errors
    });
    mean(&errors.collect::<Vec<f64>>())
}

fn absolute_errors(file: &ProfileFile, published: &[&PublishedTime]) -> Vec<f64> {
    let prices = prices(&file.clone().resolve().unwrap());
    published.iter().map(|row| row.error(&prices).abs()).collect()
}
