//! Runs of several processes with one device each: started as by launchers, stopped and killed.
#![cfg(unix)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use narrows_test_support::free_port;
use tempfile::TempDir;

use super::checkpoints::curve;
use super::run::{SMALL, lines};
use super::stdout;

/// Longest wait of a test.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// Processes of one run.
pub struct Processes {
    folder: TempDir,
    world: usize,
    port: u16,
}

impl Processes {
    pub fn new(world: usize) -> Processes {
        Processes { folder: tempfile::tempdir().unwrap(), world, port: free_port() }
    }

    /// Port of the rendezvous.
    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Flags of a run with metrics and checkpoints in this folder.
    pub fn flags(&self, steps: u64) -> String {
        let (metrics, dir) = (self.at("m.jsonl"), self.at("kept"));
        format!(
            "{SMALL} --decay-steps 12 --steps {steps} --metrics {} --checkpoint-dir {}",
            metrics.display(),
            dir.display()
        )
    }

    /// The environment of torchrun.
    pub fn torchrun(&self, rank: usize) -> Vec<(&'static str, String)> {
        vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", self.world.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("LOCAL_WORLD_SIZE", self.world.to_string()),
            ("MASTER_ADDR", "127.0.0.1".into()),
            ("MASTER_PORT", self.port.to_string()),
        ]
    }

    pub fn start(
        &self,
        rank: usize,
        arguments: &str,
        environment: Vec<(&'static str, String)>,
    ) -> Child {
        Command::new(assert_cmd::cargo::cargo_bin!("narrows"))
            .args(arguments.split_whitespace())
            .env("XDG_CACHE_HOME", self.at(&format!("cache-{rank}")))
            .envs(environment)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    pub fn all(&self, arguments: &str) -> Vec<Child> {
        (0..self.world).map(|rank| self.start(rank, arguments, self.torchrun(rank))).collect()
    }
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Waits for all processes and returns their outputs.
pub fn wait_all(children: Vec<Child>) -> Vec<Output> {
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

/// Waits for all processes, which must succeed.
pub fn wait_for_success(children: Vec<Child>) -> Vec<Output> {
    let outputs = wait_all(children);
    assert!(outputs.iter().all(|output| output.status.success()), "{outputs:#?}");
    outputs
}

pub fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

/// Waits until a metrics file has this many steps.
pub fn wait_for_steps(metrics: &Path, steps: usize) {
    let start = Instant::now();
    let completed = || fs::read_to_string(metrics).unwrap_or_default().matches('\n').count();
    while completed() < steps {
        assert!(start.elapsed() < TIMEOUT, "no step {steps} in {}", metrics.display());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn processes_and_threads_have_equal_results() {
    for mesh in [
        "--tensor 2 --pipeline 1",
        "--tensor 1 --pipeline 2",
        "--tensor 1 --pipeline 2 --micro-batch 1 --schedule interleaved",
        "--data-parallel 2",
        "--tensor 1 --pipeline 1 --context 2",
    ] {
        let processes = Processes::new(2);
        let (text, tokens) = (processes.at("eval.txt"), processes.at("eval.tokens"));
        fs::write(&text, "Call me Ishmael. ".repeat(20)).unwrap();
        stdout(&format!("data {} --output {}", text.display(), tokens.display()));
        let eval = format!("--eval-data {} --eval-every 2 --keep-best", tokens.display());
        let flags = format!("{} {mesh} {eval}", processes.flags(4));
        let outputs = wait_for_success(processes.all(&flags));
        assert!(processes.at("kept/best/step-00000004").exists(), "{mesh}");
        let threads = Processes::new(1);
        stdout(&format!("{} --devices 2 {mesh} {eval}", threads.flags(4)));
        let metrics = [&processes, &threads].map(|run| run.at("m.jsonl"));
        assert_eq!(curve(&metrics[0]), curve(&metrics[1]), "{mesh}");
        let eval_loss =
            |step: usize| [0, 1].map(|run| lines(&metrics[run])[step]["eval_loss"].clone());
        for step in [1, 3] {
            let [of_processes, of_threads] = eval_loss(step);
            assert!(of_processes.is_f64() && of_processes == of_threads, "{mesh}");
        }
        let bytes = metrics.map(|file| {
            let keys = ["allocated_bytes", "collective_bytes", "transfer_sent_bytes"];
            keys.map(|key| lines(&file)[3][key].clone())
        });
        assert_eq!(bytes[0], bytes[1], "{mesh}");
        // Process 0 prints for all.
        assert!(!outputs[0].stdout.is_empty() && outputs[1].stdout.is_empty(), "{outputs:#?}");
    }
}

#[test]
fn launchers_are_detected() {
    for launcher in ["slurm", "openmpi"] {
        let processes = Processes::new(2);
        let environment = |rank: usize| {
            let (rank, port) = (rank.to_string(), processes.port.to_string());
            let names = match launcher {
                "slurm" => [
                    "SLURM_PROCID",
                    "SLURM_STEP_NUM_TASKS",
                    "SLURM_LOCALID",
                    "SLURM_STEP_TASKS_PER_NODE",
                ],
                _ => [
                    "OMPI_COMM_WORLD_RANK",
                    "OMPI_COMM_WORLD_SIZE",
                    "OMPI_COMM_WORLD_LOCAL_RANK",
                    "OMPI_COMM_WORLD_LOCAL_SIZE",
                ],
            };
            let values = [rank.clone(), "2".into(), rank, "2".into()];
            names.into_iter().zip(values).chain([("NARROWS_PORT", port)]).collect()
        };
        let arguments = format!("{} --launcher {launcher}", processes.flags(2));
        let start = |rank| processes.start(rank, &arguments, environment(rank));
        wait_for_success((0..2).map(start).collect());
        assert_eq!(lines(&processes.at("m.jsonl")).len(), 2);
    }
}

#[test]
fn a_stopped_run_is_resumed() {
    let processes = Processes::new(2);
    let steps = 12;
    let mesh = "--tensor 2 --pipeline 1";
    let long = processes.flags(steps).replace("--steps 12", "--steps 100000");
    let children = processes.all(&format!("{long} {mesh}"));
    wait_for_steps(&processes.at("m.jsonl"), 2);
    // One process is interrupted; all stop after the same step.
    signal(&children[1], "-TERM");
    for output in wait_all(children) {
        assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    }
    let resumed_steps = lines(&processes.at("m.jsonl")).len() as u64 + 3;
    let steps_flag = format!("--steps {resumed_steps}");
    let arguments = processes.flags(steps).replace("--steps 12", &steps_flag);
    wait_for_success(processes.all(&format!("{arguments} {mesh} --resume")));
    let uninterrupted = Processes::new(1);
    let arguments = uninterrupted.flags(steps).replace("--steps 12", &steps_flag);
    stdout(&format!("{arguments} --devices 2 {mesh}"));
    assert_eq!(curve(&processes.at("m.jsonl")), curve(&uninterrupted.at("m.jsonl")));
}

/// A checkpoint is due after every step: an interrupted process must still take part in saving it.
/// Every process resumes with another recipe than the checkpoint's.
#[test]
fn one_process_prints_the_warnings_of_all() {
    let processes = Processes::new(2);
    let mesh = "--tensor 2 --pipeline 1";
    wait_for_success(processes.all(&format!("{} {mesh}", processes.flags(1))));
    let flags = format!("{} {mesh} --resume --beta2 0.5", processes.flags(2));
    let outputs = wait_for_success(processes.all(&flags));
    let printed = |output: &Output| stderr(output).matches("--beta2 is 0.5").count();
    assert_eq!(outputs.iter().map(printed).collect::<Vec<_>>(), [1, 0]);
}

#[test]
fn processes_stop_together_when_a_checkpoint_is_due() {
    for interrupted in [0, 1] {
        let processes = Processes::new(2);
        let long = processes.flags(1).replace("--steps 1 ", "--steps 100000 ");
        let flags = "--pipeline 2 --checkpoint-every 1 --keep 2";
        let children = processes.all(&format!("{long} {flags}"));
        wait_for_steps(&processes.at("m.jsonl"), 3);
        signal(&children[interrupted], "-TERM");
        for output in wait_all(children) {
            assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
        }
        let last_step = lines(&processes.at("m.jsonl")).len();
        assert!(processes.at(&format!("kept/step-{last_step:08}/manifest.json")).exists());
    }
}

/// Each process has its own token file, of the same name and header.
#[test]
fn processes_with_different_tokens_fail() {
    let processes = Processes::new(2);
    let text = processes.at("text");
    fs::write(&text, "the text of all processes. ".repeat(100)).unwrap();
    let tokens = processes.at("0/tokens.bin");
    for rank in 0..2 {
        fs::create_dir(processes.at(&rank.to_string())).unwrap();
    }
    stdout(&format!("data {} --output {}", text.display(), tokens.display()));
    let mut bytes = fs::read(&tokens).unwrap();
    let half = bytes.len() / 2;
    // Changes letters, and not the high bytes of tokens, which are zero.
    bytes[half..].iter_mut().filter(|byte| **byte > 1).for_each(|byte| *byte ^= 1);
    fs::write(processes.at("1/tokens.bin"), bytes).unwrap();
    let start = |rank: usize| {
        let arguments = format!("{SMALL} --steps 20 --tensor 2 --data tokens.bin");
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("narrows"));
        command.args(arguments.split_whitespace()).envs(processes.torchrun(rank));
        command.env("XDG_CACHE_HOME", crate::CACHE);
        command.current_dir(processes.at(&rank.to_string()));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for output in wait_all((0..2).map(start).collect()) {
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        let text = stderr(&output);
        assert!(text.contains("process 1 reads a different token file than process 0"), "{text}");
    }
}

#[test]
fn processes_start_from_the_same_weights() {
    let processes = Processes::new(2);
    let start = |rank: usize| {
        let from = if rank == 0 { "--init-from weights" } else { "" };
        processes.start(rank, &format!("{} {from}", processes.flags(2)), processes.torchrun(rank))
    };
    for output in wait_all((0..2).map(start).collect()) {
        assert!(!output.status.success());
        assert!(stderr(&output).contains("initial weights"), "{}", stderr(&output));
    }
}

#[test]
fn a_killed_process_ends_the_run() {
    let processes = Processes::new(3);
    let long = processes.flags(1).replace("--steps 1 ", "--steps 100000 ");
    let mut children = processes.all(&format!("{long} --pipeline 3"));
    wait_for_steps(&processes.at("m.jsonl"), 2);
    let start = Instant::now();
    signal(&children[1], "-KILL");
    children.remove(1).wait().unwrap();
    let texts: Vec<String> = wait_all(children)
        .iter()
        .map(|output| {
            assert_eq!(output.status.code(), Some(1), "{}", stderr(output));
            stderr(output)
        })
        .collect();
    // No process waits for the timeout of ten minutes.
    assert!(start.elapsed() < TIMEOUT);
    assert!(
        texts.iter().all(|text| text.contains("lost the connection to process 1")),
        "{texts:#?}"
    );
    assert!(texts.iter().any(|text| text.contains("last collectives")), "{texts:#?}");
}

#[test]
fn a_stalled_process_ends_the_run() {
    let processes = Processes::new(2);
    let long = processes.flags(1).replace("--steps 1 ", "--steps 100000 ");
    let flags = "--tensor 2 --pipeline 1 --collective-timeout 2";
    let mut children = processes.all(&format!("{long} {flags}"));
    wait_for_steps(&processes.at("m.jsonl"), 2);
    signal(&children[1], "-STOP");
    let stalled = children.remove(1);
    let output = children.remove(0).wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.starts_with("error: process 0 of 2: process 1 did not take part in"), "{text}");
    assert!(text.contains(" within 2."), "{text}");
    assert!(text.contains("has not ended"), "{text}");
    // The stalled process ends when it continues.
    signal(&stalled, "-CONT");
    let output = stalled.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("process 0 aborted the run: process 1 did not take part"),
        "{}",
        stderr(&output)
    );
}

/// The batch scripts of the examples parse, and their flags exist.
#[test]
fn batch_scripts_are_valid() {
    let help = stdout("run --help");
    // A flag may have a value: `--resume[=<auto>]`.
    let flag = |word: &str| word.split(['[', '=']).next().unwrap_or_default().to_owned();
    let known: Vec<String> = help.split_whitespace().map(flag).collect();
    for name in ["run.sbatch", "run-gpus.sbatch"] {
        let path = format!("{}/examples/cluster/{name}", env!("CARGO_MANIFEST_DIR"));
        assert!(Command::new("bash").args(["-n", &path]).status().unwrap().success());
        let script = fs::read_to_string(path).unwrap();
        let (_, run) = script.split_once("narrows run ").unwrap();
        let flags: Vec<String> =
            run.split_whitespace().filter(|word| word.starts_with("--")).map(flag).collect();
        assert!(flags.len() > 5, "{flags:?}");
        assert!(flags.iter().all(|flag| known.contains(flag)), "{flags:?}");
    }
}
