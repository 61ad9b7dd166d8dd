//! `narrows calibrate`: measures this machine, and writes its profile.

use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use narrows_cost_model::{Profile, fit, profile};
use narrows_runtime::measure::Effort;

use crate::args::calibrate::{CalibrateArgs, Calibration, calibrate as resolve};
use crate::args::low::Format;
use crate::calibrate::compare::compare;
use crate::calibrate::works::{Amount, Work, to_compare, to_measure};
use crate::calibrate::{Rounds, Subject, cache, coverage, machine};
use crate::calibrate::{points, repeatability, run as run_rounds};
use crate::errors::{Failure, Outcome};
use crate::output;
use crate::report::calibration::Findings;

/// What plans to measure are searched on: the shapes are what matters.
const BASE: &str = "cpu-local";

/// A few seconds.
const QUICK: Rounds = Rounds { rounds: 2, effort: effort(1, 250) };
/// Some minutes.
const WHOLE: Rounds = Rounds { rounds: 2, effort: effort(2, 400) };

const fn effort(least: usize, milliseconds: u64) -> Effort {
    Effort { warm_up: 1, least, most: 20, time: Duration::from_millis(milliseconds) }
}

/// Measures, writes, reports.
pub fn run(args: &CalibrateArgs) -> Outcome<()> {
    let asked = resolve(args)?;
    let place = asked.output.as_deref();
    if let Some(file) = place.filter(|file| !output::is_stdout(file)) {
        output::writable(Path::new(file))?;
    }
    let base = profile::preset(BASE).map_err(Failure::flags)?;
    let to_measure = to_measure(asked.amount, asked.model.as_ref(), asked.devices, &base)?;
    let (amount, devices) = (asked.amount, asked.devices);
    let others = if asked.compare { to_compare(amount, devices, &base)? } else { vec![] };
    let (measured, compared) = measure(&asked, to_measure, others)?;
    let command = command(&asked);
    let mut profile = fitted(asked.threads, &command, &measured)?;
    let comparison = asked.compare.then(|| compare(&profile, &compared, &command));
    if let Some(comparison) = &comparison {
        profile = comparison.widened(profile).map_err(|d| Failure::file("the profile", d))?;
    }
    let written = write(&asked, &profile)?;
    let presets = super::waiting("planning the presets", asked.format, || {
        coverage::of_presets(&profile, devices)
    });
    let findings = Findings::of(&profile, measured.len(), presets, comparison, written);
    if let Some(warning) = profile.warning() {
        output::warn(&warning);
    }
    match asked.format {
        Format::Json => output::print_json(&findings),
        Format::Text if place.is_some_and(output::is_stdout) => {
            output::tell(&findings.text());
            Ok(())
        }
        Format::Text => output::print(&findings.text()),
    }
}

/// A profile of this machine for who did not name one: the one that is kept, or one measured in a few
/// seconds, and kept where that can be.
pub fn of_this_machine(threads: u64, format: Format) -> Outcome<Profile> {
    if let Some(profile) = cache::load(threads) {
        return Ok(profile);
    }
    let base = profile::preset(BASE).map_err(Failure::flags)?;
    if format == Format::Text {
        output::tell(
            "Measuring this machine, once, for some seconds: `narrows calibrate` does it better\n",
        );
    }
    let asked = Calibration {
        output: None,
        model: None,
        threads,
        devices: threads.min(2),
        amount: Amount::Quick,
        compare: false,
        format,
    };
    let works = to_measure(asked.amount, None, asked.devices, &base)?;
    let (measured, _) = measure(&asked, works, vec![])?;
    let profile = fitted(threads, "a quick measurement by `narrows run`", &measured)?;
    match cache::store(threads, &profile) {
        Ok(path) if format == Format::Text => {
            output::tell(&format!("Kept in {}\n", path.display()));
        }
        Ok(_) => {}
        Err(error) => {
            output::warn(&format!("the measurement is not kept for the next run: {error}"));
        }
    }
    Ok(profile)
}

/// Runs the plans to measure and the others in the same rounds.
fn measure(
    asked: &Calibration,
    to_measure: Vec<Work>,
    others: Vec<Work>,
) -> Outcome<(Vec<Subject>, Vec<Subject>)> {
    let rounds = match asked.amount {
        Amount::Quick => QUICK,
        Amount::Whole => WHOLE,
    };
    let mut subjects: Vec<Subject> = to_measure.into_iter().filter_map(Subject::plan).collect();
    let count = subjects.len();
    subjects.extend(others.into_iter().filter_map(Subject::plan));
    let progress = progress(subjects.len() * rounds.rounds, asked.format);
    let done = run_rounds(&mut subjects, asked.threads, rounds, |subject| {
        progress.set_message(subject.work.name.clone());
        progress.inc(1);
    });
    progress.finish_and_clear();
    done?;
    let compared = subjects.split_off(count);
    Ok((subjects, compared))
}

fn fitted(threads: u64, command: &str, measured: &[Subject]) -> Outcome<Profile> {
    let machine = machine::describe(threads, command);
    let points = points(measured);
    let repeatability = repeatability(measured, &points);
    fit::profile(&machine, points, Some(repeatability))
        .map_err(|defects| Failure::file("the measurement", defects))
}

/// The command that makes such a profile again.
fn command(asked: &Calibration) -> String {
    let mut words = vec!["`narrows calibrate".to_owned()];
    if asked.amount == Amount::Quick {
        words.push("--quick".into());
    }
    if let Some(model) = &asked.model {
        words.push(format!("--model {}", model.name));
    }
    if asked.compare {
        words.push("--compare".into());
    }
    words.push(format!("--threads {} --devices {}`", asked.threads, asked.devices));
    words.join(" ")
}

/// Says where it was written.
fn write(asked: &Calibration, profile: &Profile) -> Outcome<String> {
    let Some(file) = &asked.output else {
        let place = cache::path(asked.threads);
        let place = place.map_or("the cache folder".into(), |path| path.display().to_string());
        let stored = cache::store(asked.threads, profile);
        let path = stored.map_err(|error| output::unwritable(&place, &error))?;
        return Ok(path.display().to_string());
    };
    let name = file.to_string_lossy().into_owned();
    let text = cache::text(profile).map_err(|error| output::unwritable(&name, &error))?;
    if output::is_stdout(file) {
        output::print(&text)?;
    } else {
        output::write_whole(Path::new(file), &text)
            .map_err(|error| output::unwritable(&name, &error))?;
    }
    Ok(name)
}

/// A bar, drawn on standard error, and only when that is a terminal.
fn progress(runs: usize, format: Format) -> ProgressBar {
    if format == Format::Json {
        return ProgressBar::hidden();
    }
    let progress = ProgressBar::new(runs as u64);
    let template = "{spinner} {wide_bar} run {pos} of {len}, {msg}, {eta} to go";
    if let Ok(style) = ProgressStyle::with_template(template) {
        progress.set_style(style);
    }
    progress.enable_steady_tick(super::TICK);
    progress
}
