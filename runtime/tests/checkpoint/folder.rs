//! The checkpoint folder of a run, and the files of a checkpoint.

use std::fs;
use std::num::NonZeroU64;
use std::path::Path;

use narrows_plan::model::{self, presets};
use narrows_runtime::checkpoint::{
    CONFIG_FILE, Checkpoint, CheckpointFault, MODEL_FILE, Retention, SaveOptions, TensorFault,
    TokenizerFile, keep_only, latest, list, load, load_weights, save, stored_parameters,
};
use narrows_runtime::data::{LastTarget, TargetRule};
use narrows_runtime::{DecayedWeights, FactorRateScale, LearningRateSchedule, Loro, StepCount};
use safetensors::SafeTensors;

use crate::support::*;

fn at_step(checkpoint: &Checkpoint, step: u64) -> Checkpoint {
    Checkpoint { step, ..checkpoint.clone() }
}

fn names(dir: &Path) -> Vec<String> {
    let name = |entry: Result<fs::DirEntry, _>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = fs::read_dir(dir).unwrap().map(name).collect();
    names.sort();
    names
}

/// Nothing that a run reads depends on the companions, and weights are read without moments.
#[test]
fn companions_describe_the_model_and_its_tokens() {
    let models = ["cola-tiny", "llama-60m", "lax-60m"].map(|name| {
        let mut model = presets::find(name).unwrap();
        model.blocks.truncate(2);
        (model.vocab, model.max_sequence_length) = (256, 64);
        model
    });
    for (model, class) in models.into_iter().zip([Some("cola"), Some("llama"), None]) {
        let checkpoint = trained(&model);
        let dir = tempfile::tempdir().unwrap();
        let contents = b"{}".to_vec();
        let tokenizer = [TokenizerFile { name: "tokenizer.json".into(), contents }];
        let options = SaveOptions { retention: keep(1).into(), tokenizer: &tokenizer };
        let path = save(dir.path(), &checkpoint, &model, options).unwrap();
        let read = |name: &str| {
            let text = fs::read_to_string(path.join(name)).ok()?;
            Some(model::read(name, &text).unwrap())
        };
        assert_eq!(read(MODEL_FILE).as_ref(), Some(&model));
        let config = read(CONFIG_FILE);
        assert_eq!(config.map(|config| config.blocks), class.map(|_| model.blocks.clone()));
        assert_eq!(fs::read(path.join("tokenizer.json")).unwrap(), b"{}");
        assert!(load_weights(&path, &model).unwrap() == checkpoint.weights);
        for name in [MODEL_FILE, "tokenizer.json"] {
            fs::remove_file(path.join(name)).unwrap();
        }
        assert!(load(&path, &model).unwrap() == checkpoint);
    }
}

