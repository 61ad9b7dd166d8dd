//! A process that saves after every step is killed a hundred times, at random moments.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use std::{env, fs};

use narrows_plan::Zero;
use narrows_runtime::checkpoint::{latest, load, save};

use crate::support::*;
use narrows_test_support::plans::TestRng;

/// Variable with the checkpoint folder of the child, which is this test binary running
/// [`saved_steps_survive_kills`] alone.
const FOLDER: &str = "NARROWS_TEST_CHECKPOINT_FOLDER";
const SAVED: &str = "saved step ";

/// Trains and saves until the process is killed.
fn train_and_save(dir: &Path) -> ! {
    let model = small_model(false);
    let mut session = initialised_session(&model, &plan(&model, 1, mesh(1, 1, 1), Zero::Off));
    if let Some(path) = latest(dir).unwrap() {
        load(&path, &model).unwrap().restore(&mut session).unwrap();
    }
    loop {
        train(&mut session, 1);
        let checkpoint = checkpoint_of(&session, &model);
        // The second save replaces the checkpoint of the first.
        for _ in 0..2 {
            save(dir, &checkpoint, &model, keep(1)).unwrap();
            println!("{SAVED}{}", session.steps());
        }
    }
}

/// Runs the child for `delay` after its first save, or after its start, and kills it. Returns the last
/// step that it printed as saved.
fn run_and_kill(dir: &Path, delay: Duration, after_save: bool) -> Option<u64> {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "kill::saved_steps_survive_kills", "--nocapture"])
        .env(FOLDER, dir)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let (sender, receiver) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            let step = line.split_once(SAVED).and_then(|(_, step)| step.parse::<u64>().ok());
            step.map(|step| sender.send(step));
        }
    });
    let first = after_save.then(|| receiver.recv_timeout(Duration::from_secs(60)).ok()).flatten();
    assert!(first.is_some() || !after_save, "the child saved nothing");
    std::thread::sleep(delay);
    // SIGKILL, on the systems that have it.
    child.kill().unwrap();
    child.wait().unwrap();
    reader.join().unwrap();
    receiver.try_iter().last().or(first)
}

#[test]
fn saved_steps_survive_kills() {
    const KILLS: u32 = 100;
    if let Some(dir) = env::var_os(FOLDER) {
        train_and_save(Path::new(&dir));
    }
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let model = small_model(false);
    let mut rng = TestRng::new(3);
    let (mut reached, mut interrupted) = (0, 0);
    let start = Instant::now();
    for kill in 0..KILLS {
        let delay = Duration::from_micros(rng.below(40_000) as u64);
        // One in ten is killed before its first save.
        let printed = run_and_kill(dir, delay, kill == 0 || rng.below(10) > 0);
        let saved = reached.max(printed.unwrap_or(0));
        let path = latest(dir).unwrap().expect("a checkpoint");
        let loaded = load(&path, &model).unwrap_or_else(|error| panic!("kill {kill}: {error}"));
        assert!(loaded.step >= saved, "kill {kill}: {} after {saved}", loaded.step);
        reached = loaded.step;
        let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        interrupted += usize::from(
            names.filter(|name| !name.to_str().unwrap().starts_with("step-")).count() > 0,
        );
    }
    println!("{KILLS} kills, {interrupted} during a save, {reached} steps, {:?}", start.elapsed());
    assert!(interrupted > 0, "no kill interrupted a save");
    let loaded = load(&latest(dir).unwrap().unwrap(), &model).unwrap();
    save(dir, &loaded, &model, keep(1)).unwrap();
    assert_eq!(fs::read_dir(dir).unwrap().count(), 1, "temporary folders remain");
}
