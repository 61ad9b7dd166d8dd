//! Damaged files in the readers of all libraries, hundreds a second on two busy cores.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use arbtest::arbtest;
use narrows_calibration::measurements::{self, Citation};
use narrows_calibration::{CsvDefaults, measurements_from_csv, measurements_from_rows};
use narrows_cost_model::profile;
use narrows_plan::model::{self, Model};
use narrows_plan::strategy::Recompute;
use narrows_plan::{CheckedProgram, Plan, lower};
use narrows_runtime::checkpoint::{self, FoundCheckpoint};
use narrows_runtime::data::{Sampler, SamplerConfig, TargetRule, TokenFile};
use narrows_runtime::interchange::import_weights;
use narrows_runtime::sha256;
use narrows_test_support::damage::damaged;
use serde_json::Value;
use tempfile::TempDir;

use super::fixture::{copy_folder, fixture};

/// Attempts of one seed.
const DAMAGES: u64 = 50;
/// Largest batch of a damaged plan that is lowered, so that the attempt is short.
const BATCH_MAX: u64 = 64;
/// Bytes of random choices of a damage.
const ENTROPY_BYTES: u64 = 256;

/// A reader with the name of a file that it reads. It panics where an error has no message.
struct Reader {
    file: &'static str,
    read: fn(&Path),
}

const READERS: &[Reader] = &[
    Reader { file: "plan.json", read: plan },
    Reader { file: "small.json", read: |file| expect_message(model::read("m.json", &text(file))) },
    Reader { file: "ranks.json", read: |file| expect_message(model::read("m.json", &text(file))) },
    Reader { file: "config.json", read: |file| expect_message(model::read("c.json", &text(file))) },
    Reader { file: "profile.json", read: |file| expect_message(profile::read(&text(file))) },
    Reader {
        file: "measurements.json",
        read: |file| expect_message(measurements::read(&text(file))),
    },
    Reader { file: "rows.csv", read: csv },
    Reader {
        file: "rows.json",
        read: |file| expect_message(measurements_from_rows(&text(file), "rows", None)),
    },
    Reader { file: "t.tokens", read: tokens },
    Reader { file: "gpt2.bin", read: tokens },
    Reader { file: "kept/step-00000002/manifest.json", read: checkpoint },
    Reader { file: "kept/step-00000002/state.json", read: checkpoint },
    Reader { file: "kept/step-00000002/model.safetensors", read: checkpoint },
    Reader { file: "kept/step-00000002/model.safetensors", read: forged_checkpoint },
    Reader { file: "kept/step-00000002/optimizer.safetensors", read: forged_checkpoint },
    Reader { file: "kept/step-00000002/state.json", read: forged_checkpoint },
    Reader { file: "shards/step-00000002/manifest.json", read: checkpoint },
    Reader { file: "shards/step-00000002/model-00001-of-00002.safetensors", read: checkpoint },
    Reader {
        file: "shards/step-00000002/model-00001-of-00002.safetensors",
        read: forged_checkpoint,
    },
    Reader { file: "exported/model.safetensors", read: weights },
    Reader {
        file: "exported/config.json",
        read: |file| expect_message(model::read("c", &text(file))),
    },
];

/// Seed of [`arbtest`] for the attempt of a seed: the upper half are its random bits, and the lower half is the number of
/// bytes that it draws.
pub fn arbtest_seed(seed: u64) -> u64 {
    // The finalizer of splitmix64: seeds of consecutive attempts differ by one.
    let mixed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    // Random bits that are all zero stay zero.
    ((mixed | 1) << 32) | ENTROPY_BYTES
}

/// Damages the file of one reader a number of times, and reads it. The first attempt reads all that once broke a reader.
pub fn attempt(seed: u64) {
    static FOUND: OnceLock<()> = OnceLock::new();
    FOUND.get_or_init(read_what_was_found);
    let reader = &READERS[(seed % READERS.len() as u64) as usize];
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        copy_folder(fixture(), folder.path()).expect("a copy");
        folder
    });
    let file = folder.path().join(reader.file);
    let undamaged = fs::read(&file).expect("a file of the fixture");
    (reader.read)(&file);
    for index in 0..DAMAGES {
        let damage = arbtest_seed(seed.wrapping_mul(DAMAGES).wrapping_add(index));
        arbtest(|u| {
            fs::write(&file, damaged(u, &undamaged)?).expect("a writable file");
            (reader.read)(&file);
            Ok(())
        })
        .seed(damage);
    }
    fs::write(&file, undamaged).expect("a writable file");
}

