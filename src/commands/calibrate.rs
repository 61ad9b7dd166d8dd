//! `narrows calibrate`: measures this machine and writes its profile.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::ProgressBar;
use narrows_calibration::fit::{GpuModel, fit_cpu_profile, fit_gpu_profile, with_bf16_rate};
use narrows_calibration::validation::preset_coverage;
use narrows_cost_model::{Profile, profile};
use narrows_runtime::MeasurementEffort;
use narrows_runtime::session::Session;

use crate::args::{
    CalibrateArgs, CalibrateBackendArg, CalibrateSettings, CalibrateTarget, Detail, OutputFormat,
};
use crate::calibrate::benchmarks::{
    Benchmark, BenchmarkExtent, bf16_benchmark, cpu_benchmarks, cpu_comparison,
};
use crate::calibrate::bf16::bf16_rate_ratio;
use crate::calibrate::cache::{self, CachedProfileKey};
use crate::calibrate::compare::compare;
use crate::calibrate::gpu::{self as gpu_calibration, GpuProcesses};
use crate::calibrate::kept_profile::KeptProfile;
use crate::calibrate::{
    DeviceSharing, MeasurementRounds, PlannedBenchmark, machine, measured_points, repeatability,
    run_rounds,
};
use crate::cluster::report_failure;
use crate::defaults::RequestDefaults;
use crate::errors::{CommandResult, Failure, Problem};
use crate::report::{self, CalibrationReport};
use crate::{gpu, output, progress};

/// The profile for the search of CPU benchmark plans, of which only the kernel shapes matter.
const BASE: &str = "cpu-local";

/// A few seconds of measurement.
const QUICK: MeasurementRounds = MeasurementRounds { rounds: 2, effort: effort(1, 250) };
/// Some minutes of measurement.
const FULL: MeasurementRounds = MeasurementRounds { rounds: 4, effort: effort(2, 400) };

const fn effort(timed_steps_min: usize, milliseconds: u64) -> MeasurementEffort {
    MeasurementEffort {
        warm_up_steps: 1,
        timed_steps_min,
        timed_steps_max: 20,
        time_limit: Duration::from_millis(milliseconds),
    }
}

/// Measures, writes the profile, reports.
pub fn run(args: &CalibrateArgs) -> CommandResult<()> {
    let process = match args.backend {
        CalibrateBackendArg::Cpu => None,
        CalibrateBackendArg::Cuda => args.launch.resolve().ok().flatten(),
    };
    let before_joining = |failure| match &process {
        Some(process) => report_failure(process, failure),
        None => failure,
    };
    let settings = args.resolve().map_err(&before_joining)?;
    match &settings.target {
        CalibrateTarget::Cpu { threads } => on_cpu(&settings, *threads),
        CalibrateTarget::Gpus { .. } => on_gpus(&settings, before_joining),
    }
}

fn on_cpu(settings: &CalibrateSettings, threads: u64) -> CommandResult<()> {
    let key = CachedProfileKey::cpu(threads);
    check_output(settings, &key)?;
    let base = profile::preset(BASE).map_err(|defects| Failure::flag("--hardware", defects))?;
    let measured =
        cpu_benchmarks(settings.extent, settings.model.as_ref(), settings.devices, &base)?;
    let compared = match settings.compare {
        true => cpu_comparison(settings.extent, settings.devices, &base)?,
        false => vec![],
    };
    let (mut benchmarks, count) = plan_all(measured, compared);
    let command = command_line(settings);
    let kept = KeptProfile::default();
    kept.end_on_signals();
    let keep = |benchmarks: &[PlannedBenchmark], rounds: &str| {
        let source = format!("{command}, unfinished, {rounds}");
        let fit = || fit_processors(threads, &source, &benchmarks[..count]);
        keep_partial(settings, (&kept, rounds), fit);
    };
    measure(settings, &mut benchmarks, |benchmark| benchmark.cpu_session(threads), keep)
        .map_err(|failure| kept.with_kept(failure))?;
    let compared = benchmarks.split_off(count);
    let profile = fit_processors(threads, &command, &benchmarks)?;
    let profile = with_measured_bf16(settings, threads, profile, &base)
        .map_err(|failure| kept.with_kept(failure))?;
    deliver(settings, (&key, &kept), profile, &benchmarks, &compared)
}

