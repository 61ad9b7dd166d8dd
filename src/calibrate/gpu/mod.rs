//! GPUs that are measured, one a process: which they are, how all processes begin and end together, and what is
//! made of their steps.

pub mod works;

use std::path::PathBuf;
use std::sync::Arc;

use narrows_calibration::fit::{GpuMachine, GpuModel, MeasuredStep};
use narrows_cluster::{RunFact, TcpProcessGroup};
use narrows_cost_model::{Executor, Prices, Profile, profile};
use narrows_cuda::{CudaLibrary, gpus, library_loads, library_version};
use narrows_plan::Mesh;
use narrows_planner::kernels;
use narrows_runtime::process_group::ProcessGroup;
use narrows_runtime::session::Session;
use narrows_runtime::sha256;

use super::PlannedBenchmark;
use super::cache::CachedProfileKey;
use super::works::BenchmarkExtent;
use crate::args::gpu as args;
use crate::args::launch::LaunchedProcess;
use crate::errors::{CommandResult, Failure};
use crate::output;
use crate::processes;
use crate::report::page::plural;

/// This machine's first GPU, with its driver and libraries: what tells one measurement from another. `None` where
/// there is none.
pub fn title() -> Option<String> {
    let gpu = gpus().ok()?.into_iter().next()?;
    let version = |library: CudaLibrary, name: &str| {
        format!("{name} {}", library_version(library).unwrap_or_else(|| "unknown".into()))
    };
    let mut parts = vec![
        gpu.name,
        version(CudaLibrary::Driver, "driver"),
        version(CudaLibrary::CublasLt, "cuBLASLt"),
    ];
    if library_loads(CudaLibrary::Nccl) {
        parts.push(version(CudaLibrary::Nccl, "NCCL"));
    }
    Some(parts.join(", "))
}

/// This machine's first GPU, as a fit knows it.
pub fn first(launched: Option<&LaunchedProcess>) -> Option<GpuModel> {
    let gpus = gpus().ok()?;
    let seen = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
    let started = launched.map_or(1, |launched| launched.launch.local_world_size);
    let gpu = gpus.into_iter().next()?;
    Some(GpuModel {
        name: gpu.name,
        capability: gpu.capability,
        multiprocessors: gpu.multiprocessors,
        memory: gpu.memory,
        // Launchers may show each process its own alone.
        devices_per_node: seen.max(u32::try_from(started).unwrap_or(u32::MAX)),
    })
}

/// What plans are searched on before anything is measured: the preset, with this GPU's memory.
pub fn base(gpu: &GpuModel) -> CommandResult<Profile> {
    let preset = profile::preset(gpu.nearest_preset().0).map_err(Failure::flags)?;
    let mut file = preset.file().clone();
    file.device.memory_bytes = gpu.memory;
    Ok(file.resolve().unwrap_or(preset))
}

/// Everything a profile says of this machine.
pub fn describe(gpu: GpuModel, devices: u64, command: &str) -> GpuMachine {
    let title = title().unwrap_or_else(|| gpu.name.clone());
    let name = gpu.name.trim_start_matches("NVIDIA ").to_ascii_lowercase();
    let legal = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let name = format!("{}-measured", name.chars().map(legal).collect::<String>());
    let together = plural(devices, "GPU");
    GpuMachine {
        name,
        description: format!(
            "{title}: {together}, as `narrows calibrate --backend cuda` measured; `device.provenance` says where peaks are from."
        ),
        source: format!("{command}, on {together}: {title}"),
        title,
        gpu,
        date: super::machine::today(),
    }
}

