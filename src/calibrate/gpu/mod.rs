//! Calibration of GPUs, one per process: their description, the process group, and the measured steps.

pub mod benchmarks;

use std::path::PathBuf;
use std::sync::Arc;

use narrows_calibration::fit::{GpuMachine, GpuModel, MeasuredStep};
use narrows_cluster::{RunFact, TcpProcessGroup};
use narrows_cost_model::{Executor, Prices, Profile, profile};
use narrows_plan::Mesh;
use narrows_planner::kernels;
use narrows_runtime::process_group::ProcessGroup;
use narrows_runtime::session::Session;
use narrows_runtime::sha256;

use super::PlannedBenchmark;
use super::benchmarks::BenchmarkExtent;
use super::cache::CachedProfileKey;
use crate::cluster::{self, LaunchedProcess};
use crate::errors::{CommandResult, Failure};
use crate::text::plural;
use crate::{gpu, output};

/// The profile for the search of benchmark plans: the nearest preset with the memory of this GPU.
///
/// # Errors
/// A missing preset.
pub fn base(gpu: &GpuModel) -> CommandResult<Profile> {
    let preset = profile::preset(gpu.nearest_preset().0)
        .map_err(|defects| Failure::flag("--hardware", defects))?;
    let mut file = preset.file().clone();
    file.device.memory_bytes = gpu.memory;
    Ok(file.resolve().unwrap_or(preset))
}

/// The description of these GPUs in a profile. `command` is the command of the measurement.
pub fn describe(gpu: GpuModel, devices: u64, command: &str) -> GpuMachine {
    let title = gpu::description().unwrap_or_else(|| gpu.name.clone());
    let name = gpu.name.trim_start_matches("NVIDIA ").to_ascii_lowercase();
    let legal = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let name = format!("{}-measured", name.chars().map(legal).collect::<String>());
    let gpus = plural(devices, "GPU");
    GpuMachine {
        name,
        description: format!(
            "{title}: {gpus}, measured by `narrows calibrate --backend cuda`; `device.provenance` has the source of the peaks."
        ),
        source: format!("{command}, on {gpus}: {title}"),
        title,
        gpu,
        date: super::machine::today(),
    }
}

/// Measured steps of the plans on one device. A kernel with a price above zero counts as a launch.
pub fn measured_steps(benchmarks: &[PlannedBenchmark], base: &Profile) -> Vec<MeasuredStep> {
    let mesh = Mesh { tensor: 1, pipeline: 1, data: 1, context: 1 };
    let prices = Prices::new(base, Executor::Captured, &mesh);
    let one_device = benchmarks.iter().filter(|planned| planned.benchmark.request.devices == 1);
    let step = |planned: &PlannedBenchmark| {
        let shortest = planned.shortest()?;
        let kernels = kernels(planned.program.program());
        let launched = kernels.iter().filter(|(kernel, _)| prices.kernel_time(kernel).0 > 0.0);
        Some(MeasuredStep {
            instructions_s: shortest.undisturbed_step_s(),
            launches: launched.map(|(_, count)| count).sum(),
            captured_s: shortest.whole_step_s,
            eager_s: shortest.shortest_step_s,
        })
    };
    one_device.filter_map(step).collect()
}

/// The processes of a calibration.
pub struct GpuProcesses {
    /// Rank and rendezvous of this process; `None` for a single process.
    process: Option<LaunchedProcess>,
    group: Option<Arc<TcpProcessGroup>>,
}

impl GpuProcesses {
    /// Joins the process group. All processes must have the same benchmarks and the same `command`.
    ///
    /// # Errors
    /// A process that does not join, or that was started for another calibration.
    pub fn join(
        process: Option<LaunchedProcess>,
        benchmarks: &[PlannedBenchmark],
        command: &str,
    ) -> CommandResult<GpuProcesses> {
        let Some(launched) = &process else { return Ok(GpuProcesses { process, group: None }) };
        let launch = &launched.launch;
        let others: Vec<u64> = (0..launch.world_size).filter(|rank| *rank != launch.rank).collect();
        let group = cluster::join(launched, facts(benchmarks, command), &others)?;
        Ok(GpuProcesses { group: Some(group), process })
    }

    /// Opens a session of a plan for all devices, or one session per process of a plan for one device.
    ///
    /// # Errors
    /// A program that cannot be executed on the GPU.
    pub fn open(&self, planned: &PlannedBenchmark) -> CommandResult<Session> {
        let request = &planned.benchmark.request;
        let group = self.group.clone().filter(|_| request.devices > 1);
        let session = narrows_cuda::session(
            &request.model,
            planned.program.clone(),
            &gpu::session_options(self.process.as_ref()),
            group.map(|group| group as Arc<dyn ProcessGroup>),
            &mut |warning| output::warn(warning),
        );
        session.map_err(|error| Failure::execution(&error))
    }

    /// Leaves the process group with the outcome of this process; a failure is sent to the others.
    ///
    /// # Errors
    /// The failure of this process or of another one.
    pub fn leave(&self, outcome: CommandResult<()>) -> CommandResult<()> {
        match (&self.group, &self.process) {
            (Some(group), Some(process)) => cluster::leave(group, outcome, &process.label()),
            _ => outcome,
        }
    }
}

/// The facts that must be equal in all processes.
fn facts(benchmarks: &[PlannedBenchmark], command: &str) -> Vec<RunFact> {
    let plans = benchmarks.iter().map(|planned| planned.program.program().to_string());
    let plans: String = plans.collect();
    let fact = |name: &str, value: String| RunFact { name: name.into(), value };
    vec![
        fact("version", env!("CARGO_PKG_VERSION").into()),
        fact("calibration", command.into()),
        fact("GPU, driver and libraries", gpu::description().unwrap_or_default()),
        fact("plans", hex::encode(sha256(plans.as_bytes()))),
    ]
}

/// Largest number of GPUs of a cached profile that is looked up.
const CACHED_DEVICES_MAX: u64 = 64;

/// The best cached profile of this machine's GPUs for a number of devices. Full calibrations precede quick ones; among
/// those, the same or the next larger number of devices, whose links are measured too, precedes fewer devices.
pub fn cached_profile(devices: u64) -> Option<PathBuf> {
    let title = gpu::description()?;
    let counts = (devices..=CACHED_DEVICES_MAX.max(devices)).chain((1..devices).rev());
    let keys: Vec<CachedProfileKey> =
        counts.map(|count| CachedProfileKey::gpus(&title, count)).collect();
    let paths = |extent| keys.iter().filter_map(move |key| key.path(extent));
    paths(BenchmarkExtent::Full).chain(paths(BenchmarkExtent::Quick)).find(|path| path.exists())
}
