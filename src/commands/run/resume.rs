//! The checkpoint that a run resumes from: which one, and how the run may differ from it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use narrows_plan::Workload;
use narrows_runtime::checkpoint::{
    self, CheckpointError, FoundCheckpoint, ResumeError, ResumedState,
};
use narrows_runtime::process_group::ProcessGroup;
use narrows_runtime::{GemmDtype, Trainer};

use crate::args::{CheckpointSettings, RunPlaces, flags_of_optimizer};
use crate::checkpoint_folder::candidates;
use crate::cluster::agree;
use crate::errors::{CommandResult, Failure, Problem};
use crate::output;
use crate::text::plural;

/// The checkpoint of this path if it was found before the folder was locked, and is still the same.
pub fn found_before<'a>(
    settings: &'a CheckpointSettings,
    path: &Path,
) -> Option<&'a FoundCheckpoint> {
    settings.found.as_ref().filter(|found| found.path() == path && found.is_unchanged())
}

/// The newest checkpoint whose contents are undamaged, or else that of the lowest evaluation loss. Newer ones are set aside,
/// with a warning. Of several processes each verifies a part of the files, and one lists and renames the checkpoints.
pub fn newest_undamaged(
    settings: &CheckpointSettings,
    group: Option<&Arc<dyn ProcessGroup>>,
) -> CommandResult<Option<FoundCheckpoint>> {
    let is_first = group.is_none_or(|group| group.rank() == 0);
    let mut has_set_aside = false;
    loop {
        let newest = match is_first {
            true => candidates(&settings.dir).map_err(Failure::checkpoint)?.into_iter().next(),
            false => None,
        };
        let name = newest.as_ref().and_then(|newest| newest.path.strip_prefix(&settings.dir).ok());
        let name = name.map(|name| name.to_string_lossy().into_owned());
        let name = agree(group, name, |all| all.into_iter().next().flatten())?;
        let Some(name) = name else {
            if has_set_aside {
                let dir = settings.dir.display();
                output::warn(&format!(
                    "{dir} has no undamaged checkpoint left: the run begins at the first step"
                ));
            }
            return Ok(None);
        };
        let path = settings.dir.join(name);
        let verified = match group {
            Some(group) => FoundCheckpoint::verify_part(&path, group),
            None => found_before(settings, &path)
                .cloned()
                .map_or_else(|| FoundCheckpoint::verify(&path), Ok),
        };
        let (found, damage) = match verified {
            Ok(found) => (Some(found), None),
            Err(error) if error.fault.is_corruption() => (None, Some(error.to_string())),
            Err(error) => return Err(Failure::checkpoint(error)),
        };
        let damage = agree(group, damage, |all| all.into_iter().flatten().next())?;
        let Some(damage) = damage else { return Ok(found) };
        if is_first {
            let aside = checkpoint::set_aside(&path).map_err(Failure::checkpoint)?;
            output::warn(&format!("{damage}; the checkpoint is now {}", aside.display()));
            has_set_aside = true;
        }
    }
}

/// Hint for a run whose sequences or targets are not those of its checkpoint.
const SAME_DATA: &str =
    "the same --data, --seed, --sequence-length, --last-target and --pad-id as before";

pub fn resume_failure(path: &Path, error: ResumeError) -> Failure {
    match error {
        ResumeError::File(error) => Failure::loading_checkpoint(error),
        ResumeError::Checkpoint(fault) => Failure::checkpoint(CheckpointError::new(path, fault)),
        ResumeError::Data(error) => {
            let file = path.join("state.json").display().to_string();
            let problem = Problem::new(file, error.fault.to_string()).field("field `cursor`");
            Failure::input(problem.hint(SAME_DATA))
        }
    }
}

/// Rejects an optimizer that counts other steps in the moments of a checkpoint than are in them: its bias correction would be
/// wrong.
pub fn require_same_moments(
    path: &Path,
    checkpoint: &ResumedState,
    trainer: &Trainer,
) -> CommandResult<()> {
    let step = checkpoint.step;
    let [stored, counted] = [&checkpoint.optimizer, trainer.optimizer()]
        .map(|optimizer| optimizer.steps_in_moments(step));
    if stored == counted {
        return Ok(());
    }
    let message = format!(
        "with these refreshes, AdamW's moments would be those of {} at step {step}, and those of {} are of {}",
        plural(counted, "step"),
        path.display(),
        plural(stored, "step"),
    );
    let hint = "the --optimizer and --loro-refresh-every of the checkpoint, or refreshes that agree with it up to this step";
    Err(Failure::input(Problem::new("--loro-refresh-every", message).hint(hint)))
}

/// Warns of each value that is not the checkpoint's, with which the loss curve is not that of a single run.
pub fn warn_of_other_recipe(
    path: &Path,
    checkpoint: &ResumedState,
    trainer: &Trainer,
    places: &RunPlaces,
) {
    let batch = |workload: Workload| workload.global_batch;
    let batch_now = batch(trainer.session().program().context.workload);
    let batch_before = checkpoint.origin.map_or(batch_now, |origin| batch(origin.workload));
    let dtype_before = checkpoint.gemm_dtype;
    let dtype_now = trainer.session().gemm_dtype().unwrap_or(dtype_before);
    let values = |optimizer, batch: u64, dtype: GemmDtype| {
        let others = [("--global-batch", batch.to_string()), ("--dtype", dtype.name().into())];
        let all = others.into_iter().chain(flags_of_optimizer(optimizer));
        all.collect::<BTreeMap<&str, String>>()
    };
    let before = values(&checkpoint.optimizer, batch_before, dtype_before);
    for (flag, now) in values(trainer.optimizer(), batch_now, dtype_now) {
        // A flag of LORO has no value before where the optimizer is another one, which has a warning of its own.
        if let Some(before) = before.get(flag)
            && *before != now
        {
            let (path, place) = (path.display(), places.name(flag));
            output::warn(&format!(
                "{place} is {now}, and {before} in {path}: the loss curve is not that of a single run"
            ));
        }
    }
}
