//! GPUs that are measured, one a process: which they are, how all processes begin and end together, and what is
//! made of their steps.

pub mod works;

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
use super::cache::CachedProfileKey;
use super::works::BenchmarkExtent;
use crate::cluster::{self, LaunchedProcess};
use crate::errors::{CommandResult, Failure};
use crate::gpu;
use crate::output;
use crate::text::plural;

/// What plans are searched on before anything is measured: the preset, with this GPU's memory.
pub fn base(gpu: &GpuModel) -> CommandResult<Profile> {
    let preset = profile::preset(gpu.nearest_preset().0).map_err(Failure::flags)?;
    let mut file = preset.file().clone();
    file.device.memory_bytes = gpu.memory;
    Ok(file.resolve().unwrap_or(preset))
}

/// Everything a profile says of this machine.
pub fn describe(gpu: GpuModel, devices: u64, command: &str) -> GpuMachine {
    let title = gpu::description().unwrap_or_else(|| gpu.name.clone());
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
        let joined = cluster::join(of_many, facts(subjects, asked), &others)?;
        Ok(GpuProcesses { cluster: Some(joined), launched })
    }

    /// A session of a plan for all devices, or for one: then each process has one of its own.
    ///
    /// # Errors
    /// When it cannot be executed.
    pub fn open(&self, subject: &PlannedBenchmark) -> CommandResult<Session> {
        let cluster = self.cluster.clone().filter(|_| subject.work.request.devices > 1);
        let options = gpu::session_options(self.launched.as_ref(), false);
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
    pub fn leave(&self, done: CommandResult<()>) -> CommandResult<()> {
        match (&self.cluster, &self.launched) {
            (Some(group), Some(launched)) => cluster::leave(group, done, &launched.label()),
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
        fact("GPU, driver and libraries", gpu::description().unwrap_or_default()),
        fact("plans", hex::encode(sha256(plans.as_bytes()))),
    ]
}

/// The most GPUs that are measured together, as far as anybody looks for what was kept of them.
const TOGETHER_MAX: u64 = 64;

/// What is kept of this machine's GPUs, for so many of them: the profile of as many or of a few more, which has
/// their links, then that of fewer; and what was measured wholly before what was measured in seconds.
pub fn cached_profile(devices: u64) -> Option<PathBuf> {
    let title = gpu::description()?;
    let counts = (devices..=TOGETHER_MAX.max(devices)).chain((1..devices).rev());
    let kept: Vec<CachedProfileKey> =
        counts.map(|count| CachedProfileKey::of_gpus(&title, count)).collect();
    let paths = |amount| kept.iter().filter_map(move |kept| kept.path(amount));
    paths(BenchmarkExtent::Whole).chain(paths(BenchmarkExtent::Quick)).find(|path| path.exists())
}
