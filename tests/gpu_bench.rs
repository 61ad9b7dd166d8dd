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
    assert_eq!(parts, ["speed", "kernels", "right", "calibrate", "nccl"]);
    parts
}

#[test]
fn options_are_read_or_refused_with_their_form() {
    if !can_run_scripts() {
        return;
    }
    for (arguments, part) in [
        ("--list extra", "--list takes nothing after it, and here is extra"),
        ("--time-limit abc", "--time-limit takes a number of seconds, not 'abc'"),
        ("--time-limit 0", "--time-limit takes a number of seconds, not '0'"),
        ("--time-limit", "--time-limit is unknown, or needs a value"),
        ("--warm-up -1", "--warm-up takes a number of steps, not '-1'"),
        ("--processes 2,", "--processes takes numbers of processes, as in 2,4, not '2,'"),
        ("--peak-flops fast", "--peak-flops takes a number, as in 989e12, not 'fast'"),
        ("--curve cola-60m,4,256", "--curve takes a model and three numbers"),
        ("--speed cola-60m,4,256,x", "--speed takes a model and three numbers"),
        ("--one-gpu-by force", "--one-gpu-by takes host or multi-rank, not force"),
        ("--fast 1", "--fast is unknown"),
        ("sped", "there is no part sped"),
    ] {
        let mut script = command("bash");
        let output = output_of(script.arg("benches/gpu.sh").args(arguments.split(' ')));
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments}: {message}");
        assert!(message.starts_with("error: ") && message.contains(part), "{arguments}: {message}");
    }
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
const EXPECTED_ROWS: [(&str, &[&str]); 4] = [
    (
        "speed",
        &[
            "workload",
            "FLOPs as",
            "narrows, captured graphs",
            "MFU of narrows",
            "predicted step (data sheet)",
            "narrows, microbatch of 1",
            "PyTorch",
        ],
    ),
    ("kernels", &["eager step", "time in gemm", "time in attention", "gate_up.b, backward: GEMM"]),
    ("calibrate", &["profile of this GPU", "predicted step (calibrated)"]),
    ("nccl", &["BTP over NCCL, 2 processes, f32", "BTP over NCCL, 2 processes, bf16"]),
];

/// Rows of a part, which ended with this state.
fn check_part(out: &Path, table: &str, part: &str, expected_state: &str) -> Vec<Vec<String>> {
    let state = fs::read_to_string(out.join(part).join("state")).unwrap();
    assert!(state.starts_with(expected_state), "{part}: {state}{table}");
    let rows: Vec<_> = table_rows(table).into_iter().filter(|row| row[0] == part).collect();
    assert!(!rows.is_empty(), "{part} is missing in {table}");
    rows
}

/// The fake libraries where CUDA 13's Python packages have theirs, in an environment of its own; the driver apart, as
/// the system has it. Returns the folders of the environment's programs and of the driver.
fn python_environment(libraries: &Path, root: &Path) -> (PathBuf, PathBuf) {
    let packages = root.join("env/lib/python3.12/site-packages/nvidia");
    let (driver, bin) = (root.join("driver"), root.join("env/bin"));
    for entry in fs::read_dir(libraries).unwrap().map(|entry| entry.unwrap().path()) {
        let name = entry.file_name().unwrap().to_str().unwrap();
        let place = match name.split_once(".so").map_or(name, |(stem, _)| stem) {
            "libcublasLt" => packages.join("cu13/lib/libcublasLt.so.13"),
            "libnvrtc" => packages.join("cu13/lib/libnvrtc.so.13"),
            "libcudnn" => packages.join("cudnn/lib/libcudnn.so.9"),
            "libnccl" => packages.join("nccl/lib/libnccl.so.2"),
            _ => driver.join(name),
        };
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        let _ = fs::copy(&entry, place).unwrap();
    }
    fs::create_dir_all(&bin).unwrap();
    let python =
        successful_output(command("python3").args(["-c", "import sys; print(sys.executable)"]));
    std::os::unix::fs::symlink(python.trim(), bin.join("python3")).unwrap();
    (bin, driver)
}