#[test]
fn files_have_the_names_and_layouts_of_hugging_face() {
    let model = small_model(false);
    let checkpoint = trained(&model);
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), &checkpoint, &model, keep(1)).unwrap();
    let files = ["manifest.json", "model.json", "model.safetensors", "optimizer.safetensors"];
    assert_eq!(names(&path), [&files[..], &["state.json"]].concat());
    let bytes = fs::read(path.join("model.safetensors")).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.len(), stored_parameters(&model).len());
    let element = |name: &str, index: usize| {
        let data = file.tensor(name).unwrap().data().to_vec();
        f32::from_le_bytes(data[4 * index..][..4].try_into().unwrap())
    };
    // Dense matrices and the head are (in, out) in memory and (out, in) in the file.
    let (row, column) = (3, 17);
    let o = &checkpoint.weights[&DENSE_O];
    assert_eq!(
        element("model.layers.1.self_attn.o_proj.weight", column * 32 + row),
        o[row * 32 + column]
    );
    let head = &checkpoint.weights[&HEAD];
    assert_eq!(element("lm_head.weight", column * 32 + row), head[row * 64 + column]);
    // Factors and the embedding have the same layout in both.
    let a = &checkpoint.weights[&FACTOR_K];
    assert_eq!(element("model.layers.2.self_attn.k_proj.cola_a", row * 16 + 5), a[row * 16 + 5]);
    let embedding = &checkpoint.weights[&EMBEDDING];
    assert_eq!(
        element("model.embed_tokens.weight", column * 32 + row),
        embedding[column * 32 + row]
    );
    for name in ["lax_gate_u", "lax_gate_v", "lax_norm.weight", "lax_norm.bias"] {
        file.tensor(&format!("model.layers.1.mlp.down_proj.{name}")).unwrap();
    }
    file.tensor("model.layers.2.mlp.up_proj.lax_gate").unwrap();
    let moments = fs::read(path.join("optimizer.safetensors")).unwrap();
    let moments = SafeTensors::deserialize(&moments).unwrap();
    assert_eq!(moments.len(), 2 * file.len());
    let moment = moments.tensor("model.layers.1.self_attn.o_proj.weight.first_moment").unwrap();
    assert_eq!(moment.shape(), [32, 32]);
    let state = fs::read_to_string(path.join("state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_str(&state).unwrap();
    assert_eq!(state["step"], 2);
    assert_eq!(state["cursor"]["seed"], u64::MAX);
    assert_eq!(state["made_under"]["mesh"]["tensor"], 1);
}

#[test]
fn a_tied_head_is_not_in_the_file() {
    let model = small_model(true);
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), &trained(&model), &model, keep(1)).unwrap();
    let bytes = fs::read(path.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert!(file.tensor("lm_head.weight").is_err());
    assert!(file.tensor("model.embed_tokens.weight").is_ok());
}

#[test]
fn extreme_values_round_trip() {
    let model = small_model(false);
    let mut checkpoint = trained(&model);
    checkpoint.optimizer.clip_norm = f64::INFINITY;
    checkpoint.optimizer.peak_learning_rate = 0.1 + 0.2;
    checkpoint.optimizer.epsilon = f64::MIN_POSITIVE / 4.0;
    checkpoint.optimizer.schedule =
        LearningRateSchedule::CosineRestarts { restart_every: u64::MAX, restart_warm_up_steps: 0 };
    checkpoint.optimizer.step_count = StepCount::FromZero;
    checkpoint.optimizer.decayed = DecayedWeights::All;
    checkpoint.optimizer.loro = Some(Loro {
        exact_every: NonZeroU64::MAX,
        refresh_every: 0,
        rate_scale: FactorRateScale::Constant(0.1 + 0.2),
    });
    checkpoint.cursor.targets = TargetRule { last: LastTarget::Ignored, pad_id: Some(u32::MAX) };
    checkpoint.step = u64::MAX;
    checkpoint.origin = None;
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), &checkpoint, &model, keep(1)).unwrap();
    assert!(load(&path, &model).unwrap() == checkpoint);
    assert_eq!(latest(dir.path()).unwrap(), Some(path));
    checkpoint.optimizer.loro = checkpoint
        .optimizer
        .loro
        .map(|loro| Loro { rate_scale: FactorRateScale::RankOverHidden, ..loro });
    checkpoint.optimizer.schedule = LearningRateSchedule::LoroCosineRestarts {
        restart_every: 1,
        restart_warm_up_steps: u64::MAX,
        adjust_steps: i64::MIN,
    };
    let path = save(dir.path(), &checkpoint, &model, keep(1)).unwrap();
    assert!(load(&path, &model).unwrap() == checkpoint);
}

