//! Rows of published measurements that are not part of the repository.

use std::env;
use std::path::{Path, PathBuf};

/// The variable with the folder of the rows.
const FOLDER: &str = "NARROWS_ROWS";
/// A file of the folder.
const FILE: &str = "vtrain-a100-single-sample.csv";

/// The folder of `vtrain-a100-single-sample.csv` and `vtrain-a100-multi-sample.csv`: `$NARROWS_ROWS`, or else
/// `shared/data` beside the repository. Tests that call this function are `#[ignore = "needs NARROWS_ROWS"]`.
///
/// # Panics
/// If the folder does not have the rows.
pub fn rows_folder() -> PathBuf {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data");
    let folder = env::var_os(FOLDER).map_or_else(beside, PathBuf::from);
    assert!(
        folder.join(FILE).exists(),
        "{} has no {FILE}: set {FOLDER} to the folder of the rows, by an absolute path",
        folder.display()
    );
    folder
}
