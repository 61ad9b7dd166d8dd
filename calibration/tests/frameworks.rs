//! The fits of the tables of frameworks, repeated.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use narrows_calibration::{LeftOut, PredictedRow, TableParameter, TableRows, framework_names};

/// A table, the values that were fitted, and the largest mean errors in percent: of the fit, and with models left out.
const TABLES: [(&str, &[TableParameter], f64, f64); 2] = [
    ("fsdp", &[TableParameter::Gemm, TableParameter::Attention], 3.6, 4.1),
    ("torchtitan", &[TableParameter::Gemm], 1.4, 2.2),
];

fn rows(table: &str) -> TableRows {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = folder.join(format!("../profiles/frameworks/{table}.json"));
    TableRows::read(&table, &[&folder.join("data/fits/framework-rows.json")], &[]).unwrap()
}

fn mean_error_percent(rows: &[PredictedRow]) -> f64 {
    let error = |row: &PredictedRow| ((-row.residual).exp() - 1.0).abs();
    100.0 * rows.iter().map(error).sum::<f64>() / rows.len() as f64
}

/// A file that is not listed would not be found by its name.
#[test]
fn every_file_is_a_table() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../profiles/frameworks");
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files: BTreeSet<String> =
        paths.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    assert_eq!(files, framework_names().map(str::to_owned).collect());
}

#[test]
fn tables_predict_the_rows_that_they_were_fitted_to() {
    for (name, _, fitted, _) in TABLES {
        let (_, predicted) = rows(name).predict(&[], LeftOut::Nothing);
        let mean = mean_error_percent(&predicted);
        println!("{name}: {} rows, {mean:.1} %", predicted.len());
        assert!(predicted.len() >= 8 && mean < fitted, "{name}: {mean}");
    }
}

#[test]
#[ignore = "second level: repeats fits"]
fn shipped_values_are_the_fit_and_intervals_contain_models_left_out() {
    for (name, parameters, _, left_out) in TABLES {
        let (ratios, predicted) = rows(name).predict(parameters, LeftOut::Models);
        assert!(ratios.iter().all(|ratio| (ratio - 1.0).abs() < 0.03), "{name}: {ratios:?}");
        let mean = mean_error_percent(&predicted);
        let inside = predicted.iter().filter(|row| row.inside).count();
        println!("{name}: models left out {mean:.1} %, {inside} of {} inside", predicted.len());
        assert!(mean < left_out, "{name}: {mean}");
        assert!(inside as f64 >= 0.85 * predicted.len() as f64, "{name}: {inside}");
    }
}

/// The choice of a table is part of a fit: of a wrong and a right one, every fit takes the right one, whichever is first.
#[test]
fn a_fit_chooses_the_table_with_the_least_error() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let right = folder.join("../profiles/frameworks/torchtitan.json");
    let text = fs::read_to_string(&right).unwrap();
    let altered = text.replace("\"overlap\": \"blocks\"", "\"overlap\": \"none\"");
    assert_ne!(text, altered);
    let wrong = Path::new(env!("CARGO_TARGET_TMPDIR")).join("torchtitan-without-overlap.json");
    fs::write(&wrong, altered).unwrap();
    let rows = folder.join("data/fits/framework-rows.json");
    let residuals = |table: &Path, others: &[&Path]| {
        let rows = TableRows::read(table, &[&rows], &[]).unwrap();
        let rows = rows.with_alternatives(others).unwrap();
        let (_, predicted) = rows.predict(&[TableParameter::Gemm], LeftOut::Nothing);
        predicted.iter().map(|row| row.residual).collect::<Vec<f64>>()
    };
    let [of_right, of_wrong] = [&right, &wrong].map(|table| residuals(table, &[]));
    assert_ne!(of_right, of_wrong);
    assert_eq!(residuals(&right, &[&wrong]), of_right);
    assert_eq!(residuals(&wrong, &[&right]), of_right);
}