/// Reads the files of `corpus/found`, whose names end as those of the files of readers do.
fn read_what_was_found() {
    let folder = fixture().join("found");
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        for reader in READERS.iter().filter(|reader| name.ends_with(reader.file)) {
            (reader.read)(&entry.path());
        }
    }
}

/// The text of a file; damaged characters are replaced.
fn text(file: &Path) -> String {
    String::from_utf8_lossy(&fs::read(file).expect("a file")).into_owned()
}

fn expect_message<T, E: ToString>(result: Result<T, E>) {
    if let Err(error) = result {
        assert!(!error.to_string().is_empty(), "an error without a message");
    }
}

/// The model of the fixture.
fn small_model() -> Model {
    let name = fixture().join("small.json").display().to_string();
    model::read(&name, &text(Path::new(&name))).expect("a valid model")
}

/// Reads, resolves, lowers and checks a plan.
fn plan(file: &Path) {
    let plan = match Plan::read(&text(file)) {
        Ok(plan) => plan,
        Err(error) => return expect_message(Err::<(), _>(error)),
    };
    let work = plan.workload;
    let sizes = [
        work.global_batch,
        work.sequence_length,
        plan.mesh.tensor,
        plan.mesh.pipeline,
        plan.mesh.data,
    ];
    if sizes.into_iter().any(|size| size > BATCH_MAX) {
        return;
    }
    match plan.resolve(&small_model()) {
        Ok(resolved) => expect_message(CheckedProgram::check(lower(&resolved))),
        Err(error) => expect_message(Err::<(), _>(error)),
    }
}

fn csv(file: &Path) {
    let defaults = CsvDefaults {
        name: "rows".into(),
        source: Citation { citation: "none".into(), conditions: String::new() },
        hardware: "a100-80gb-8".into(),
        vocabulary: 51_200,
        recompute: Recompute::None,
    };
    expect_message(measurements_from_csv(&text(file), &defaults));
}

/// Opens a token file and reads all of it, as `--inspect` and a run do.
fn tokens(file: &Path) {
    let opened = match TokenFile::open(file) {
        Ok(opened) => opened,
        Err(error) => return expect_message(Err::<(), _>(error)),
    };
    expect_message(opened.verify_checksum());
    expect_message(opened.validate_tokens(u32::MAX));
    let config = SamplerConfig {
        sequence_length: 8,
        vocabulary: 256,
        seed: 1,
        targets: TargetRule::default(),
    };
    match Sampler::new(opened.into(), config) {
        Ok(sampler) => {
            let (mut inputs, mut targets) = ([0; 16], [0; 16]);
            expect_message(sampler.fill(u64::MAX / 2, &mut inputs, &mut targets));
            expect_message(sampler.fill(0, &mut inputs, &mut targets));
        }
        Err(error) => expect_message(Err::<(), _>(error)),
    }
}

/// Reads the checkpoint that a file is part of.
fn checkpoint(file: &Path) {
    let folder = file.parent().expect("a folder");
    match FoundCheckpoint::verify(folder) {
        Ok(found) => expect_message(found.outline()),
        Err(error) => expect_message(Err::<(), _>(error)),
    }
    expect_message(checkpoint::load(folder, &small_model()));
}

/// Reads a checkpoint whose manifest states the size and the digest of a damaged file, so that its contents are read.
fn forged_checkpoint(file: &Path) {
    let manifest = file.with_file_name("manifest.json");
    let undamaged = text(&manifest);
    let mut forged: Value = serde_json::from_str(&undamaged).expect("a manifest");
    let bytes = fs::read(file).expect("a file");
    let name = file.file_name().expect("a name").to_string_lossy();
    forged["files"][&*name]["bytes"] = bytes.len().into();
    forged["files"][&*name]["sha256"] = hex::encode(sha256(&bytes)).into();
    fs::write(&manifest, forged.to_string()).expect("a writable file");
    checkpoint(file);
    fs::write(&manifest, undamaged).expect("a writable file");
}

fn weights(file: &Path) {
    let folder = file.parent().expect("a folder");
    expect_message(import_weights(folder, &small_model()));
}
