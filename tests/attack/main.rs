//! An attack on the program: damaged files, kills, failing system calls, and strangers.
//!
//! Whatever happens, no command panics or ends by a signal of its own, exit codes are the documented ones, messages name
//! what is wrong, nothing half-written remains under a name, and no checkpoint is lost.
//!
//! ```sh
//! cargo test --test attack                             # each attack some times, as with all other tests
//! cargo test --test attack -- --ignored                # four times as often, with the second level of tests
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

use narrows_test_support::random_seed;

use arguments::{Arguments, Extent};

/// One kind of attack.
struct Attack {
    name: &'static str,
    /// Number of attempts in the first level of tests.
    attempts: u64,
    /// One attempt, which panics where the program breaks a rule.
    attempt: fn(u64),
    /// Reason why the attack cannot be made on this machine.
    missing: fn() -> Option<String>,
}

const ATTACKS: &[Attack] = &[
    attack("readers", 68, readers::attempt),
    attack("files", 160, files::attempt),
    #[cfg(target_os = "linux")]
    attack("kills", 5, kills::attempt),
    #[cfg(target_os = "linux")]
    attack("process-kills", 2, process_kills::attempt),
    #[cfg(target_os = "linux")]
    Attack { missing: system_calls::missing, ..attack("system-calls", 16, system_calls::attempt) },
    #[cfg(target_os = "linux")]
    attack("strangers", 12, strangers::attempt),
];

const fn attack(name: &'static str, attempts: u64, attempt: fn(u64)) -> Attack {
    Attack { name, attempts, attempt, missing: || None }
}

/// Factor of the attempts in the second level of tests.
const SECOND_LEVEL: u64 = 4;

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

/// Attempts an attack as often as the level asks for, or until the time is over. Returns whether the program has
/// withstood it.
fn run(attack: &Attack, arguments: &Arguments) -> bool {
    let Attack { name, attempts, attempt, missing } = attack;
    if let Some(reason) = missing() {
        println!("{name}: skipped: {reason}");
        return true;
    }
    let first = arguments.seed.unwrap_or_else(random_seed);
    println!("{name}: seeds from {first:#x}");
    let start = Instant::now();
    let continues = |made: u64| match arguments.extent {
        _ if arguments.seed.is_some() => made == 0,
        Extent::FirstLevel => made < *attempts,
        Extent::SecondLevel => made < *attempts * SECOND_LEVEL,
        Extent::Long => start.elapsed() < LONG,
    };
    let mut made: u64 = 0;
    while continues(made) {
        let seed = first.wrapping_add(made);
        if catch_unwind(AssertUnwindSafe(|| attempt(seed))).is_err() {
            println!("{name}: failed; again: cargo test --test attack -- {name} --seed {seed:#x}");
            return false;
        }
        made += 1;
    }
    println!("{name}: {made} attempts withstood in {:.1} s", start.elapsed().as_secs_f64());
    true
}
