//! Fits factors of a framework's table to rows of steps, and prints the errors of every row.
//!
//! ```sh
//! cargo run --release -p narrows-calibration --example refit_tables -- TABLE.json ROWS.json PARAMETERS LEFT_OUT [PROFILE.json…]
//! ```
//! TABLE.json may be several tables of the framework, separated by commas: every fit chooses the one with the least error on
//! its own rows. ROWS.json are files of rows or of measurements, separated by commas. PARAMETERS are names separated by
//! commas, or `-` for none; LEFT_OUT is `nothing`, `models` or `hardware`.

use std::path::Path;
use std::{env, fs, io};

use narrows_calibration::{LeftOut, TableParameter, TableRows};

fn main() -> io::Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [table, rows, parameters, left_out, profiles @ ..] = arguments.as_slice() else {
        return Err(io::Error::other("TABLE.json ROWS.json PARAMETERS LEFT_OUT [PROFILE.json…]"));
    };
    let profiles: Vec<_> = profiles
        .iter()
        .map(|path| Ok(serde_json::from_str(&fs::read_to_string(path)?)?))
        .collect::<io::Result<_>>()?;
    let known = TableParameter::ALL.into_iter();
    let parameters: Vec<(&str, TableParameter)> =
        known.filter(|(name, _)| parameters.split(',').any(|named| named == *name)).collect();
    let left_out = match left_out.as_str() {
        "models" => LeftOut::Models,
        "hardware" => LeftOut::Hardware,
        _ => LeftOut::Nothing,
    };
    let rows: Vec<&Path> = rows.split(',').map(Path::new).collect();
    let tables: Vec<&Path> = table.split(',').map(Path::new).collect();
    let rows = TableRows::read(tables[0], &rows, &profiles)?.with_alternatives(&tables[1..])?;
    let values: Vec<TableParameter> = parameters.iter().map(|(_, parameter)| *parameter).collect();
    let (ratios, predicted) = rows.predict(&values, left_out);
    for ((name, _), ratio) in parameters.iter().zip(ratios) {
        println!("{name}: {ratio:.4} times the table's value");
    }
    let mut hardware: Vec<&str> = predicted.iter().map(|row| row.hardware.as_str()).collect();
    hardware.dedup();
    for name in hardware {
        let of = || predicted.iter().filter(|row| row.hardware == name);
        for row in of() {
            println!("{:>+7.1} %  {}", 100.0 * ((-row.residual).exp() - 1.0), row.name);
        }
        let errors: Vec<f64> = of().map(|row| (-row.residual).exp() - 1.0).collect();
        let mean = errors.iter().map(|error| error.abs()).sum::<f64>() / errors.len() as f64;
        let worst = errors.iter().fold(0.0, |worst: f64, error| worst.max(error.abs()));
        let inside = of().filter(|row| row.inside).count();
        println!(
            "{name}: {} rows, mean {:.2} %, worst {:.1} %, {inside} within the table's interval",
            errors.len(),
            100.0 * mean,
            100.0 * worst
        );
        let residuals: Vec<String> = of().map(|row| format!("{:.4}", row.residual)).collect();
        println!("residuals of {name}: [{}]", residuals.join(", "));
    }
    Ok(())
}
