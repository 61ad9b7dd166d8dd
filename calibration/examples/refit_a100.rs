//! Fits the kernel prices of `profiles/a100-80gb.json` to the published measurements again, and prints coefficients, draws and
//! residuals.
//!
//! ```sh
//! cargo run --release -p narrows-calibration --example refit_a100 [-- tiles]
//! ```
//! With `tiles` it compares sets of tiles instead, by the errors of strategies that a fit leaves out.

#[path = "../tests/published/kernel_fit.rs"]
mod kernel_fit;
#[path = "../tests/published/times.rs"]
mod times;

use kernel_fit::{
    GEMM, LINKS, Parameter, distance_octaves, kernels_of, mean, prices, search, search_from, tables,
};
use narrows_calibration::{Bootstrap, bootstrap, independent_units};
use narrows_cost_model::interval::{quantile, small_sample_factor};
use narrows_cost_model::profile::{GemmTile, ProfileFile, preset};
use narrows_cost_model::{MeasuredShapes, error_scale};
use narrows_plan::Kernel;
use serde_json::json;
use times::{PublishedTime, load};

/// First relative step of a fit to all measurements.
const FIRST_STEP: f64 = 0.2;

fn main() {
    let published = load();
    let tables = tables(&published);
    let gemms: Vec<&PublishedTime> = tables[..3].iter().copied().flatten().collect();
    if std::env::args().any(|argument| argument == "tiles") {
        return print_tile_sets(&gemms);
    }
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
    println!("growth of the errors of GEMMs for each octave {:.2}", growth_per_octave(&gemms));
}

/// Strategies, each with the prefixes of all measurements that share its shapes.
const STRATEGIES: [&[&str]; 3] = [&["fullrank"], &["vanilla"], &["btp", "qkv", "gate_up"]];

/// The growth with which nine errors in ten of strategies that a fit leaves out, widened for their number, lie within the
/// error of measured shapes times its growth.
fn growth_per_octave(all: &[&PublishedTime]) -> f64 {
    let half_width = preset("a100-80gb").unwrap().file().gemm.relative_error.half_width_90.ln_1p();
    let widening = small_sample_factor(STRATEGIES.len());
    let of_strategy = |prefixes: &[&str]| {
        let (held_out, rest) = partition(all, prefixes);
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

type TileFilter = fn(&GemmTile) -> bool;

/// Sets of tiles that a fit could use instead of the preset's.
const TILE_SETS: [(&str, TileFilter); 4] = [
    ("all tiles", |_| true),
    ("without 64 × 64", |tile| tile.rows.max(tile.columns) > 64),
    ("without sides of 64", |tile| tile.rows.min(tile.columns) > 64),
    ("256 × 128 and 128 × 256", |tile| tile.rows.max(tile.columns) > 128),
];

/// Errors of strategies that a fit leaves out with all of their shapes, by tile set; and with the set that has the least
/// left-out errors among the remaining strategies, so that the choice of the set is left out too.
fn print_tile_sets(all: &[&PublishedTime]) {
    let mut with_chosen_sets = vec![];
    let mut by_set = [const { vec![] }; TILE_SETS.len()];
    for prefixes in STRATEGIES {
        let (held_out, rest) = partition(all, prefixes);
        let others = || STRATEGIES.into_iter().filter(|other| *other != prefixes);
        let inner_square = |set| {
            let errors = others().flat_map(|other| {
                let (held_out, rest) = partition(&rest, other);
                tile_set_errors(set, &held_out, &rest)
            });
            errors.map(|error| error.ln_1p().powi(2)).sum::<f64>()
        };
        let mut least = (f64::INFINITY, 0);
        for (set, errors) in by_set.iter_mut().enumerate() {
            errors.extend(tile_set_errors(set, &held_out, &rest));
            let square = inner_square(set);
            if square < least.0 {
                least = (square, set);
            }
        }
        println!("{} held out: chosen {}", prefixes[0], TILE_SETS[least.1].0);
        with_chosen_sets.extend(tile_set_errors(least.1, &held_out, &rest));
    }
    let named = TILE_SETS.iter().map(|(name, _)| *name).zip(&by_set);
    for (name, errors) in named.chain([("chosen without the strategy", &with_chosen_sets)]) {
        let sizes: Vec<f64> = errors.iter().map(|error| error.abs() * 100.0).collect();
        let worst = sizes.iter().copied().fold(0.0, f64::max);
        println!("{name}: strategies held out, mean {:.2} %, worst {worst:.1} %", mean(&sizes));
    }
}

/// Errors, price / measured − 1, of `held_out` by a fit to `rest` with a tile set.
fn tile_set_errors(set: usize, held_out: &[&PublishedTime], rest: &[&PublishedTime]) -> Vec<f64> {
    let mut start = preset("a100-80gb").unwrap().file().clone();
    start.gemm.tiles.retain(TILE_SETS[set].1);
    let fit = search_from(start, FIRST_STEP, &GEMM, rest, &vec![1.0; rest.len()]);
    let prices = prices(&fit.resolve().unwrap());
    held_out.iter().map(|row| row.error(&prices)).collect()
}

type Rows<'a> = Vec<&'a PublishedTime>;

/// The measurements of a strategy, and the others.
fn partition<'a>(all: &[&'a PublishedTime], prefixes: &[&str]) -> (Rows<'a>, Rows<'a>) {
    all.iter().partition(|row| prefixes.iter().any(|prefix| row.name.starts_with(prefix)))
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
