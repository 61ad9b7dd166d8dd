//! Commands of one process that are killed at random moments.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use narrows_plan::model::{self, Model};
use narrows_runtime::checkpoint;
use narrows_test_support::plans::TestRng;
use serde_json::Value;

use super::fixture::{SMALL_RUN, assert_orderly, copy_folder, fixture, program, run, words};

/// Steps of the run.
const STEPS: u64 = 12;
/// Kills of one run.
const KILLS: usize = 4;
/// Longest time before a kill: most runs are over by then.
const DELAY_MAX: Duration = Duration::from_millis(300);

/// Flags of a run that saves after every step, keeps its best checkpoint too, and continues from its newest checkpoint.
pub fn saving_run() -> String {
    format!(
        "{SMALL_RUN} --data @t.tokens --steps {STEPS} --checkpoint-dir @saved --checkpoint-every 1 --keep 2 \
         --eval-data @t.tokens --eval-tokens 32 --eval-every 2 --keep-best --metrics @saved.jsonl \
         --tensorboard @events --resume=auto"
    )
}

/// Kills a run a few times, and a making of a token file once.
pub fn attempt(seed: u64) {
    let mut rng = TestRng::new(seed);
    let folder = tempfile::tempdir().expect("a temporary folder");
    copy_folder(fixture(), folder.path()).expect("a copy");
    let mut saved = 0;
    for _ in 0..KILLS {
        kill(folder.path(), &saving_run(), random_delay(&mut rng));
        saved = assert_nothing_lost(folder.path(), saved);
    }
    assert_completes(folder.path(), 0);
    let data = "data @docs.txt --output @killed.tokens";
    kill(folder.path(), data, random_delay(&mut rng) / 10);
    assert_whole_or_absent(folder.path(), "killed.tokens", "t.tokens");
}

fn random_delay(rng: &mut TestRng) -> Duration {
    Duration::from_micros(rng.below(DELAY_MAX.as_micros() as usize) as u64)
}

/// Starts a command, and kills it after a time.
fn kill(folder: &Path, arguments: &str, delay: Duration) {
    let log = fs::File::create(folder.join("killed.log")).expect("a writable folder");
    let mut command = program(folder);
    command.args(words(folder, arguments)).stdout(std::process::Stdio::null()).stderr(log);
    let mut child = command.spawn().expect("the program");
    std::thread::sleep(delay);
    // One that is over takes no signal.
    let _ = child.kill();
    let status = child.wait().expect("a child");
    let message = fs::read_to_string(folder.join("killed.log")).unwrap_or_default();
    assert!(status.code().is_none_or(|code| code == 0), "{arguments}: {status}: {message}");
    assert!(!message.contains("panicked"), "{arguments}: {message}");
}

/// Asserts that the newest checkpoint of a run is undamaged and not older than that of a step. Returns its step.
pub fn assert_nothing_lost(folder: &Path, saved: u64) -> u64 {
    static MODEL: OnceLock<Model> = OnceLock::new();
    let model = MODEL.get_or_init(|| {
        // A model has the name of its file.
        let file = fixture().join("small.json");
        let text = fs::read_to_string(&file).expect("the model");
        model::read(&file.display().to_string(), &text).expect("a valid model")
    });
    let newest = match checkpoint::latest(&folder.join("saved")) {
        Ok(newest) => newest,
        Err(error) => panic!("the checkpoints cannot be listed: {error}"),
    };
    let step = newest.map_or(0, |path| {
        checkpoint::load(&path, model).unwrap_or_else(|error| panic!("damaged: {error}")).step
    });
    assert!(step >= saved, "the newest checkpoint is of step {step}, after one of step {saved}");
    step
}

/// Lets a run end, and asserts that its losses are those of an undisturbed one and that nothing else remains. A run that
/// cannot write the metrics of a step saves this step and ends, so that this many lines may be missing.
pub fn assert_completes(folder: &Path, unwritten_max: usize) {
    static UNDISTURBED: OnceLock<Vec<[u64; 3]>> = OnceLock::new();
    let undisturbed = UNDISTURBED.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        copy_folder(fixture(), folder.path()).expect("a copy");
        let ended = run(folder.path(), &saving_run(), &[]);
        assert!(ended.status.success(), "{}", ended.message);
        losses(folder.path())
    });
    let ended = run(folder, &saving_run(), &[]);
    assert_orderly(&ended, &saving_run());
    assert!(ended.status.success(), "a run does not resume: {}", ended.message);
    assert_undisturbed(folder, undisturbed, unwritten_max);
}

/// Asserts that the losses of a completed run are those of an undisturbed one, and that nothing else remains.
pub fn assert_undisturbed(folder: &Path, undisturbed: &[[u64; 3]], unwritten_max: usize) {
    let losses = losses(folder);
    let mut steps = undisturbed.iter();
    let in_order = losses.iter().all(|own| steps.any(|step| step == own));
    let missing = undisturbed.len().saturating_sub(losses.len());
    assert!(
        in_order && missing <= unwritten_max,
        "losses after the disturbance: {losses:?}, undisturbed: {undisturbed:?}"
    );
    let entries = fs::read_dir(folder.join("saved")).expect("the checkpoints").flatten();
    for name in entries.map(|entry| entry.file_name().to_string_lossy().into_owned()) {
        let is_known = name.starts_with("step-") || [".narrows-lock", "best"].contains(&&*name);
        assert!(is_known, "{name} remains");
    }
    let best = checkpoint::list(&folder.join("saved/best")).expect("the best checkpoint");
    assert_eq!(best.len(), 1, "best checkpoints: {best:?}");
}

/// Step, loss and gradient norm of every line of the metrics, to the bit.
pub fn losses(folder: &Path) -> Vec<[u64; 3]> {
    let text = fs::read_to_string(folder.join("saved.jsonl")).expect("metrics");
    let line = |line: &str| {
        let line: Value = serde_json::from_str(line).expect("a line of metrics");
        let number = |key: &str| line[key].as_f64().expect("a number").to_bits();
        [number("step"), number("loss"), number("grad_norm")]
    };
    text.lines().map(line).collect()
}

/// Asserts that a file is there with the contents of another one, or not there.
pub fn assert_whole_or_absent(folder: &Path, name: &str, whole: &str) {
    let written = fs::read(folder.join(name));
    let expected = fs::read(folder.join(whole)).expect("the whole file");
    assert!(
        written.is_err() || written.is_ok_and(|bytes| bytes == expected),
        "{name} is half-written"
    );
}