#[test]
#[ignore = "second level: runs the whole bench, calibration and training included"]
fn every_part_has_its_rows_from_a_bare_folder() {
    if !can_run_scripts() {
        return;
    }
    let libraries = match narrows_fake_cuda::build() {
        Ok(libraries) => libraries,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("bench.tar.gz");
    // A failing test program: the other parts still run, and the exit code is 1.
    successful_output(
        command("bash").arg("benches/pack.sh").arg(&archive).arg(narrows()).arg("/bin/false"),
    );
    successful_output(command("tar").arg("-C").arg(folder.path()).arg("-xzf").arg(&archive));
    let (bin, driver) = python_environment(&libraries, folder.path());
    let out = folder.path().join("out");
    let mut script = Command::new("bash");
    script.current_dir(folder.path()).env_clear().arg("narrows-gpu/benches/gpu.sh");
    let path = env::join_paths([bin.as_path(), Path::new("/usr/bin"), Path::new("/bin")]).unwrap();
    script.env("PATH", path).env("HOME", folder.path()).env("TMPDIR", folder.path());
    script.env("LD_LIBRARY_PATH", driver).arg("--output").arg(&out);
    script.args(["--curve", "cola-tiny,1,8,2", "--nccl", "cola-tiny,1,8,2", "--processes", "2"]);
    script.args(["--speed", "cola-tiny,1,8,3", "--warm-up", "1", "--peak-flops", "1e12"]);
    script.args(["--calibrate", "--quick --model cola-tiny --global-batch 2 --sequence-length 16"]);
    script.args(["--time-limit", "900"]);
    let output = output_of(&mut script);
    let (table, errors) = (stdout(&output), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{table}{errors}");
    for (part, expected) in EXPECTED_ROWS {
        let rows = check_part(&out, &table, part, "done");
        for row_start in expected {
            let exists = rows.iter().any(|row| row[1].starts_with(row_start));
            assert!(exists, "{row_start}: {table}");
        }
        assert!(rows.iter().all(|row| row.last().unwrap() != "FAIL"), "{table}");
    }
    let right = check_part(&out, &table, "right", "failed: tests exited with");
    assert!(right.iter().any(|row| row[1].starts_with("loss curve on the GPU, bf16")), "{table}");
    assert_eq!(right.last().unwrap().last().unwrap(), "FAIL", "{table}");
    // Commands are listed without the path of the output folder.
    assert!(table.contains("run --model cola-tiny") && table.contains("OUT/nccl/f32-2.jsonl"));
    let commands: Vec<&str> = table.lines().skip_while(|line| *line != "```sh").collect();
    assert!(commands.iter().all(|line| !line.contains(out.to_str().unwrap())), "{table}");
    let list = successful_output(command("tar").arg("-tzf").arg(out.with_extension("tar.gz")));
    assert!(list.contains("out/table.md") && list.contains("out/speed/narrows.jsonl"), "{list}");
}

#[test]
fn a_part_ends_with_its_time_and_keeps_its_rows() {
    if !can_run_scripts() {
        return;
    }
    let libraries = match narrows_fake_cuda::build() {
        Ok(libraries) => libraries,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    // Measures nothing, and does not end.
    let slow = folder.path().join("slow");
    let text = format!(
        "#!/bin/sh\ncase $1 in doctor) exec {} \"$@\" ;; *) sleep 600 ;; esac\n",
        narrows().display()
    );
    fs::write(&slow, text).unwrap();
    successful_output(command("chmod").arg("+x").arg(&slow));
    let mut script = command("bash");
    script.args(["benches/gpu.sh", "kernels", "--time-limit", "2", "--binary"]).arg(&slow);
    script.arg("--output").arg(&out).env("LD_LIBRARY_PATH", libraries).env("TMPDIR", folder.path());
    let begin = std::time::Instant::now();
    let output = output_of(&mut script);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(begin.elapsed().as_secs() < 300, "the part was not ended");
    let table = fs::read_to_string(out.join("table.md")).unwrap();
    check_part(&out, &table, "kernels", "failed: not finished after 2 s");
    check_part(&out, &table, "speed", "skipped: not selected");
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
    // A race between two kernels, and the number of reports in the summary.
    let races = |reader: &str, writer: &str, reports: u32| {
        format!(
            "========= Error: Race reported between Read access at {reader}+0xb00\n\
             =========     and Write access at {writer}+0x2820 [128 hazards]\n\
             ========= RACECHECK SUMMARY: {reports} hazards displayed ({reports} errors, 0 warnings)\n"
        )
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
        ("racecheck", "9", &races("nvjet_sm90_tss", "nvjet_sm90_tss", 1), true),
        ("racecheck", "9", &races("nvjet_sm90_tss", "norm_bf16_v8", 1), false),
        ("racecheck", "9", &races("norm_bf16_v8", "nvjet_sm90_tss", 1), false),
        // Another report, or a run that failed.
        ("racecheck", "9", &races("nvjet_sm90_tss", "nvjet_sm90_tss", 2), false),
        ("racecheck", "1", &races("nvjet_sm90_tss", "nvjet_sm90_tss", 1), false),
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
