//! benches/gpu.sh on machines without a GPU: with fake CUDA libraries, and without CUDA libraries.
#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs};

use serde_json::Value;

/// Path of a Python with torch, which enables the comparison with PyTorch.
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

fn output_of(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The standard output of a command that must succeed.
fn successful_output(command: &mut Command) -> String {
    let output = output_of(command);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}{errors}", stdout(&output));
    stdout(&output)
}

fn json(arguments: &str) -> Value {
    let text =
        successful_output(command(narrows()).args(arguments.split(' ')).args(["--format", "json"]));
    serde_json::from_str(&text).unwrap()
}

/// Whether bash and python3 are installed; prints what is missing.
fn can_run_scripts() -> bool {
    let runs = |program: &str| {
        Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success())
    };
    let missing: Vec<_> = ["bash", "python3"].into_iter().filter(|name| !runs(name)).collect();
    if !missing.is_empty() {
        println!("skipped: {} is not installed", missing.join(" and "));
    }
    missing.is_empty()
}

fn figures(arguments: &[&str]) -> Output {
    output_of(command("python3").arg("benches/gpu_figures.py").args(arguments))
}

/// The script with the binary under test.
fn script(output: &Path) -> Command {
    let mut script = command("bash");
    script.arg("benches/gpu.sh").arg("--binary").arg(narrows()).arg("--output").arg(output);
    script
}

/// The cells of each row of a Markdown table.
fn table_rows(table: &str) -> Vec<Vec<String>> {
    let rows = table.lines().filter(|line| line.starts_with("| ")).skip(1);
    rows.map(|row| row.split(" | ").map(|cell| cell.trim_matches(['|', ' ']).to_owned()).collect())
        .collect()
}

fn parts() -> Vec<String> {
    let list = successful_output(command("bash").args(["benches/gpu.sh", "--list"]));
    let parts: Vec<String> = list.lines().map(str::to_owned).collect();
    assert!(parts.len() > 5, "{parts:?}");
    parts
}

