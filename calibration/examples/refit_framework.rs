//! Fits the prices of GPT steps to their rows again, and prints the coefficients of
//! `calibration/src/framework/model.rs`.
//!
//! ```sh
//! NARROWS_ROWS=FOLDER cargo run --release -p narrows-calibration --example refit_framework [-- --write]
//! ```
//! With `--write` it replaces the intervals in `calibration/data/fits/gpt-a100.json`, and the digests of the rows in
//! `gpt-a100-rows.txt` beside it.

use std::path::Path;
use std::{env, fs, io};

use narrows_calibration::FrameworkRows;
use narrows_test_support::rows::rows_folder;

fn main() -> io::Result<()> {
    let rows = FrameworkRows::read(&rows_folder())?;
    let fit = rows.fit()?;
    for (name, coefficient) in &fit.coefficients {
        println!("{name} = {coefficient:.4e}");
    }
    if env::args().any(|argument| argument == "--write") {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/fits");
        fs::write(folder.join("gpt-a100.json"), fit.intervals)?;
        fs::write(folder.join("gpt-a100-rows.txt"), rows.digests())?;
    }
    Ok(())
}
