//! Corrupted, foreign and forged checkpoints are rejected with a location and never cause a panic.

use std::fs;
use std::path::{Path, PathBuf};

use narrows_runtime::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFault, FoundCheckpoint, TensorFault, load, save,
};
use narrows_runtime::sha256;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use tempfile::TempDir;

use crate::support::*;
use narrows_test_support::plans::TestRng;

const FILES: [&str; 4] =
    ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"];

/// A saved checkpoint, whose files the tests corrupt.
struct CheckpointFixture {
    folder: TempDir,
    path: PathBuf,
    checkpoint: Checkpoint,
}

impl CheckpointFixture {
    fn new() -> CheckpointFixture {
        let folder = tempfile::tempdir().unwrap();
        let model = small_model(false);
        let checkpoint = trained(&model);
        let path = save(folder.path(), &checkpoint, &model, keep(1)).unwrap();
        CheckpointFixture { folder, path, checkpoint }
    }

    fn load(&self) -> Result<Checkpoint, CheckpointError> {
        load(&self.path, &small_model(false))
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.path.join(name)).unwrap()
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path.join(name), bytes).unwrap();
    }

    /// Writes a file and adapts the manifest to it.
    fn forge(&self, name: &str, bytes: &[u8]) {
        self.write(name, bytes);
        let mut manifest: serde_json::Value =
            serde_json::from_slice(&self.bytes("manifest.json")).unwrap();
        manifest["files"][name]["bytes"] = bytes.len().into();
        manifest["files"][name]["sha256"] = hex::encode(sha256(bytes)).into();
        self.write("manifest.json", manifest.to_string().as_bytes());
    }

    /// The fault of loading, which must be in this file.
    fn fault_of(&self, name: &str) -> CheckpointFault {
        let Err(error) = self.load() else { panic!("the corruption of {name} is not detected") };
        assert_eq!(error.path, self.path.join(name), "{error}");
        assert!(error.fault.hint().is_some(), "{error}");
        error.fault
    }
}

#[test]
fn truncated_files_are_rejected() {
    let saved = CheckpointFixture::new();
    let mut rng = TestRng::new(1);
    for name in FILES {
        let bytes = saved.bytes(name);
        let random = (0..20).map(|_| rng.below(bytes.len() - 1));
        // Not the last byte, because a manifest is valid without its final newline.
        for length in random.chain([0, 1, 7, 8, 9, bytes.len() - 2]) {
            saved.write(name, &bytes[..length]);
            match (name, saved.fault_of(name)) {
                ("manifest.json", CheckpointFault::InvalidField { .. }) => {}
                (_, CheckpointFault::LengthMismatch { actual, .. }) => {
                    assert_eq!(actual, length as u64)
                }
                (_, other) => panic!("{name} at {length}: {other}"),
            }
        }
        saved.write(name, &[&bytes[..], b"x"].concat());
        saved.fault_of(name);
        saved.write(name, &bytes);
    }
    assert!(saved.load().unwrap() == saved.checkpoint);
}