/// Measures in every process. The process of rank 0 fits, writes and prints. `before_joining` tells the others of a failure.
fn on_gpus(
    settings: &CalibrateSettings,
    before_joining: impl Fn(Failure) -> Failure,
) -> CommandResult<()> {
    let CalibrateTarget::Gpus { process, global_batch, sequence_length } = &settings.target else {
        return Ok(());
    };
    let plan = || {
        let Some(gpu_model) = gpu::first(process.as_ref()) else {
            let problem = Problem::new("--backend", "this machine has no GPU");
            let hint = "`narrows doctor` reports what is missing";
            return Err(Failure::failed(vec![problem.hint(hint)]));
        };
        let description = gpu::description().unwrap_or_default();
        let key = CachedProfileKey::gpus(&description, settings.devices);
        if process.is_none() {
            check_output(settings, &key)?;
        }
        let base = gpu_calibration::base(&gpu_model)?;
        let selection = gpu_calibration::benchmarks::BenchmarkSelection {
            extent: settings.extent,
            extra_model: settings.model.as_ref(),
            devices: settings.devices,
            global_batch: *global_batch,
            sequence_length: *sequence_length,
            profile: &base,
        };
        let compared = if settings.compare { selection.compared()? } else { vec![] };
        let (benchmarks, count) = plan_all(selection.measured()?, compared);
        Ok((gpu_model, key, base, benchmarks, count))
    };
    let (gpu_model, key, base, mut benchmarks, count) = plan().map_err(&before_joining)?;
    let processes = GpuProcesses::join(process.clone(), &benchmarks, &command_line(settings))?;
    let mut measure_and_deliver = || {
        if process.is_some() && settings.is_rank_0() {
            check_output(settings, &key)?;
        }
        let kept = KeptProfile::default();
        if settings.is_rank_0() {
            kept.end_on_signals();
        }
        let keep = |benchmarks: &[PlannedBenchmark], rounds: &str| {
            let source = format!("{}, unfinished, {rounds}", command_line(settings));
            keep_partial(settings, (&kept, rounds), || {
                fit_gpus(settings, gpu_model.clone(), &base, &benchmarks[..count], &source)
            });
        };
        measure(settings, &mut benchmarks, |benchmark| processes.open(benchmark), keep)
            .map_err(|failure| kept.with_kept(failure))?;
        if !settings.is_rank_0() {
            return Ok(());
        }
        let compared = benchmarks.split_off(count);
        let source = command_line(settings);
        let profile = fit_gpus(settings, gpu_model.clone(), &base, &benchmarks, &source)?;
        deliver(settings, (&key, &kept), profile, &benchmarks, &compared)
    };
    processes.leave(measure_and_deliver())
}

/// Checks that the profile can be written, before the long measurement.
fn check_output(settings: &CalibrateSettings, key: &CachedProfileKey) -> CommandResult<()> {
    match settings.output.as_deref() {
        Some(file) if output::is_stdout(file) => Ok(()),
        Some(file) => output::check_writable(Path::new(file)),
        None => key.check_writable(settings.extent),
    }
}

/// Compares the profile with other plans if requested, writes it and reports.
fn deliver(
    settings: &CalibrateSettings,
    (key, kept): (&CachedProfileKey, &KeptProfile),
    mut profile: Profile,
    measured: &[PlannedBenchmark],
    compared: &[PlannedBenchmark],
) -> CommandResult<()> {
    let comparison = settings.compare.then(|| compare(&profile, compared, &command_line(settings)));
    if let Some(comparison) = &comparison {
        profile =
            comparison.apply_step_error(profile).map_err(|d| Failure::file("the profile", d))?;
    }
    let written = kept.complete(|| write_profile(settings, key, &profile))?;
    let visible = settings.format == OutputFormat::Text;
    let presets = progress::with_spinner("planning the presets", visible, || {
        let RequestDefaults { global_batch, sequence_length, .. } = RequestDefaults::RUN;
        preset_coverage(&profile, settings.devices, global_batch, sequence_length)
    });
    let report = CalibrationReport::new(&profile, measured.len(), presets, comparison, written);
    if let Some(warning) = profile.warning() {
        output::warn(&warning);
    }
    let profile_on_stdout = settings.output.as_deref().is_some_and(output::is_stdout);
    report::print(&report, settings.format, settings.detail, profile_on_stdout)
}

