//! benches/gpu.sh, as far as it goes without a GPU: on stand-ins for CUDA's libraries, and without anything.
#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs};

use serde_json::Value;

/// A Python that has torch: set it to hold PyTorch's steps against this program's.
const TORCH_PYTHON: &str = "NARROWS_TORCH_PYTHON";

fn narrows() -> &'static Path {
    assert_cmd::cargo::cargo_bin!("narrows")
}

fn command(program: impl AsRef<Path>) -> Command {
    let mut command = Command::new(program.as_ref());
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command.env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"));
    command
}

fn ended(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// What a command prints that does well.
fn said(command: &mut Command) -> String {
    let output = ended(command);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}{errors}", text(&output));
    text(&output)
}

fn json(arguments: &str) -> Value {
    let text = said(command(narrows()).args(arguments.split(' ')).args(["--format", "json"]));
    serde_json::from_str(&text).unwrap()
}

/// Whether the script and its figures can run at all; a reason is printed.
fn scripts_run() -> bool {
    let runs = |program: &str| {
        Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success())
    };
    let lacking: Vec<_> = ["bash", "python3"].into_iter().filter(|name| !runs(name)).collect();
    if !lacking.is_empty() {
        println!("skipped: there is no {lacking:?}");
    }
    lacking.is_empty()
}

fn figures(arguments: &[&str]) -> Output {
    ended(command("python3").arg("benches/gpu_figures.py").args(arguments))
}

/// The script, with the program under test.
fn script(output: &Path) -> Command {
    let mut script = command("bash");
    script.arg("benches/gpu.sh").arg("--binary").arg(narrows()).arg("--output").arg(output);
    script
}

/// The rows of a table: cells of each.
fn rows(table: &str) -> Vec<Vec<String>> {
    let rows = table.lines().filter(|line| line.starts_with("| ")).skip(1);
    rows.map(|row| row.split(" | ").map(|cell| cell.trim_matches(['|', ' ']).to_owned()).collect())
        .collect()
}

fn parts() -> Vec<String> {
    let list = said(command("bash").args(["benches/gpu.sh", "--list"]));
    let parts: Vec<String> = list.lines().map(str::to_owned).collect();
    assert!(parts.len() > 5, "{parts:?}");
    parts
}