/// Fields that earlier versions did not write are absent where they have their defaults, so that those versions read
/// the file, and files of those versions are read.
#[test]
fn a_default_run_writes_the_fields_of_earlier_versions() {
    let model = small_model(false);
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), &trained(&model), &model, keep(1)).unwrap();
    let text = fs::read_to_string(path.join("state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_str(&text).unwrap();
    let keys = |value: &serde_json::Value| -> Vec<String> {
        value.as_object().unwrap().keys().cloned().collect()
    };
    assert_eq!(
        keys(&state),
        ["format", "step", "seed", "model", "cursor", "optimizer", "made_under"]
    );
    assert_eq!(
        keys(&state["cursor"]),
        ["next_sequence", "seed", "sequence_length", "tokens_sha256"]
    );
    let of_optimizer = "peak_learning_rate warm_up_steps total_steps final_fraction beta1 beta2 epsilon weight_decay \
        clip_norm";
    assert_eq!(keys(&state["optimizer"]), of_optimizer.split_whitespace().collect::<Vec<_>>());
}

#[test]
fn the_newest_checkpoints_are_kept() {
    let model = small_model(false);
    let checkpoint = trained(&model);
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("made/if/missing");
    assert_eq!(latest(&dir).unwrap(), None);
    for step in [98, 99, 100, 101] {
        let path = save(&dir, &at_step(&checkpoint, step), &model, keep(2)).unwrap();
        assert_eq!(latest(&dir).unwrap(), Some(path));
    }
    assert_eq!(names(&dir), ["step-00000100", "step-00000101"]);
    // Checkpoints of later steps belong to another run and are kept.
    save(&dir, &at_step(&checkpoint, 50), &model, keep(1)).unwrap();
    save(&dir, &at_step(&checkpoint, 51), &model, keep(1)).unwrap();
    assert_eq!(names(&dir), ["step-00000051", "step-00000100", "step-00000101"]);
    let steps: Vec<u64> = list(&dir).unwrap().iter().map(|checkpoint| checkpoint.step).collect();
    assert_eq!(steps, [101, 100, 51]);
}

/// The folder of the best checkpoint.
#[test]
fn the_only_checkpoint_replaces_earlier_and_later_ones() {
    let model = small_model(false);
    let checkpoint = trained(&model);
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for step in [5, 20, 30] {
        save(dir, &at_step(&checkpoint, step), &model, keep(9)).unwrap();
    }
    fs::write(dir.join("step-00000030/model.safetensors"), "damaged").unwrap();
    save(dir, &at_step(&checkpoint, 10), &model, Retention::Only).unwrap();
    assert_eq!(names(dir), ["step-00000010", "step-00000030"], "damaged ones remain");
    // As if killed before the others were removed.
    for step in [9, 20] {
        save(dir, &at_step(&checkpoint, step), &model, keep(9)).unwrap();
    }
    keep_only(dir, 11).unwrap();
    assert_eq!(names(dir).len(), 4, "nothing is removed where that checkpoint does not exist");
    keep_only(dir, 10).unwrap();
    assert_eq!(names(dir), ["step-00000010", "step-00000030"]);
}

#[test]
fn the_checkpoint_of_a_step_can_be_replaced() {
    let model = small_model(false);
    let mut checkpoint = trained(&model);
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), &checkpoint, &model, keep(1)).unwrap();
    checkpoint.seed = 99;
    let path = save(dir.path(), &checkpoint, &model, keep(1)).unwrap();
    assert_eq!(load(&path, &model).unwrap().seed, 99);
    assert_eq!(names(dir.path()), ["step-00000002"]);
    // As if killed between the two renames.
    let replaced = dir.path().join("step-00000002.replaced");
    fs::rename(&path, &replaced).unwrap();
    fs::create_dir(dir.path().join(".narrows-checkpoint-abc.tmp")).unwrap();
    assert_eq!(latest(dir.path()).unwrap(), Some(replaced.clone()));
    assert!(load(&replaced, &model).unwrap() == checkpoint);
    save(dir.path(), &at_step(&checkpoint, 3), &model, keep(2)).unwrap();
    assert_eq!(names(dir.path()), ["step-00000002.replaced", "step-00000003"]);
    save(dir.path(), &at_step(&checkpoint, 4), &model, keep(2)).unwrap();
    assert_eq!(names(dir.path()), ["step-00000003", "step-00000004"]);
}