/// The cached profile of this machine, or else a quick measurement, which is cached where possible.
pub fn profile_of_this_machine(threads: u64, format: OutputFormat) -> CommandResult<Profile> {
    let key = CachedProfileKey::cpu(threads);
    if let Some(profile) = key.load() {
        return Ok(profile);
    }
    let base = profile::preset(BASE).map_err(|defects| Failure::flag("--hardware", defects))?;
    if format == OutputFormat::Text {
        output::eprint(
            "Measuring this machine once, for a few seconds; `narrows calibrate` is more accurate\n",
        );
    }
    let settings = CalibrateSettings {
        output: None,
        model: None,
        target: CalibrateTarget::Cpu { threads },
        devices: threads.min(2),
        extent: BenchmarkExtent::Quick,
        compare: false,
        format,
        detail: Detail::Summary,
    };
    let measured = cpu_benchmarks(settings.extent, None, settings.devices, &base)?;
    let (mut benchmarks, _) = plan_all(measured, vec![]);
    let open = |benchmark: &PlannedBenchmark| benchmark.cpu_session(threads);
    measure(&settings, &mut benchmarks, open, |_, _| ())?;
    let source = "a quick measurement by `narrows run`";
    let profile = fit_processors(threads, source, &benchmarks)?;
    let profile = with_measured_bf16(&settings, threads, profile, &base)?;
    match key.store(settings.extent, &profile) {
        Ok(path) if format == OutputFormat::Text => {
            output::eprint(&format!("Profile cached in {}\n", path.display()));
        }
        Ok(_) => {}
        Err(error) => {
            output::warn(&format!("the profile is not cached for the next run: {error}"));
        }
    }
    Ok(profile)
}

/// Plans the benchmarks for measurement, followed by those for comparison. Also returns the number of the former.
fn plan_all(measured: Vec<Benchmark>, compared: Vec<Benchmark>) -> (Vec<PlannedBenchmark>, usize) {
    let mut benchmarks: Vec<PlannedBenchmark> =
        measured.into_iter().filter_map(PlannedBenchmark::plan).collect();
    let count = benchmarks.len();
    benchmarks.extend(compared.into_iter().filter_map(PlannedBenchmark::plan));
    (benchmarks, count)
}

/// Rounds after which a profile is fitted, whose measurements repeat.
const ROUNDS_MIN: usize = 2;

/// Runs all plans in the same rounds. `keep` is called with the measurements of a calibration that has not ended, and with
/// how much of it has.
fn measure(
    settings: &CalibrateSettings,
    benchmarks: &mut [PlannedBenchmark],
    open: impl FnMut(&PlannedBenchmark) -> CommandResult<Session>,
    keep: impl Fn(&[PlannedBenchmark], &str),
) -> CommandResult<()> {
    let rounds = rounds(settings.extent);
    let progress = progress_bar(benchmarks.len() * rounds.rounds, settings);
    let on_run = |benchmark: &PlannedBenchmark| {
        progress.set_message(benchmark.benchmark.name.clone());
        progress.inc(1);
    };
    let result = run_rounds(benchmarks, rounds, open, on_run, |benchmarks, finished| {
        if finished >= ROUNDS_MIN {
            keep(benchmarks, &format!("{finished} of {} rounds", rounds.rounds));
        }
    });
    progress.finish_and_clear();
    result
}

fn fit_processors(
    threads: u64,
    source: &str,
    measured: &[PlannedBenchmark],
) -> CommandResult<Profile> {
    let machine = machine::describe(threads, source);
    let points = measured_points(measured, DeviceSharing::Shared);
    let repeatability = repeatability(measured, &points);
    fit_cpu_profile(&machine, points, Some(repeatability))
        .map_err(|defects| Failure::file("the measurement", defects))
}

/// The profile of processors with the rate of GEMMs in bf16, where they have such instructions.
fn with_measured_bf16(
    settings: &CalibrateSettings,
    threads: u64,
    profile: Profile,
    base: &Profile,
) -> CommandResult<Profile> {
    let planned = bf16_benchmark(base)?.and_then(PlannedBenchmark::plan);
    let Some(planned) = planned else { return Ok(profile) };
    let effort = rounds(settings.extent).effort;
    let Some(ratio) = bf16_rate_ratio(&planned, threads, effort)? else { return Ok(profile) };
    let how = format!(
        "that in f32 times {ratio:.2}, the mean over the GEMMs of {}",
        planned.benchmark.task
    );
    with_bf16_rate(profile, ratio, &how)
        .map_err(|defects| Failure::file("the measurement", defects))
}

