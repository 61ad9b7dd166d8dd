//! An attack on the program: damaged files, kills, failing system calls, and strangers.
//!
//! Whatever happens, no command panics or ends by a signal of its own, exit codes are the documented ones, messages name
//! what is wrong, nothing half-written remains under a name, and no checkpoint is lost.
//!
//! ```sh
//! cargo test --test attack                             # each attack for some seconds, as with all other tests
//! cargo test --test attack -- --ignored                # four times as long, with the second level of tests
//! cargo test --test attack -- --long                   # each for ten minutes
//! cargo test --test attack -- files --seed 0x1f        # one attempt, as a failure prints it
//! ```
//!
//! An attempt is a function of its seed, except for the moments of kills. `corpus/` has the undamaged files of other
//! programs, and in `corpus/found/` what once broke a reader.

mod arguments;
mod files;
mod fixture;
#[cfg(target_os = "linux")]
mod kills;
#[cfg(target_os = "linux")]
mod process_kills;
mod readers;
#[cfg(target_os = "linux")]
mod strangers;
#[cfg(target_os = "linux")]
mod system_calls;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use arguments::{Arguments, Extent};

/// One kind of attack.
struct Attack {
    name: &'static str,
    /// Time for the attempts of a bounded run.
    time: Duration,
    /// One attempt, which panics where the program breaks a rule.
    attempt: fn(u64),
    /// Reason why the attack cannot be made on this machine.
    missing: fn() -> Option<String>,
}

const ATTACKS: &[Attack] = &[
    attack("readers", 3, readers::attempt),
    attack("files", 4, files::attempt),
    #[cfg(target_os = "linux")]
    attack("kills", 3, kills::attempt),
    #[cfg(target_os = "linux")]
    attack("process-kills", 4, process_kills::attempt),
    #[cfg(target_os = "linux")]
    Attack { missing: system_calls::missing, ..attack("system-calls", 4, system_calls::attempt) },
    #[cfg(target_os = "linux")]
    attack("strangers", 2, strangers::attempt),
];

const fn attack(name: &'static str, seconds: u64, attempt: fn(u64)) -> Attack {
    Attack { name, time: Duration::from_secs(seconds), attempt, missing: || None }
}

/// Factor of the times in the second level of tests.
const SECOND_LEVEL: u32 = 4;

/// Time for the attempts of each attack with `--long`.
const LONG: Duration = Duration::from_secs(600);

fn main() -> ExitCode {
    let names: Vec<&str> = ATTACKS.iter().map(|attack| attack.name).collect();
    let arguments = match Arguments::parse(std::env::args().skip(1), &names) {
        Ok(arguments) => arguments,
        Err(message) => {
            eprintln!("error: {message}");
            return ExitCode::from(2);
        }
    };
    let selected = ATTACKS.iter().filter(|attack| arguments.selects(attack.name));
    let selected = Mutex::new(selected);
    let next = || selected.lock().unwrap_or_else(PoisonError::into_inner).next();
    // Two at a time, since most attempts wait for a process with one thread. All are attempted, whichever fails.
    let withstand =
        || std::iter::from_fn(next).filter(|attack| !run(attack, &arguments)).count() == 0;
    let withstood = thread::scope(|scope| {
        let other = scope.spawn(withstand);
        withstand() & other.join().unwrap_or(false)
    });
    if withstood { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Attempts an attack until its time is over. Returns whether the program has withstood it.
fn run(attack: &Attack, arguments: &Arguments) -> bool {
    let Attack { name, time, attempt, missing } = attack;
    if let Some(reason) = missing() {
        println!("{name}: skipped: {reason}");
        return true;
    }
    let first = arguments.seed.unwrap_or_else(arguments::random_seed);
    println!("{name}: seeds from {first:#x}");
    let time = match arguments.extent {
        Extent::FirstLevel => *time,
        Extent::SecondLevel => *time * SECOND_LEVEL,
        Extent::Long => LONG,
    };
    let start = Instant::now();
    let mut attempts: u64 = 0;
    while attempts == 0 || arguments.seed.is_none() && start.elapsed() < time {
        let seed = first.wrapping_add(attempts);
        if catch_unwind(AssertUnwindSafe(|| attempt(seed))).is_err() {
            println!("{name}: failed; again: cargo test --test attack -- {name} --seed {seed:#x}");
            return false;
        }
        attempts += 1;
    }
    println!("{name}: {attempts} attempts withstood in {:.1} s", start.elapsed().as_secs_f64());
    true
}
