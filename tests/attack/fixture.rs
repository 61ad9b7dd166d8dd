//! The targets of attacks: undamaged files of every format, and the program.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use narrows_test_support::free_port;
use tempfile::TempDir;

/// Longest time of a command.
const TIME_MAX: Duration = Duration::from_secs(60);

/// Flags of a run that takes milliseconds, on the model of the fixture.
pub const SMALL_RUN: &str = "run --model @small.json --hardware cpu-local --global-batch 2 \
    --sequence-length 8 --threads 1";

/// The end of a command.
pub struct Ended {
    /// Exit code or signal.
    pub status: ExitStatus,
    /// Text on standard error.
    pub message: String,
}

/// The folder with one file of every format.
pub fn fixture() -> &'static Path {
    static FIXTURE: OnceLock<TempDir> = OnceLock::new();
    FIXTURE.get_or_init(|| make().expect("a temporary folder")).path()
}

fn make() -> std::io::Result<TempDir> {
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    copy_folder(&root.join("tests/attack/corpus"), folder.path())?;
    for (from, to) in [
        ("profiles/cpu-local.json", "profile.json"),
        ("models/mixed-ranks.json", "ranks.json"),
        ("models/cola-7b.config.json", "config.json"),
        ("examples/measurements/megatron-a100.json", "measurements.json"),
        ("recipes/cola-60m-c4.toml", "recipe.toml"),
    ] {
        fs::copy(root.join(from), at(to))?;
    }
    let weights = root.join("tests/golden/weights");
    let cases = fs::read_to_string(weights.join("cases.json"))?;
    let cases: serde_json::Value = serde_json::from_str(&cases)?;
    fs::write(at("dense.json"), cases["llama"]["config"].to_string())?;
    fs::create_dir(at("dense"))?;
    copy_folder(&weights.join("llama"), &at("dense"))?;
    let text = "Call me Ishmael. Some years ago, never mind how long precisely.\n".repeat(20);
    fs::write(at("docs.txt"), &text)?;
    let mut gzip = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
    gzip.write_all(&fs::read(at("docs.jsonl"))?)?;
    fs::write(at("docs.json.gz"), gzip.finish()?)?;
    fs::write(at("docs.txt.zst"), zstd::encode_all(text.as_bytes(), 1)?)?;
    fs::write(at("gpt2.bin"), llm_c_tokens(&text))?;
    for arguments in [
        "data @docs.txt --output @t.tokens",
        "plan --model @small.json --hardware cpu-local --devices 2 --global-batch 4 --sequence-length 8 \
         --output @plan.json",
        &format!(
            "{SMALL_RUN} --data @t.tokens --steps 2 --checkpoint-dir @kept --metrics @m.jsonl"
        ),
        "export-weights @kept --model @small.json --to cola --output @exported",
    ] {
        let ended = run(folder.path(), arguments, &[]);
        assert!(ended.status.success(), "{arguments}: {}", ended.message);
    }
    let sharded = format!(
        "{SMALL_RUN} --tensor 2 --pipeline 1 --data @t.tokens --steps 2 --checkpoint-dir @shards"
    );
    let port = free_port();
    let processes = [0, 1].map(|rank| start_rank(folder.path(), (rank, 2), port, &sharded));
    for (rank, child) in processes.into_iter().enumerate() {
        wait_for_rank(folder.path(), rank, child);
    }
    Ok(folder)
}

/// Starts one of several processes that meet at a port.
pub fn start_rank(
    folder: &Path,
    (rank, world): (usize, usize),
    port: u16,
    arguments: &str,
) -> Child {
    let mut command = program(folder);
    for (name, value) in
        [("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", world)]
    {
        command.env(name, value.to_string());
    }
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.args(words(folder, arguments)).stdout(Stdio::null());
    let log = File::create(rank_log(folder, rank)).expect("a writable folder");
    command.stderr(log).spawn().expect("the program")
}

/// Waits for a process, which must succeed.
pub fn wait_for_rank(folder: &Path, rank: usize, mut child: Child) {
    let status = wait(&mut child);
    let message = message_of_rank(folder, rank);
    let status = status.unwrap_or_else(|| panic!("process {rank} does not end: {message}"));
    assert!(status.success(), "process {rank}: {status}: {message}");
    assert!(!message.contains("panicked"), "process {rank}: {message}");
}