#[test]
fn without_a_gpu_every_part_is_skipped_with_a_reason() {
    if !can_run_scripts() {
        return;
    }
    if json("doctor")["backends"]["cuda"]["usable"] == true {
        println!("skipped: this machine has a GPU");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let table = successful_output(&mut script(folder.path()));
    assert_eq!(table, fs::read_to_string(folder.path().join("table.md")).unwrap());
    let rows = table_rows(&table);
    assert_eq!(rows.iter().map(|row| row[0].clone()).collect::<Vec<_>>(), parts());
    for row in rows {
        assert!(row[1].starts_with("skipped: no usable GPU: "), "{row:?}");
    }
}

/// Beginnings of rows that each part must have.
const EXPECTED_ROWS: [(&str, &[&str]); 6] = [
    ("calibrate", &["profile of this GPU"]),
    ("curve", &["loss curve on the GPU, f32", "loss curve on the GPU, bf16"]),
    ("speed", &["workload", "FLOPs as", "narrows, captured graphs", "MFU of narrows", "PyTorch"]),
    ("predict", &["predicted step (data sheet)", "predicted step (calibrated)"]),
    ("btp", &["BTP over NCCL, 2 processes, f32", "BTP over NCCL, 2 processes, bf16"]),
    ("trace", &["eager step", "time in gemm", "time in attention", "longest: "]),
];

#[test]
#[ignore = "second level: runs the whole bench, calibration and training included"]
fn with_fake_libraries_every_part_has_its_rows() {
    if !can_run_scripts() {
        return;
    }
    let libraries = match narrows_fake_cuda::build() {
        Ok(libraries) => libraries,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut script = script(&out);
    script.env("LD_LIBRARY_PATH", libraries).env("TMPDIR", folder.path());
    script.args(["--curve", "cola-tiny,1,8,2", "--btp", "cola-tiny,1,8,2", "--processes", "2"]);
    script.args(["--speed", "cola-tiny,1,8,3", "--warm-up", "1", "--peak-flops", "1e12"]);
    script.args(["--calibrate", "--quick --global-batch 2 --sequence-length 16"]);
    // With a failing test program, the other parts still run, and the exit code is 1.
    script.args(["--gpu-tests", "/bin/sh", "--skip", "sanitize"]);
    let output = output_of(&mut script);
    let (table, errors) = (stdout(&output), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{table}{errors}");
    let rows = table_rows(&table);
    for part in parts() {
        let part_rows: Vec<_> = rows.iter().filter(|row| row[0] == part).collect();
        assert!(!part_rows.is_empty(), "{part} is missing in {table}");
        let state = fs::read_to_string(out.join(&part).join("state")).unwrap();
        match part.as_str() {
            "conformance" => {
                assert!(state.starts_with("failed: tests exited with"), "{state}");
                assert_eq!(part_rows[0].last().unwrap(), "FAIL", "{table}");
            }
            "sanitize" => assert_eq!(part_rows[0][1], "skipped: not selected"),
            _ => {
                assert_eq!(state, "done\n", "{part}: {table}{errors}");
                let (_, expected) =
                    EXPECTED_ROWS.iter().find(|(name, _)| *name == part).expect(&part);
                for row_start in *expected {
                    let exists = part_rows.iter().any(|row| row[1].starts_with(row_start));
                    assert!(exists, "{row_start}: {table}");
                }
                assert!(part_rows.iter().all(|row| row.last().unwrap() != "FAIL"), "{table}");
            }
        }
    }
    // Commands are listed without the path of the output folder.
    assert!(table.contains("run --model cola-tiny") && table.contains("OUT/btp/f32-2.jsonl"));
    assert!(
        !table
            .lines()
            .skip_while(|line| *line != "```sh")
            .any(|l| l.contains(out.to_str().unwrap()))
    );
}

/// The script and the program count FLOPs independently.
#[test]
fn the_script_counts_the_flops_and_parameters_that_the_program_counts() {
    if !can_run_scripts() {
        return;
    }
    for (model, length) in [("cola-1b", 4096), ("cola-60m", 256), ("cola-tiny", 33)] {
        let flags = format!("--model {model} --hardware h200-sxm --sequence-length {length}");
        let plan = json(&format!("plan {flags} --global-batch 2"));
        let number = |key: &str| plan["prediction"][key].as_f64().unwrap();
        let counted = number("mfu") * number("step_time_s") * 989e12 / 2.0;
        let answer = stdout(&figures(&["flops", model, &length.to_string()]));
        let (flops, _) = answer.trim().split_once(' ').unwrap();
        let flops: f64 = flops.parse().unwrap();
        assert!((flops / counted - 1.0).abs() < 1e-9, "{model}: {flops} and {counted}");
    }
    // 24 blocks of 4 · 2 · 2048 · 512 and 3 · (2048 + 5472) · 512 weights, and a tied head.
    let block_weights = 24.0 * (4.0 * 2.0 * 2048.0 + 3.0 * 7520.0) * 512.0;
    let answer = stdout(&figures(&["flops", "cola-1b", "4096"]));
    let pairs = 4096.0 * 4097.0 / 2.0;
    let flops = 6.0 * (block_weights + 32_000.0 * 2048.0) * 4096.0 + 24.0 * 12.0 * 2048.0 * pairs;
    let parameters = block_weights + 49.0 * 2048.0 + 32_000.0 * 2048.0;
    assert_eq!(answer.trim(), format!("{flops} {parameters}"));
}

#[test]
fn outputs_of_compute_sanitizer_and_cargo_test_are_parsed() {
    if !can_run_scripts() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("output");
    let workload = "cola-tiny,1,8,2";
    let parse = |arguments: &[&str], printed: &str| {
        fs::write(&file, printed).unwrap();
        let output = figures(&[arguments, &[file.to_str().unwrap()]].concat());
        (output.status.success(), stdout(&output))
    };
    for (tool, exit_code, printed, clean) in [
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
        let (passed, row) = parse(&["sanitize", workload, tool, exit_code], printed);
        assert_eq!(passed, clean, "{tool}, {printed}: {row}");
    }
    let tests = "19 programs: losses off by 1e-7\nskipped: along_all_axes wants 8 GPUs\n\
                 test result: ok. 13 passed; 0 failed; 0 ignored\n";
    let (passed, row) = parse(&["conformance"], tests);
    assert!(passed && row.contains("13 tests passed") && row.contains("1 skipped"), "{row}");
    assert!(!parse(&["conformance"], "test result: FAILED. 12 passed; 1 failed").0);
}

#[test]
fn pytorch_has_the_same_losses_from_the_same_weights_and_tokens() {
    let Some(python) = env::var_os(TORCH_PYTHON).map(PathBuf::from) else {
        println!("skipped: {TORCH_PYTHON} is not set to a Python with torch");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (batch, metrics, rates) = (path("batch.tokens"), path("metrics.jsonl"), path("rates"));
    let count = (3 * 24 + 1).to_string();
    assert!(
        figures(&["tokens", "--model", "cola-tiny", "--count", &count, &batch]).status.success()
    );
    let small = "run --model cola-tiny --hardware cpu-local --sequence-length 24";
    json(&format!("{small} --global-batch 3 --steps 6 --data {batch} --metrics {metrics}"));
    let no_change = "--steps 1 --learning-rate 1e-30 --weight-decay 0";
    json(&format!("{small} --global-batch 1 {no_change} --checkpoint-dir {}", path("weights")));
    assert!(figures(&["rates", &metrics, &rates]).status.success());
    let loss = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64();
    let text = fs::read_to_string(&metrics).unwrap();
    let losses: Vec<f64> = text.lines().map(|line| loss(line).unwrap()).collect();
    assert_eq!(losses.len(), 6);
    for (dtype, micro_batch, tolerance) in [
        ("float32", "3", 1e-4),
        ("float32", "1", 1e-4),
        ("bfloat16", "3", 2e-2),
        ("bfloat16", "1", 2e-2),
    ] {
        let mut torch = command(&python);
        torch.args(["benches/step/torch_step.py", "eager", "--model", "cola-tiny"]);
        torch.args(["--sequences", "3", "--length", "24", "--threads", "1", "--dtype", dtype]);
        torch.args(["--micro-batch", micro_batch, "--tokens", &batch]);
        torch.args(["--checkpoint", &path("weights/step-00000001")]);
        torch.stdin(fs::File::open(&rates).unwrap());
        let printed = successful_output(&mut torch);
        let torch_losses: Vec<f64> = printed
            .lines()
            .skip(1)
            .map(|line| line.split(' ').next_back().unwrap().parse().unwrap())
            .collect();
        assert_eq!(torch_losses.len(), losses.len(), "{printed}");
        for (torch_loss, loss) in torch_losses.iter().zip(&losses) {
            let difference = (torch_loss / loss - 1.0).abs();
            assert!(difference <= tolerance, "{dtype}: {torch_losses:?}, expected {losses:?}");
        }
    }
}
