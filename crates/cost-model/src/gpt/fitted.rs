//! Which steps [`FRAMEWORK`](super::FRAMEWORK) was fitted to, so that none of them is called predicted.
//!
//! The rows lie beside the repository and not in it; `data/fits/gpt-a100-rows.txt` has a digest of
//! each: of the model's sizes, the mesh, the workload and the time, but of nothing that rows do not
//! say and somebody assumed.

use narrows_plan::Mesh;
use sha2::{Digest, Sha256};

use crate::measured::{Step, Subject};

const ROWS: &str = include_str!("../../../../data/fits/gpt-a100-rows.txt");

/// What tells a measured step from all others; `None` when the step is no GPT's.
pub fn digest(step: &Step, mesh: Mesh, measured_s: f64) -> Option<String> {
    let Subject::Gpt(gpt) = step.model else { return None };
    let (Mesh { tensor, pipeline, data }, work) = (mesh, step.workload);
    let (batch, length, micro) = (work.global_batch, work.sequence_length, work.micro_batch);
    let sizes = [gpt.layers, gpt.hidden, gpt.heads, tensor, pipeline, data, batch, length, micro];
    let text = format!("{sizes:?} {measured_s:.9e}");
    let digest = Sha256::digest(text.as_bytes());
    Some(digest[..6].iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Whether this step, which took so long, is one of those.
pub fn was_fitted_to(step: &Step, mesh: Mesh, measured_s: f64) -> bool {
    digest(step, mesh, measured_s).is_some_and(|digest| ROWS.lines().any(|row| row == digest))
}
