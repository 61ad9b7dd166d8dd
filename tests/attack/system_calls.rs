//! Commands whose K-th system call of a kind fails, or is their last: `strace` injects both.

use std::process::{Command, Stdio};

use narrows_test_support::plans::TestRng;

use super::fixture::{Ended, assert_orderly, copy_folder, fixture, leftovers, run};
use super::kills::{assert_completes, assert_nothing_lost, assert_whole_or_absent, saving_run};

/// System calls that change files.
const CALLS: [&str; 9] =
    ["write", "rename", "renameat", "fsync", "ftruncate", "mkdir", "unlink", "unlinkat", "rmdir"];

/// Largest K: a run of a few steps makes hardly more calls of one kind.
const CALLS_MAX: usize = 30;

/// Disturbance at the K-th call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Injection {
    Kill,
    Error(&'static str),
}

const INJECTIONS: &[Injection] = &[
    Injection::Kill,
    Injection::Kill,
    Injection::Error("ENOSPC"),
    Injection::Error("EIO"),
    Injection::Error("EDQUOT"),
];

/// Reason why this attack cannot be made on this machine.
pub fn missing() -> Option<String> {
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-o", "/dev/null", "true"]).stdout(Stdio::null());
    match strace.stderr(Stdio::null()).status() {
        Ok(status) if status.success() => None,
        Ok(_) => Some("strace may not trace".into()),
        Err(error) => Some(format!("strace: {error}")),
    }
}

/// Disturbs one call of a run, of a making of a token file, or of an export.
pub fn attempt(seed: u64) {
    let mut rng = TestRng::new(seed);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    copy_folder(fixture(), folder).expect("a copy");
    let injection = INJECTIONS[rng.below(INJECTIONS.len())];
    let (arguments, calls_max) = match rng.below(5) {
        0 => ("data @docs.txt --output @new.tokens".to_owned(), 3),
        1 => ("export-weights @kept --model @small.json --to cola --output @weights".to_owned(), 4),
        _ => (saving_run(), CALLS_MAX),
    };
    let (call, number) = (CALLS[rng.below(CALLS.len())], 1 + rng.below(calls_max));
    let what = match injection {
        Injection::Kill => "signal=KILL".into(),
        Injection::Error(name) => format!("error={name}"),
    };
    let inject = format!("inject={call}:{what}:when={number}");
    let trace = format!("trace={call}");
    let strace = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", &trace, "-e", &inject];
    let ended = run(folder, &arguments, &strace);
    let described = format!("{injection:?} at {call} {number} of {arguments}");
    let Ended { status, message } = &ended;
    match status.code() {
        Some(0 | 75) => {
            assert_orderly(&ended, &described);
            assert_eq!(leftovers(folder), [""; 0], "{described}: {message}");
        }
        // strace ends by the signal of the command, or with its number above 128.
        None | Some(128..) if injection == Injection::Kill => {}
        _ => panic!("{described}: {status}: {message}"),
    }
    assert_whole_or_absent(folder, "new.tokens", "t.tokens");
    for name in ["config.json", "model.safetensors"] {
        let (written, whole) = (format!("weights/{name}"), format!("exported/{name}"));
        assert_whole_or_absent(folder, &written, &whole);
        let is_alone = folder.join("weights").exists() && !folder.join(&written).exists();
        assert!(!is_alone, "{described}: {name} is missing");
    }
    let saved = assert_nothing_lost(folder, 0);
    if arguments == saving_run() {
        let metrics_failed = call == "write" && message.contains("saved.jsonl");
        assert_completes(folder, usize::from(metrics_failed));
        assert_nothing_lost(folder, saved);
    }
}