/// Steps of the plans on one device, as they really run. What each launches is what has a price.
pub fn steps(subjects: &[PlannedBenchmark], base: &Profile) -> Vec<MeasuredStep> {
    let mesh = Mesh { tensor: 1, pipeline: 1, data: 1 };
    let prices = Prices::new(base, Executor::Captured, &mesh);
    let alone = subjects.iter().filter(|subject| subject.work.request.devices == 1);
    let step = |subject: &PlannedBenchmark| {
        let best = subject.best()?;
        let all = kernels(subject.program.program());
        let launched = all.iter().filter(|(kernel, _)| prices.kernel_time(kernel).0 > 0.0);
        Some(MeasuredStep {
            instructions_s: best.undisturbed_step_s(),
            launches: launched.map(|(_, times)| times).sum(),
            captured_s: best.whole_step_s,
            eager_s: best.shortest_step_s,
        })
    };
    alone.filter_map(step).collect()
}

/// The processes that measure together; this one alone, where there are no others.
pub struct GpuProcesses {
    launched: Option<LaunchedProcess>,
    cluster: Option<Arc<TcpProcessGroup>>,
}

impl GpuProcesses {
    /// Meets the others, who must mean the same.
    ///
    /// # Errors
    /// When one does not come, or means something else.
    pub fn join(
        launched: Option<LaunchedProcess>,
        subjects: &[PlannedBenchmark],
        asked: &str,
    ) -> CommandResult<GpuProcesses> {
        let Some(of_many) = &launched else { return Ok(GpuProcesses { launched, cluster: None }) };
        let launch = &of_many.launch;
        let others: Vec<u64> = (0..launch.world_size).filter(|rank| *rank != launch.rank).collect();
        let joined = processes::join(of_many, facts(subjects, asked), &others)?;
        Ok(GpuProcesses { cluster: Some(joined), launched })
    }

    /// A session of a plan for all devices, or for one: then each process has one of its own.
    ///
    /// # Errors
    /// When it cannot be executed.
    pub fn open(&self, subject: &PlannedBenchmark) -> CommandResult<Session> {
        let cluster = self.cluster.clone().filter(|_| subject.work.request.devices > 1);
        let options = args::options(self.launched.as_ref(), false);
        let (model, program) = (&subject.work.request.model, subject.program.clone());
        let opened = narrows_cuda::session(
            model,
            program,
            &options,
            cluster.map(|cluster| cluster as Arc<dyn ProcessGroup>),
            &mut |text| output::warn(text),
        );
        opened.map_err(|error| Failure::execution(&error))
    }

    /// Parts from the others, or tells them why nothing comes of it.
    ///
    /// # Errors
    /// That of this process, or that another failed.
    pub fn part(&self, done: CommandResult<()>) -> CommandResult<()> {
        match (&self.cluster, &self.launched) {
            (Some(cluster), Some(launched)) => processes::part(cluster, done, &launched.process()),
            _ => done,
        }
    }
}

/// What must be the same for all processes.
fn facts(subjects: &[PlannedBenchmark], asked: &str) -> Vec<RunFact> {
    let plans = subjects.iter().map(|subject| format!("{:?}", subject.program.program()));
    let plans: String = plans.collect();
    let fact = |what: &str, value: String| RunFact { name: what.into(), value };
    vec![
        fact("version", env!("CARGO_PKG_VERSION").into()),
        fact("calibration", asked.into()),
        fact("GPU, driver and libraries", title().unwrap_or_default()),
        fact("plans", hex::encode(sha256(plans.as_bytes()))),
    ]
}

/// The most GPUs that are measured together, as far as anybody looks for what was kept of them.
const TOGETHER_MAX: u64 = 64;

/// What is kept of this machine's GPUs, for so many of them: the profile of as many or of a few more, which has
/// their links, then that of fewer; and what was measured wholly before what was measured in seconds.
pub fn kept(devices: u64) -> Option<PathBuf> {
    let title = title()?;
    let counts = (devices..=TOGETHER_MAX.max(devices)).chain((1..devices).rev());
    let kept: Vec<CachedProfileKey> =
        counts.map(|count| CachedProfileKey::of_gpus(&title, count)).collect();
    let paths = |amount| kept.iter().filter_map(move |kept| kept.path(amount));
    paths(BenchmarkExtent::Whole).chain(paths(BenchmarkExtent::Quick)).find(|path| path.exists())
}
