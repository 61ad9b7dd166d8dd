//! The fit of kernel prices of `a100-80gb` to the published measurements.

use narrows_calibration::CoordinateDescent;
use narrows_cost_model::profile::{Profile, ProfileFile, preset};
use narrows_cost_model::{Executor, MeasuredShapes, Prices};
use narrows_plan::{Kernel, Mesh};

use super::times::{PublishedTables, PublishedTime};

/// The executor of the measurements: PyTorch, operator by operator.
pub fn prices(profile: &Profile) -> Prices {
    Prices::new(profile, Executor::Eager, &Mesh { tensor: 4, pipeline: 1, data: 1, context: 1 })
}

pub fn tables(published: &PublishedTables) -> [&[PublishedTime]; 5] {
    [
        &published.products,
        &published.utilisation,
        &published.grouped_products,
        &published.all_reduces,
        &published.grouped_all_reduces,
    ]
}

/// Name and field of a fitted coefficient.
pub type Parameter = (&'static str, fn(&mut ProfileFile) -> &mut f64);

pub const GEMM: [Parameter; 4] = [
    ("gemm.efficiency_max", |file| &mut file.gemm.efficiency_max),
    ("gemm.exposed_epilogue", |file| &mut file.gemm.exposed_epilogue),
    ("gemm.tile_overhead_elements", |file| &mut file.gemm.tile_overhead_elements),
    ("gemm.start_s", |file| &mut file.gemm.start_s),
];
pub const LINKS: [Parameter; 2] = [
    ("links.intra_node.efficiency", |file| &mut file.links.intra_node.efficiency),
    ("links.intra_node.fill_s", |file| &mut file.links.intra_node.fill_s),
];

pub fn kernels_of<'a>(row: &&'a PublishedTime) -> impl Iterator<Item = &'a Kernel> {
    row.kernels.iter().map(|(kernel, _)| kernel)
}

/// Largest distance of a kernel of a measurement from the kernels of all other measurements, in octaves.
pub fn distance_octaves(all: &[&PublishedTime], index: usize) -> f64 {
    let others = all.iter().enumerate().filter(|(other, _)| *other != index);
    let shapes = MeasuredShapes::from_kernels(others.flat_map(|(_, row)| kernels_of(row)));
    let distances = kernels_of(&all[index]).map(|kernel| shapes.distance_octaves(kernel, 1));
    distances.fold(0.0, f64::max)
}

pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Minimises the sum of squared logarithmic errors, in which measurement i counts `counts[i]` times, by
/// coordinate descent with shrinking steps. (The mean absolute error would not distinguish many small
/// errors from one large error.)
///
/// `step` is the first relative step, which can be small where the optimum is near the preset.
pub fn search(
    step: f64,
    parameters: &[Parameter],
    published: &[&PublishedTime],
    counts: &[f64],
) -> ProfileFile {
    let start = preset("a100-80gb").unwrap().file().clone();
    search_from(start, step, parameters, published, counts)
}

/// As [`search`], from the values in `start`.
pub fn search_from(
    start: ProfileFile,
    mut step: f64,
    parameters: &[Parameter],
    published: &[&PublishedTime],
    counts: &[f64],
) -> ProfileFile {
    let loss = |file: &ProfileFile| {
        let Ok(profile) = file.clone().resolve() else { return f64::INFINITY };
        let prices = prices(&profile);
        let square = |row: &PublishedTime| (1.0 + row.error(&prices)).ln().powi(2);
        published.iter().zip(counts).map(|(row, count)| count * square(row)).sum::<f64>()
    };
    let scale = |file: &mut ProfileFile, index: usize, factor: f64| {
        *parameters[index].1(file) *= factor;
    };
    let mut search = CoordinateDescent::new(start, loss);
    while step > 1e-4 {
        let before = search.loss;
        search.sweep(parameters.len(), [1.0 + step, 1.0 - step], 1, scale, loss);
        if search.loss == before {
            step /= 1.5;
        }
    }
    search.best
}