fn rounds(extent: BenchmarkExtent) -> MeasurementRounds {
    match extent {
        BenchmarkExtent::Quick => QUICK,
        BenchmarkExtent::Full => FULL,
    }
}

fn fit_gpus(
    settings: &CalibrateSettings,
    gpu_model: GpuModel,
    base: &Profile,
    measured: &[PlannedBenchmark],
    source: &str,
) -> CommandResult<Profile> {
    let machine = gpu_calibration::describe(gpu_model, settings.devices, source);
    let points = measured_points(measured, DeviceSharing::Separate);
    let repeatability = repeatability(measured, &points);
    let steps = gpu_calibration::measured_steps(measured, base);
    fit_gpu_profile(&machine, points, &steps, Some(repeatability))
        .map_err(|defects| Failure::file("the measurement", defects))
}

/// The command that repeats the measurement, for the provenance of the profile.
fn command_line(settings: &CalibrateSettings) -> String {
    let mut words = vec!["`narrows calibrate".to_owned()];
    if settings.extent == BenchmarkExtent::Quick {
        words.push("--quick".into());
    }
    if let Some(model) = &settings.model {
        words.push(format!("--model {}", model.name));
    }
    if settings.compare {
        words.push("--compare".into());
    }
    match &settings.target {
        CalibrateTarget::Cpu { threads } => {
            words.push(format!("--threads {threads} --devices {}", settings.devices));
        }
        CalibrateTarget::Gpus { global_batch, sequence_length, .. } => {
            words.push("--backend cuda".into());
            let sizes = [("--global-batch", global_batch), ("--sequence-length", sequence_length)];
            let sizes = sizes.into_iter().filter_map(|(flag, size)| Some((flag, (*size)?)));
            words.extend(sizes.map(|(flag, size)| format!("{flag} {size}")));
        }
    }
    format!("{}`", words.join(" "))
}

/// Fits the profile of the rounds so far and writes it beside the file of --output, so that a calibration that is
/// interrupted is not lost. A profile that cannot be fitted or written yet is no error.
fn keep_partial(
    settings: &CalibrateSettings,
    (kept, rounds): (&KeptProfile, &str),
    fit: impl FnOnce() -> CommandResult<Profile>,
) {
    let Some(file) = partial_file(settings).filter(|_| settings.is_rank_0()) else { return };
    let Ok(profile) = fit() else { return };
    if let Ok(text) = cache::text(&profile) {
        kept.keep(rounds, file, |file| output::write_text(file.as_os_str(), &text));
    }
}

/// The file of an unfinished calibration; `None` where its profile goes to the cache or to standard output.
fn partial_file(settings: &CalibrateSettings) -> Option<PathBuf> {
    let file = settings.output.as_deref().filter(|file| !output::is_stdout(file))?;
    let mut partial = file.to_owned();
    partial.push(".partial");
    Some(partial.into())
}

/// Writes the profile. Returns the name of its file.
fn write_profile(
    settings: &CalibrateSettings,
    key: &CachedProfileKey,
    profile: &Profile,
) -> CommandResult<String> {
    let Some(file) = &settings.output else {
        let stored = key.store(settings.extent, profile);
        let path = stored.map_err(|error| cache_failure(key.path(settings.extent), &error))?;
        if let Some(preferred) = key.existing_path().filter(|existing| *existing != path) {
            output::warn(&format!(
                "{} is a full calibration, and `run` keeps using it, not this quick one. \
                 --output FILE writes elsewhere; after deleting the full profile, `run` uses the quick one",
                preferred.display()
            ));
        }
        return Ok(path.display().to_string());
    };
    let name = file.to_string_lossy().into_owned();
    let text = cache::text(profile).map_err(|error| output::write_failure(&name, &error))?;
    output::write_text(file, &text)?;
    if let Some(partial) = partial_file(settings) {
        let _ = std::fs::remove_file(partial);
    }
    Ok(name)
}

fn cache_failure(path: Option<PathBuf>, error: &io::Error) -> Failure {
    let location = path.map_or("the cache folder".into(), |path| path.display().to_string());
    output::write_failure(&location, error)
}

fn progress_bar(runs: usize, settings: &CalibrateSettings) -> ProgressBar {
    if settings.format == OutputFormat::Json || !settings.is_rank_0() {
        return ProgressBar::hidden();
    }
    let template = "{spinner} {wide_bar} run {pos} of {len}, {msg}, {eta} left";
    progress::styled(ProgressBar::new(runs as u64), template)
}
