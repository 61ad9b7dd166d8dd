//! Damaged files as inputs of commands.

use std::fs;
use std::path::Path;

use arbtest::arbtest;
use narrows_test_support::damage::damaged;

use super::fixture::{assert_orderly, copy_folder, fixture, leftovers, run};
use super::readers::arbtest_seed;

/// A command with a file that is damaged before it. Its message has the name of the file, or `names`.
struct Target {
    damaged: &'static str,
    arguments: &'static str,
    names: Option<&'static str>,
}

const fn target(damaged: &'static str, arguments: &'static str) -> Target {
    Target { damaged, arguments, names: None }
}

/// A command with a damaged part of an input of several files, whose name messages may have too.
const fn part(damaged: &'static str, input: &'static str, arguments: &'static str) -> Target {
    Target { damaged, arguments, names: Some(input) }
}

/// Beginnings of flags, which messages may name instead of a recipe that sets them.
const FLAGS: Option<&str> = Some("--");

const DATA: &str = "data @docs.txt --tokenizer @tokenizer.json --output @new.tokens";

/// The files of formats that commands read, each by a command that reads all of it.
const TARGETS: &[Target] = &[
    target("plan.json", "check @plan.json --model @small.json"),
    target("plan.json", "cost @plan.json --model @small.json"),
    target("plan.json", "export @plan.json --model @small.json --to torchtitan --allow-loss"),
    target("plan.json", "run @plan.json --model @small.json --backend null"),
    target(
        "small.json",
        "plan --model @small.json --hardware cpu-local --time-limit 1 --sequence-length 8",
    ),
    target(
        "ranks.json",
        "plan --model @ranks.json --devices 2 --time-limit 1 --sequence-length 64",
    ),
    target(
        "config.json",
        "plan --model @config.json --devices 2 --time-limit 1 --sequence-length 64",
    ),
    target(
        "boost.yaml",
        "plan --model @boost.yaml --devices 2 --time-limit 1 --sequence-length 64",
    ),
    target("profile.json", "plan --model @small.json --hardware @profile.json --time-limit 1"),
    Target {
        damaged: "recipe.toml",
        arguments: "run --recipe @recipe.toml --model @small.json --hardware cpu-local --global-batch 2 \
            --sequence-length 8 --threads 1 --steps 1 --warm-up-steps 0 --decay-steps 1",
        names: FLAGS,
    },
    Target {
        damaged: "recipe.json",
        arguments: "run --recipe @recipe.json --model @small.json --hardware cpu-local --global-batch 2 \
            --sequence-length 8 --threads 1 --steps 2",
        names: FLAGS,
    },
    target("t.tokens", "data --inspect @t.tokens"),
    target(
        "t.tokens",
        "run --data @t.tokens --model @small.json --hardware cpu-local --steps 1 --global-batch 2 \
        --sequence-length 8 --threads 1",
    ),
    target("gpt2.bin", "data --inspect @gpt2.bin"),
    target("docs.txt", DATA),
    target("tokenizer.json", DATA),
    target("docs.jsonl", "data @docs.jsonl --output @new.tokens"),
    target("docs.json.gz", "data @docs.json.gz --output @new.tokens"),
    target("docs.txt.zst", "data @docs.txt.zst --output @new.tokens"),
    target("docs.parquet", "data @docs.parquet --text-field content --output @new.tokens"),
    target("megatron.idx", "data @megatron.idx --tokenizer @tokenizer.json --output @new.tokens"),
    part(
        "megatron.bin",
        "megatron.idx",
        "data @megatron.idx --tokenizer @tokenizer.json --output @new.tokens",
    ),
    target("nanoset.ds", "data @nanoset.ds --tokenizer @tokenizer.json --output @new.tokens"),
    part(
        "nanoset.ds.index",
        "nanoset.ds",
        "data @nanoset.ds --tokenizer @tokenizer.json --output @new.tokens",
    ),
    part(
        "nanoset.ds.metadata",
        "nanoset.ds",
        "data @nanoset.ds --tokenizer @tokenizer.json --output @new.tokens",
    ),
    target("m.jsonl", "plot @m.jsonl --output @m.svg"),
    target("measurements.json", "validate --measurements @measurements.json"),
    target("rows.csv", "convert @rows.csv --hardware a100-80gb-8 --recompute none"),
    // Text that is no JSON is read as CSV, which needs flags.
    part("rows.json", "CSV rows", "convert @rows.json"),
    part("kept/step-00000002/manifest.json", "manifest", RESUME),
    target("kept/step-00000002/state.json", RESUME),
    target("kept/step-00000002/model.safetensors", RESUME),
    target("kept/step-00000002/optimizer.safetensors", RESUME),
    target("m.jsonl", RESUME),
    target(SHARD, RESUME_SHARDS),
    part("shards/step-00000002/manifest.json", "manifest", RESUME_SHARDS),
    target(
        "exported/config.json",
        "plan --model @exported/config.json --sequence-length 8 --time-limit 1",
    ),
    part(
        "exported/model.safetensors",
        "exported",
        "run --init-from @exported --model @small.json --hardware cpu-local \
        --steps 1 --global-batch 2 --sequence-length 8 --threads 1",
    ),
    target(
        "kept/step-00000002/model.safetensors",
        "run --init-from @kept --model @small.json --hardware cpu-local \
        --steps 1 --global-batch 2 --sequence-length 8 --threads 1",
    ),
    target("kept/step-00000002/model.safetensors", "generate @kept --prompt Call --tokens 2"),
    // A damaged vocabulary is not that of bytes, for which no tokenizer is needed.
    part(
        "kept/step-00000002/model.json",
        "and the model has",
        "generate @kept --prompt Call --tokens 2",
    ),
    target(
        "tokenizer.json",
        "generate @exported --tokenizer @tokenizer.json --prompt Call --tokens 2",
    ),
    part("dense/model.safetensors.index.json", "dense", FACTOR),
    part("dense/model-00001-of-00002.safetensors", "dense", FACTOR),
    target("dense.json", FACTOR),
];

