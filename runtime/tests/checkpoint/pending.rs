//! Checkpoints that are written while the run goes on, and checkpoints that were verified before.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use narrows_plan::Zero;
use narrows_runtime::checkpoint::{
    CheckpointFault, FoundCheckpoint, PendingSave, ResumeError, SaveMode, latest,
};

use crate::support::*;

const TEXT: &[u8] = b"It was the best of times, it was the worst of times, ";

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let name = |entry: &fs::DirEntry| entry.file_name().into_string().unwrap();
    entries.map(|entry| (name(&entry), fs::read(entry.path()).unwrap())).collect()
}

#[test]
fn a_checkpoint_written_behind_later_steps_is_that_of_its_own_step() {
    let model = small_model(false);
    let folder = tempfile::tempdir().unwrap();
    for (seed, zero) in [(1, Zero::Off), (2, Zero::One)] {
        let plan = plan(&model, seed, mesh(1, 1, 2), zero);
        let save = |mode: SaveMode| {
            let dir = folder.path().join(format!("{mode:?}-{seed}"));
            let mut run = trainer(&model, &plan, &TEXT.repeat(2));
            (0..3).for_each(|_| drop(run.step().unwrap()));
            let pending = PendingSave::begin(&dir, &run, (&model, SEED), mode).unwrap();
            assert_eq!(pending.step(), 3);
            assert_eq!(latest(&dir).unwrap(), None, "not before it is committed");
            let losses: Vec<f64> = (0..3).map(|_| run.step().unwrap().loss).collect();
            (pending.commit(keep(1)).unwrap(), losses)
        };
        let (blocking, losses) = save(SaveMode::Blocking);
        let (background, others) = save(SaveMode::Background);
        assert_eq!(losses, others);
        assert!(files(&blocking) == files(&background), "the files differ");
        let mut resumed = trainer(&model, &plan, &TEXT.repeat(2));
        FoundCheckpoint::open(&background).unwrap().resume(&mut resumed, &model).unwrap();
        let rest: Vec<f64> = (0..3).map(|_| resumed.step().unwrap().loss).collect();
        assert_eq!(rest, losses);
    }
}

#[test]
fn a_save_that_is_not_committed_leaves_nothing() {
    let model = small_model(false);
    let folder = tempfile::tempdir().unwrap();
    let plan = plan(&model, 1, mesh(1, 1, 1), Zero::Off);
    let run = trainer(&model, &plan, TEXT);
    for mode in [SaveMode::Blocking, SaveMode::Background] {
        let pending = PendingSave::begin(folder.path(), &run, (&model, SEED), mode).unwrap();
        while !pending.is_written() {
            std::thread::yield_now();
        }
        drop(pending);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

/// The checksum of each file is computed once where the checkpoint was verified before: a change between that and the
/// resumption is not noticed.
#[test]
fn a_verified_checkpoint_is_not_hashed_again() {
    let model = small_model(false);
    let folder = tempfile::tempdir().unwrap();
    let plan = plan(&model, 1, mesh(1, 1, 1), Zero::Off);
    let mut run = trainer(&model, &plan, TEXT);
    run.step().unwrap();
    let pending =
        PendingSave::begin(folder.path(), &run, (&model, SEED), SaveMode::Blocking).unwrap();
    let path = pending.commit(keep(1)).unwrap();
    let verified = FoundCheckpoint::verify(&path).unwrap();
    let weights = path.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    assert!(verified.is_unchanged());
    verified.resume(&mut run, &model).unwrap();
    let unverified = FoundCheckpoint::open(&path).unwrap();
    let Err(ResumeError::File(error)) = unverified.resume(&mut run, &model) else {
        panic!("not refused")
    };
    assert!(matches!(error.fault, CheckpointFault::ChecksumMismatch { .. }), "{error}");
    assert!(FoundCheckpoint::verify(&path).is_err());
    // Another run has replaced the checkpoint.
    fs::write(&weights, "short").unwrap();
    assert!(!verified.is_unchanged());
}