#[test]
fn temporary_folders_are_removed_and_other_entries_are_kept() {
    let model = small_model(false);
    let checkpoint = trained(&model);
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for name in [".narrows-checkpoint-x1Y2.tmp", "step-1", "step-00000001x", "notes", "step-"] {
        fs::create_dir(dir.join(name)).unwrap();
        fs::write(dir.join(name).join("model.safetensors"), "partial").unwrap();
    }
    assert_eq!(latest(dir).unwrap(), None);
    save(dir, &checkpoint, &model, keep(1)).unwrap();
    assert_eq!(names(dir), ["notes", "step-", "step-00000001x", "step-00000002", "step-1"]);
}

#[test]
fn incomplete_checkpoints_are_skipped() {
    let model = small_model(false);
    let checkpoint = trained(&model);
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let complete = save(dir, &at_step(&checkpoint, 1), &model, keep(5)).unwrap();
    let truncated = save(dir, &at_step(&checkpoint, 2), &model, keep(5)).unwrap();
    let bytes = fs::read(truncated.join("optimizer.safetensors")).unwrap();
    fs::write(truncated.join("optimizer.safetensors"), &bytes[..bytes.len() - 1]).unwrap();
    fs::create_dir(dir.join("step-00000003")).unwrap();
    fs::write(dir.join("step-00000005"), "no folder").unwrap();
    let damaged = save(dir, &at_step(&checkpoint, 4), &model, keep(9)).unwrap();
    for damage in [("\"format\"", "\"formau\""), ("narrows-checkpoint/1", "narrovs-checkpoint/1")] {
        let manifest = damaged.join("manifest.json");
        let text = fs::read_to_string(&manifest).unwrap();
        fs::write(&manifest, text.replace(damage.0, damage.1)).unwrap();
        assert_eq!(latest(dir).unwrap(), Some(complete.clone()), "{damage:?}");
        fs::write(&manifest, text).unwrap();
    }
    assert_eq!(latest(dir).unwrap(), Some(damaged.clone()));
    fs::remove_dir_all(damaged).unwrap();
    fs::remove_file(complete.join("state.json")).unwrap();
    let error = latest(dir).unwrap_err();
    assert_eq!(error.path, dir.join("step-00000003/manifest.json"));
    assert!(matches!(error.fault, CheckpointFault::Missing));
}

/// A newer program wrote them: an older checkpoint is no substitute.
#[test]
fn checkpoints_of_a_newer_format_are_not_skipped() {
    let model = small_model(false);
    let checkpoint = trained(&model);
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), &at_step(&checkpoint, 1), &model, keep(5)).unwrap();
    let newer = save(dir.path(), &at_step(&checkpoint, 2), &model, keep(5)).unwrap();
    let manifest = newer.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    let text = text.replace("narrows-checkpoint/1", "narrows-checkpoint/999");
    fs::write(&manifest, text).unwrap();
    let error = latest(dir.path()).unwrap_err();
    assert!(matches!(error.fault, CheckpointFault::NewerFormat { .. }), "{error:?}");
}

#[test]
fn incomplete_contents_are_not_saved() {
    let model = small_model(false);
    let whole = trained(&model);
    let dir = tempfile::tempdir().unwrap();
    let rejection = |checkpoint: &Checkpoint| {
        let error = save(dir.path(), checkpoint, &model, keep(1)).unwrap_err();
        assert!(names(dir.path()).is_empty());
        error.fault
    };
    let mut other = whole.clone();
    other.first_moments.remove(&DENSE_O);
    let missing = |fault: &TensorFault| *fault == TensorFault::Missing;
    assert!(matches!(rejection(&other), CheckpointFault::Tensor { fault, .. } if missing(&fault)));
    let mut other = whole.clone();
    other.weights.get_mut(&HEAD).unwrap().pop();
    let short = TensorFault::ElementCountMismatch { expected: 2048, actual: 2047 };
    assert!(matches!(rejection(&other), CheckpointFault::Tensor { fault, .. } if fault == short));
    let other = Checkpoint { model_fingerprint: "of another".into(), ..whole };
    assert!(matches!(rejection(&other), CheckpointFault::ModelMismatch { .. }));
}