#[test]
fn every_flipped_bit_is_detected() {
    let saved = CheckpointFixture::new();
    let mut rng = TestRng::new(2);
    for name in FILES {
        let mut bytes = saved.bytes(name);
        let bits = bytes.len() * 8;
        // The manifest has no checksum: flip one bit of each of its bytes.
        let each = 0..if name == "manifest.json" { bytes.len() } else { 0 };
        let each: Vec<usize> = each.map(|byte| 8 * byte + rng.below(8)).collect();
        for bit in (0..40).map(|_| rng.below(bits)).chain(each) {
            bytes[bit / 8] ^= 1 << (bit % 8);
            saved.write(name, &bytes);
            let Err(error) = saved.load() else {
                panic!("{name}: flipping bit {bit} is not detected")
            };
            let checksum = matches!(error.fault, CheckpointFault::ChecksumMismatch { .. });
            assert!(checksum || name == "manifest.json", "{error}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        saved.write(name, &bytes);
    }
    assert!(saved.load().unwrap() == saved.checkpoint);
}

#[test]
fn missing_and_exchanged_files_are_reported() {
    let saved = CheckpointFixture::new();
    for name in FILES {
        let (path, aside) = (saved.path.join(name), saved.folder.path().join("aside"));
        fs::rename(&path, &aside).unwrap();
        assert!(matches!(saved.fault_of(name), CheckpointFault::Missing));
        fs::create_dir(&path).unwrap();
        assert!(matches!(saved.fault_of(name), CheckpointFault::NotRegularFile));
        fs::remove_dir(&path).unwrap();
        fs::rename(&aside, &path).unwrap();
    }
    let (model, moments) = (saved.bytes(FILES[1]), saved.bytes(FILES[2]));
    saved.write(FILES[1], &moments);
    saved.write(FILES[2], &model);
    assert!(matches!(saved.fault_of(FILES[1]), CheckpointFault::LengthMismatch { .. }));
    // With an adapted manifest the tensors are still those of the other file.
    saved.forge(FILES[1], &moments);
    saved.forge(FILES[2], &model);
    let fault = saved.fault_of(FILES[1]);
    assert!(
        matches!(&fault, CheckpointFault::Tensor { fault: TensorFault::Unknown, .. }),
        "{fault}"
    );
    // A file of another step of the same run has the same size.
    let other = CheckpointFixture::new();
    let mut later = other.checkpoint.clone();
    later.weights.get_mut(&HEAD).unwrap()[0] += 1.0;
    later.step += 1;
    let later = save(other.folder.path(), &later, &small_model(false), keep(2)).unwrap();
    fs::copy(later.join(FILES[1]), other.path.join(FILES[1])).unwrap();
    assert!(matches!(other.fault_of(FILES[1]), CheckpointFault::ChecksumMismatch { .. }));
}

#[test]
fn other_models_are_rejected() {
    let saved = CheckpointFixture::new();
    let error = load(&saved.path, &small_model(true)).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.path, saved.path.join("state.json"));
    assert!(text.contains("field `model`: the checkpoint is of the model `"), "{text}");
    assert!(text.contains(&small_model(true).fingerprint()), "{text}");
    let mut renamed = small_model(false);
    renamed.name = "the same under another name".into();
    assert!(load(&saved.path, &renamed).unwrap() == saved.checkpoint);
}

#[test]
fn other_formats_are_rejected() {
    let saved = CheckpointFixture::new();
    let format = "\"narrows-checkpoint/1\"";
    let newer = "this program reads 2";
    for (written, expected) in [
        ("\"narrows-checkpoint/3\"", newer),
        ("\"narrows-checkpoint/18446744073709551615\"", newer),
        ("\"narrows-checkpoint/01\"", "is not the format of a checkpoint"),
        ("\"narrows-model/1\"", "field `format`: `\"narrows-model/1\"` is not the format"),
        ("17", "field `format`: `17` is not the format"),
    ] {
        for name in ["manifest.json", "state.json"] {
            let before = saved.bytes(name);
            let manifest = saved.bytes("manifest.json");
            let text = String::from_utf8(before.clone()).unwrap();
            assert!(text.contains(format), "{text}");
            let text = text.replace(format, written);
            if name == "state.json" {
                saved.forge(name, text.as_bytes());
            } else {
                saved.write(name, text.as_bytes());
            }
            let error = saved.load().unwrap_err();
            assert_eq!(error.path, saved.path.join(name));
            assert!(error.to_string().contains(expected), "{error}");
            saved.write(name, &before);
            saved.write("manifest.json", &manifest);
        }
    }
}

#[test]
fn invalid_fields_are_reported() {
    let saved = CheckpointFixture::new();
    let state: serde_json::Value = serde_json::from_slice(&saved.bytes("state.json")).unwrap();
    let message = |edit: &dyn Fn(&mut serde_json::Value)| {
        let mut state = state.clone();
        edit(&mut state);
        saved.forge("state.json", state.to_string().as_bytes());
        let fault = saved.fault_of("state.json");
        format!("{}: {fault}", fault.location().unwrap_or_default())
    };
    let text = message(&|state| state["step"] = (-1).into());
    assert!(text.starts_with("field `step`: expected a whole number from 0, found -1"), "{text}");
    let text = message(&|state| state["optimizer"]["clip_norm"] = "lots".into());
    assert!(text.starts_with("field `optimizer.clip_norm`: `lots` is not a number"), "{text}");
    let text = message(&|state| state["cursor"]["next"] = 1.into());
    assert!(text.starts_with("field `cursor.next`: is an unknown field"), "{text}");
    let text = message(&|state| drop(state.as_object_mut().unwrap().remove("seed")));
    assert!(text.starts_with("field `seed`: is missing"), "{text}");
}

/// A manifest that was edited with its file agrees with it.
#[test]
fn a_step_that_is_not_that_of_the_folder_is_refused() {
    let saved = CheckpointFixture::new();
    let mut state: serde_json::Value = serde_json::from_slice(&saved.bytes("state.json")).unwrap();
    let step = state["step"].as_u64().unwrap();
    state["step"] = (step + 1).into();
    saved.forge("state.json", state.to_string().as_bytes());
    let fault = saved.fault_of("state.json");
    let expected = format!("is {}, and the name of the folder has {step}", step + 1);
    assert_eq!(fault.to_string(), expected);
    assert_eq!(fault.location().as_deref(), Some("field `step`"));
    assert!(fault.is_corruption());
    assert!(FoundCheckpoint::verify(&saved.path).is_err());
    // A copy of a checkpoint may have another name.
    let copy = saved.folder.path().join("copy");
    fs::rename(&saved.path, &copy).unwrap();
    assert_eq!(load(&copy, &small_model(false)).unwrap().step, step + 1);
}

/// Verification, by which a run chooses its checkpoint, finds all damage that loading finds without the model.
#[test]
fn verification_reads_the_headers_of_tensors() {
    let saved = CheckpointFixture::new();
    FoundCheckpoint::verify(&saved.path).unwrap();
    for name in ["model.safetensors", "optimizer.safetensors"] {
        let intact = saved.bytes(name);
        let cut = &intact[..intact.len() - 4];
        let longer = [&intact[..], &[0; 4]].concat();
        let mut header = intact.clone();
        header[9] = b'!';
        let mut length = intact.clone();
        length[7] = 1;
        for bytes in [cut, &longer, &header, &length, &intact[..5], &[]] {
            saved.forge(name, bytes);
            assert!(matches!(saved.fault_of(name), CheckpointFault::InvalidHeader { .. }));
            let error = FoundCheckpoint::verify(&saved.path).unwrap_err();
            assert!(error.path.ends_with(name) && error.fault.is_corruption(), "{error}");
        }
        saved.forge(name, &intact);
        FoundCheckpoint::verify(&saved.path).unwrap();
    }
}

/// A file with one tensor replaced or removed.
fn replace_tensor(bytes: &[u8], name: &str, to: Option<(&str, Dtype, Vec<usize>)>) -> Vec<u8> {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let tensors: Vec<(String, TensorView)> = file
        .iter()
        .filter_map(|(tensor, view)| match &to {
            Some((new_name, dtype, shape)) if tensor == name => {
                let view = TensorView::new(*dtype, shape.clone(), view.data()).unwrap();
                Some((new_name.to_string(), view))
            }
            None if tensor == name => None,
            _ => Some((tensor.to_string(), view)),
        })
        .collect();
    serialize(tensors, None).unwrap()
}

#[test]
fn invalid_tensors_are_reported() {
    let saved = CheckpointFixture::new();
    let bytes = saved.bytes("model.safetensors");
    let name = "model.layers.1.self_attn.q_proj.cola_a";
    let fault = |to| {
        saved.forge("model.safetensors", &replace_tensor(&bytes, name, to));
        match saved.fault_of("model.safetensors") {
            CheckpointFault::Tensor { tensor, fault } => (tensor, fault),
            other => panic!("{other}"),
        }
    };
    assert_eq!(fault(None), (name.into(), TensorFault::Missing));
    let unknown = ("another".to_string(), TensorFault::Unknown);
    assert_eq!(fault(Some(("another", Dtype::F32, vec![32, 16]))), unknown);
    let dtype = TensorFault::NotF32 { actual: "I32".into() };
    assert_eq!(fault(Some((name, Dtype::I32, vec![32, 16]))), (name.into(), dtype));
    let shape = TensorFault::ShapeMismatch { expected: vec![32, 16], actual: vec![16, 32] };
    assert_eq!(fault(Some((name, Dtype::F32, vec![16, 32]))), (name.into(), shape));
    // The order of tensors and the metadata do not matter.
    let same = replace_tensor(&bytes, name, Some((name, Dtype::F32, vec![32, 16])));
    saved.forge("model.safetensors", &same);
    assert!(saved.load().unwrap() == saved.checkpoint);
}

#[test]
fn arbitrary_bytes_never_panic() {
    let saved = CheckpointFixture::new();
    let originals: Vec<Vec<u8>> = FILES.iter().map(|name| saved.bytes(name)).collect();
    arbtest::arbtest(|u| {
        let at = u.choose_index(FILES.len())?;
        let mut bytes = originals[at].clone();
        // Headers and JSON, not tensor elements.
        let header = bytes.len().min(4000);
        for _ in 0..u.int_in_range(1..=6)? {
            let end = header.min(bytes.len());
            let from = u.int_in_range(0..=end)?;
            match u.int_in_range(0..=4)? {
                0 if from < bytes.len() => bytes[from] = u.arbitrary()?,
                1 => bytes.truncate(from),
                2 => drop(bytes.splice(from..from, u.arbitrary::<[u8; 3]>()?)),
                3 if from + 8 <= bytes.len() => {
                    bytes[from..from + 8].copy_from_slice(&u.arbitrary::<u64>()?.to_le_bytes());
                }
                _ if from < bytes.len() => {
                    let digit = b"0123456789-e\"[]{}:,n"[u.choose_index(20)?];
                    bytes[from] = digit;
                }
                _ => {}
            }
        }
        restore(&saved.path, &originals);
        if FILES[at] == "manifest.json" {
            saved.write(FILES[at], &bytes);
        } else {
            saved.forge(FILES[at], &bytes);
        }
        if let Err(error) = saved.load() {
            assert!(!error.to_string().is_empty());
        }
        Ok(())
    })
    .budget_ms(2_000);
    restore(&saved.path, &originals);
    assert!(saved.load().unwrap() == saved.checkpoint);
}

fn restore(path: &Path, originals: &[Vec<u8>]) {
    for (name, bytes) in FILES.iter().zip(originals) {
        fs::write(path.join(name), bytes).unwrap();
    }
}