const FACTOR: &str = "factor @dense --model @dense.json --rank 4 --output @factored";

/// Part of a checkpoint that two processes have written.
const SHARD: &str = "shards/step-00000002/model-00001-of-00002.safetensors";

const RESUME_SHARDS: &str = "run --model @small.json --hardware cpu-local --global-batch 2 --sequence-length 8 \
    --threads 1 --data @t.tokens --steps 3 --checkpoint-dir @shards --resume";

const RESUME: &str = "run --model @small.json --hardware cpu-local --global-batch 2 --sequence-length 8 --threads 1 \
    --data @t.tokens --steps 3 --checkpoint-dir @kept --metrics @m.jsonl --resume";

/// Damages the file of one command, and runs it.
pub fn attempt(seed: u64) {
    let target = &TARGETS[(seed % TARGETS.len() as u64) as usize];
    let folder = tempfile::tempdir().expect("a temporary folder");
    copy_folder(fixture(), folder.path()).expect("a copy");
    let file = folder.path().join(target.damaged);
    let undamaged = fs::read(&file).expect("a file of the fixture");
    arbtest(|u| {
        fs::write(&file, damaged(u, &undamaged)?).expect("a writable file");
        Ok(())
    })
    .seed(arbtest_seed(seed));
    let damaged_bytes = fs::read(&file).expect("the damaged file");
    let ended = run(folder.path(), target.arguments, &[]);
    assert_orderly(&ended, target.arguments);
    let Target { arguments, names, .. } = target;
    let message = &ended.message;
    if ended.status.code() == Some(2) {
        let name = Path::new(target.damaged).file_name().expect("a name").to_string_lossy();
        let is_named = message.contains(&*name) || names.is_some_and(|name| message.contains(name));
        assert!(is_named, "{arguments}: does not name {name}: {message}");
    }
    assert_eq!(leftovers(folder.path()), [""; 0], "{arguments}");
    for output in ["new.tokens", "factored"] {
        let written = folder.path().join(output).exists();
        assert!(!written || ended.status.success(), "{arguments}: {message}");
    }
    // A run removes later lines of its own metrics file, and nothing else changes its inputs.
    if !arguments.contains("--resume") {
        assert!(fs::read(&file).is_ok_and(|bytes| bytes == damaged_bytes), "{arguments}: changed");
    }
}