#[test]
fn without_a_gpu_every_part_is_skipped_with_a_reason() {
    if !scripts_run() {
        return;
    }
    if json("doctor")["backends"]["cuda"]["usable"] == true {
        println!("skipped: this machine has a GPU");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let table = said(&mut script(folder.path()));
    assert_eq!(table, fs::read_to_string(folder.path().join("table.md")).unwrap());
    let rows = rows(&table);
    assert_eq!(rows.iter().map(|row| row[0].clone()).collect::<Vec<_>>(), parts());
    for row in rows {
        assert!(row[1].starts_with("skipped: no GPU can be used here: "), "{row:?}");
    }
}

/// Of what each part must speak.
const ROWS: [(&str, &[&str]); 6] = [
    ("calibrate", &["profile of this GPU"]),
    ("curve", &["loss curve on the GPU, f32", "loss curve on the GPU, bf16"]),
    ("speed", &["work", "FLOPs as", "narrows, captured graphs", "MFU of narrows", "PyTorch"]),
    ("predict", &["predicted step (data sheet)", "predicted step (calibrated)"]),
    ("btp", &["BTP over NCCL, 2 processes, f32", "BTP over NCCL, 2 processes, bf16"]),
    ("trace", &["a step of single launches", "spent on gemm", "spent on attention", "longest: "]),
];

#[test]
fn on_stand_ins_every_part_has_its_rows() {
    if !scripts_run() {
        return;
    }
    let libraries = match narrows_fake_cuda::build(&narrows_fake_cuda::target_folder()) {
        Ok(libraries) => libraries,
        Err(why) => return println!("skipped: {why}"),
    };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut script = script(&out);
    script.env("LD_LIBRARY_PATH", libraries).env("TMPDIR", folder.path());
    script.args(["--curve", "cola-tiny,1,8,2", "--btp", "cola-tiny,1,8,2", "--processes", "2"]);
    script.args(["--speed", "cola-tiny,1,8,3", "--warm-up", "1", "--peak-flops", "1e12"]);
    script.args(["--calibrate", "--quick --global-batch 2 --sequence-length 16"]);
    // Tests that fail: the other parts run all the same, and the end tells.
    script.args(["--gpu-tests", "/bin/sh", "--skip", "sanitize"]);
    let output = ended(&mut script);
    let (table, errors) = (text(&output), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{table}{errors}");
    let rows = rows(&table);
    for part in parts() {
        let of_part: Vec<_> = rows.iter().filter(|row| row[0] == part).collect();
        assert!(!of_part.is_empty(), "{part} is not in {table}");
        let state = fs::read_to_string(out.join(&part).join("state")).unwrap();
        match part.as_str() {
            "conformance" => {
                assert!(state.starts_with("failed: tests ended with"), "{state}");
                assert_eq!(of_part[0].last().unwrap(), "NO", "{table}");
            }
            "sanitize" => assert_eq!(of_part[0][1], "skipped: not asked for"),
            _ => {
                assert_eq!(state, "done\n", "{part}: {table}{errors}");
                let (_, wanted) = ROWS.iter().find(|(name, _)| *name == part).expect(&part);
                for what in *wanted {
                    assert!(of_part.iter().any(|row| row[1].starts_with(what)), "{what}: {table}");
                }
                assert!(of_part.iter().all(|row| row.last().unwrap() != "NO"), "{table}");
            }
        }
    }
    // The commands are there, and nothing of where they wrote.
    assert!(table.contains("run --model cola-tiny") && table.contains("OUT/btp/f32-2.jsonl"));
    assert!(
        !table
            .lines()
            .skip_while(|line| *line != "```sh")
            .any(|l| l.contains(out.to_str().unwrap()))
    );
}

/// What a step multiplies is counted twice, by two programs.
#[test]
fn flops_and_parameters_are_what_the_program_counts() {
    if !scripts_run() {
        return;
    }
    for (model, length) in [("cola-1b", 4096), ("cola-60m", 256), ("cola-tiny", 33)] {
        let flags = format!("--model {model} --hardware h200-sxm --sequence-length {length}");
        let found = json(&format!("plan {flags} --global-batch 2"));
        let number = |key: &str| found["prediction"][key].as_f64().unwrap();
        let counted = number("mfu") * number("step_time_s") * 989e12 / 2.0;
        let answer = text(&figures(&["flops", model, &length.to_string()]));
        let (flops, _) = answer.trim().split_once(' ').unwrap();
        let flops: f64 = flops.parse().unwrap();
        assert!((flops / counted - 1.0).abs() < 1e-9, "{model}: {flops} and {counted}");
    }
    // 24 blocks of 4 · 2 · 2048 · 512 and 3 · (2048 + 5472) · 512 weights, and a head that is the embedding.
    let products = 24.0 * (4.0 * 2.0 * 2048.0 + 3.0 * 7520.0) * 512.0;
    let answer = text(&figures(&["flops", "cola-1b", "4096"]));
    let pairs = 4096.0 * 4097.0 / 2.0;
    let flops = 6.0 * (products + 32_000.0 * 2048.0) * 4096.0 + 24.0 * 12.0 * 2048.0 * pairs;
    let parameters = products + 49.0 * 2048.0 + 32_000.0 * 2048.0;
    assert_eq!(answer.trim(), format!("{flops} {parameters}"));
}

/// What the tools of others print is read as they mean it.
#[test]
fn other_tools_are_understood() {
    if !scripts_run() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("said");
    let work = "cola-tiny,1,8,2";
    let held = |arguments: &[&str], said: &str| {
        fs::write(&file, said).unwrap();
        let output = figures(&[arguments, &[file.to_str().unwrap()]].concat());
        (output.status.success(), text(&output))
    };
    for (tool, code, said, clean) in [
        ("memcheck", "0", "========= ERROR SUMMARY: 0 errors\n", true),
        ("memcheck", "9", "========= ERROR SUMMARY: 0 errors\n", false),
        ("memcheck", "9", "========= ERROR SUMMARY: 12 errors\n", false),
        ("memcheck", "0", "", false),
        (
            "racecheck",
            "0",
            "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
            true,
        ),
        (
            "racecheck",
            "0",
            "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n",
            false,
        ),
    ] {
        let (found, row) = held(&["sanitize", work, tool, code], said);
        assert_eq!(found, clean, "{tool}, {said}: {row}");
    }
    let tests = "19 programs: losses off by 1e-7\nskipped: along_all_axes wants 8 GPUs\n\
                 test result: ok. 13 passed; 0 failed; 0 ignored\n";
    let (found, said) = held(&["conformance"], tests);
    assert!(found && said.contains("13 tests passed") && said.contains("1 skipped"), "{said}");
    assert!(!held(&["conformance"], "test result: FAILED. 12 passed; 1 failed").0);
}

/// From the same weights on the same tokens PyTorch has the losses that this program has.
#[test]
fn pytorch_trains_the_same_model() {
    let Some(python) = env::var_os(TORCH_PYTHON).map(PathBuf::from) else {
        println!("skipped: {TORCH_PYTHON} names no Python with torch");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (batch, metrics, rates) = (at("batch.tokens"), at("m.jsonl"), at("rates"));
    let count = (3 * 24 + 1).to_string();
    assert!(
        figures(&["tokens", "--model", "cola-tiny", "--count", &count, &batch]).status.success()
    );
    let small = "run --model cola-tiny --hardware cpu-local --sequence-length 24";
    json(&format!("{small} --global-batch 3 --steps 6 --data {batch} --metrics {metrics}"));
    let still = "--steps 1 --learning-rate 1e-30 --weight-decay 0";
    json(&format!("{small} --global-batch 1 {still} --checkpoint-dir {}", at("weights")));
    assert!(figures(&["rates", &metrics, &rates]).status.success());
    let of_line = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64();
    let text = fs::read_to_string(&metrics).unwrap();
    let losses: Vec<f64> = text.lines().map(|line| of_line(line).unwrap()).collect();
    assert_eq!(losses.len(), 6);
    for (dtype, micro_batch, may) in [
        ("float32", "3", 1e-4),
        ("float32", "1", 1e-4),
        ("bfloat16", "3", 2e-2),
        ("bfloat16", "1", 2e-2),
    ] {
        let mut torch = command(&python);
        torch.args(["benches/step/torch_step.py", "eager", "--model", "cola-tiny"]);
        torch.args(["--sequences", "3", "--length", "24", "--threads", "1", "--dtype", dtype]);
        torch.args(["--micro-batch", micro_batch, "--tokens", &batch]);
        torch.args(["--checkpoint", &at("weights/step-00000001")]);
        torch.stdin(fs::File::open(&rates).unwrap());
        let said = said(&mut torch);
        let found: Vec<f64> = said
            .lines()
            .skip(1)
            .map(|line| line.split(' ').next_back().unwrap().parse().unwrap())
            .collect();
        assert_eq!(found.len(), losses.len(), "{said}");
        for (found, wanted) in found.iter().zip(&losses) {
            let off = (found / wanted - 1.0).abs();
            assert!(off <= may, "{dtype}: {found}, and not {wanted}: {found:?} {losses:?}");
        }
    }
}