/// Text that a process has printed on standard error.
pub fn message_of_rank(folder: &Path, rank: usize) -> String {
    fs::read_to_string(rank_log(folder, rank)).unwrap_or_default()
}

fn rank_log(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank}.log"))
}

/// Waits for a process; ends it and returns `None` where that takes too long.
fn wait(child: &mut Child) -> Option<ExitStatus> {
    let start = Instant::now();
    loop {
        match child.try_wait().expect("a child") {
            Some(status) => return Some(status),
            None if start.elapsed() > TIME_MAX => {
                child.kill().expect("a child");
                return None;
            }
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// A token file of llm.c for GPT-2.
fn llm_c_tokens(text: &str) -> Vec<u8> {
    let mut header = [0i32; 256];
    header[..3].copy_from_slice(&[20_240_520, 1, text.len() as i32]);
    let header = header.iter().flat_map(|word| word.to_le_bytes());
    header.chain(text.bytes().flat_map(|byte| u16::from(byte).to_le_bytes())).collect()
}

/// Copies the files of a folder and of the folders in it.
pub fn copy_folder(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => copy_folder(&entry.path(), &target)?,
            false => drop(fs::copy(entry.path(), target)?),
        }
    }
    Ok(())
}

/// The words of a command line, in which `@` stands for a folder.
pub fn words(folder: &Path, arguments: &str) -> Vec<String> {
    let within = |word: &str| word.replace('@', &format!("{}/", folder.display()));
    arguments.split_whitespace().map(within).collect()
}

/// The program in a folder of its own, where `cache` has nothing.
pub fn program(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_narrows"));
    command.env("XDG_CACHE_HOME", folder.join(".cache")).env_remove("CLICOLOR_FORCE");
    // A panic is found by its message. Addresses of a backtrace take a second.
    command.env("RUST_BACKTRACE", "0").current_dir(folder).stdin(Stdio::null());
    command
}

/// Runs a command, and panics where it takes too long. `prefix` is a program that runs it, with its arguments.
pub fn run(folder: &Path, arguments: &str, prefix: &[&str]) -> Ended {
    let log = log_file(folder);
    let mut command = program(folder);
    if let [first, rest @ ..] = prefix {
        let narrows = command;
        command = Command::new(first);
        command.args(rest).arg(narrows.get_program()).current_dir(folder).stdin(Stdio::null());
        for (name, value) in narrows.get_envs() {
            value.map(|value| command.env(name, value));
        }
    }
    command.args(words(folder, arguments));
    command.stdout(Stdio::null()).stderr(File::create(&log).expect("a writable folder"));
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let status =
        wait(&mut child).unwrap_or_else(|| panic!("{arguments}: not finished after {TIME_MAX:?}"));
    let message = String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned();
    fs::remove_file(log).expect("the log");
    Ended { status, message }
}

/// The file of standard error, beside the folder of a command, which is compared afterwards.
fn log_file(folder: &Path) -> PathBuf {
    let mut name = folder.as_os_str().to_owned();
    name.push(".log");
    name.into()
}

/// Asserts that a command ended with a documented code, and with a message where it failed.
pub fn assert_orderly(ended: &Ended, arguments: &str) {
    let Ended { status, message } = ended;
    assert!(!message.contains("panicked"), "{arguments}: {message}");
    let is_documented = matches!(status.code(), Some(0 | 1 | 2 | 75));
    assert!(is_documented, "{arguments}: {status}: {message}");
    assert!(status.success() || message.contains("error:"), "{arguments}: {status}: {message}");
}

/// Outputs of commands, which may appear beside the files of the fixture.
const OUTPUTS: [&str; 8] =
    ["new.tokens", "m.svg", "saved", "saved.jsonl", "events", "weights", "factored", ".cache"];

/// Names in a folder that are neither files of the fixture nor outputs.
pub fn leftovers(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let is_expected =
        |name: &String| OUTPUTS.contains(&name.as_str()) || fixture().join(name).exists();
    names.filter(|name| !is_expected(name)).collect()
}
