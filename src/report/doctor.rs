//! The report of `doctor`: available backends, libraries and devices.

use std::env;
use std::path::PathBuf;

use narrows_cluster::LaunchInfo;
use narrows_cuda::{COMPUTE_CAPABILITY_MIN, CudaLibrary, GpuInfo};
use narrows_plan::Bytes;
use serde::Serialize;

use super::Report;
use super::page::{Align, Page};
use crate::args::Detail;
use crate::calibrate::cache::CachedProfileKey;
use crate::calibrate::gpu::cached_profile;
use crate::calibrate::machine;
use crate::host::{available_memory, cores, total_memory};
use crate::text::plural;
use crate::{cuda_loader, gpu};

/// Output of `doctor`.
#[derive(Debug, Serialize)]
pub struct DoctorReport {
    version: &'static str,
    machine: MachineReport,
    backends: BackendReports,
    driver_version: Option<String>,
    libraries: Vec<LibraryReport>,
    devices: Vec<GpuReport>,
    /// The GPUs as calibration identifies them; `null` without any.
    gpus: Option<ProfileReport>,
    /// Rank and rendezvous of this process; `null` without a launcher.
    launch: Option<ProcessReport>,
}

#[derive(Debug, Serialize)]
struct MachineReport {
    title: String,
    cores: u64,
    memory_bytes: Option<u64>,
    free_memory_bytes: Option<u64>,
    /// The cached profile that `run` predicts with; `null` before this machine is measured.
    profile: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct BackendReports {
    cpu: Availability,
    cuda: Availability,
}

/// Whether a backend can run here.
#[derive(Debug, Serialize)]
struct Availability {
    usable: bool,
    #[serde(rename = "because")]
    reasons: Vec<String>,
    hints: Vec<String>,
}

#[derive(Debug, Serialize)]
struct LibraryReport {
    name: String,
    purpose: &'static str,
    loads: bool,
    version: Option<String>,
    path: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct GpuReport {
    ordinal: u32,
    name: String,
    compute_capability: String,
    multiprocessors: u32,
    memory_bytes: u64,
    free_memory_bytes: Option<u64>,
    /// Memory that matmuls take besides the arena of a program, as part of the profile's reserve.
    matmul_workspace_bytes: u64,
}

/// The GPUs and their profile.
#[derive(Debug, Serialize)]
struct ProfileReport {
    /// Name, driver and libraries.
    title: String,
    /// The cached profile that `run --backend cuda` predicts with; `null` before they are measured.
    profile: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct ProcessReport {
    launcher: &'static str,
    rank: u64,
    processes: u64,
    #[serde(rename = "meeting")]
    rendezvous: String,
}

impl DoctorReport {
    /// Inspects this machine.
    pub fn inspect() -> DoctorReport {
        let files = cuda_loader::find_libraries();
        let library = |library: CudaLibrary| LibraryReport {
            name: format!("lib{}", library.file_stem()),
            purpose: library.purpose(),
            loads: narrows_cuda::library_loads(library),
            version: narrows_cuda::library_version(library),
            // The target of a link, since this program creates links itself.
            path: files.get(&library).map(|file| {
                std::fs::canonicalize(&file.path).unwrap_or_else(|_| file.path.clone())
            }),
        };
        let libraries: Vec<LibraryReport> = CudaLibrary::ALL.into_iter().map(library).collect();
        let gpus = narrows_cuda::gpus();
        let cuda = cuda_availability(&libraries, &gpus);
        let threads = cores();
        let launch = LaunchInfo::from_environment(|name| env::var(name).ok()).ok().flatten();
        DoctorReport {
            version: env!("CARGO_PKG_VERSION"),
            machine: MachineReport {
                title: machine::title(threads),
                cores: threads,
                memory_bytes: total_memory().map(|bytes| bytes.0),
                free_memory_bytes: available_memory().map(|bytes| bytes.0),
                profile: CachedProfileKey::cpu(threads).existing_path(),
            },
            backends: BackendReports {
                cpu: Availability { usable: true, reasons: vec![], hints: vec![] },
                cuda,
            },
            driver_version: libraries.first().and_then(|driver| driver.version.clone()),
            libraries,
            devices: gpus.unwrap_or_default().into_iter().map(GpuReport::of).collect(),
            gpus: gpu::description()
                .map(|title| ProfileReport { title, profile: cached_profile(1) }),
            launch: launch.map(|launch| ProcessReport {
                launcher: launch.launcher.name(),
                rank: launch.rank,
                processes: launch.world_size,
                rendezvous: launch.rendezvous.to_string(),
            }),
        }
    }
}

impl Report for DoctorReport {
    fn page(&self, detail: Detail) -> Page {
        let mut page = Page::default();
        let without_gpus = self.devices.is_empty() && self.launch.is_none();
        if without_gpus && !self.backends.cuda.usable && detail == Detail::Summary {
            page.fields(&self.summary());
            return page;
        }
        page.heading("Backends");
        for (name, backend) in [("cpu", &self.backends.cpu), ("cuda", &self.backends.cuda)] {
            let verdict = if backend.usable { "available" } else { "not available" };
            page.line(format!("{name:5} {verdict}"));
            backend.reasons.iter().for_each(|cause| page.line(format!("      because {cause}")));
            backend.hints.iter().for_each(|hint| page.line(format!("      hint: {hint}")));
        }
        self.machine(&mut page);
        self.libraries(&mut page);
        self.gpus(&mut page);
        page
    }
}

impl DoctorReport {
    /// The backends of a machine without GPUs, a line each.
    fn summary(&self) -> [(&'static str, String); 2] {
        let MachineReport { cores, free_memory_bytes, .. } = &self.machine;
        let threads = plural(*cores, "thread");
        let missing = self.libraries.iter().filter(|library| !library.loads).count();
        let missing = match missing {
            0 => String::new(),
            many => format!(", and {many} of {} libraries missing", self.libraries.len()),
        };
        [
            ("cpu", format!("available: {threads}, {} of memory free", size(*free_memory_bytes))),
            ("cuda", format!("not available: no GPU{missing}; --details says more")),
        ]
    }

    fn machine(&self, page: &mut Page) {
        let DoctorReport { version, machine, launch, .. } = self;
        page.heading("Machine");
        let profile = machine.profile.as_ref().map(|path| path.display().to_string());
        let unmeasured = "not measured yet: `narrows calibrate`, or the first `narrows run`";
        let mut fields = vec![
            ("narrows", (*version).to_owned()),
            ("processor", machine.title.clone()),
            ("memory", size(machine.memory_bytes)),
            ("free", size(machine.free_memory_bytes)),
            ("profile", profile.unwrap_or_else(|| unmeasured.into())),
        ];
        if let Some(ProcessReport { launcher, rank, processes, rendezvous }) = launch {
            let process =
                format!("{rank} of {processes}, started by {launcher}, rendezvous at {rendezvous}");
            fields.push(("process", process));
        }
        page.fields(&fields);
    }

    fn libraries(&self, page: &mut Page) {
        page.heading("CUDA libraries");
        let columns = [
            ("library", Align::Left),
            ("purpose", Align::Left),
            ("loads", Align::Left),
            ("version", Align::Left),
        ];
        let row = |library: &LibraryReport| {
            vec![
                library.name.clone(),
                library.purpose.into(),
                if library.loads { "yes" } else { "no" }.into(),
                library.version.clone().unwrap_or_default(),
            ]
        };
        page.table(&columns, &self.libraries.iter().map(row).collect::<Vec<_>>());
        // Paths have lines of their own, since they may be long.
        for LibraryReport { name, path, .. } in &self.libraries {
            if let Some(path) = path {
                page.line(format!("{name}: {}", path.display()));
            }
        }
    }

    fn gpus(&self, page: &mut Page) {
        if self.devices.is_empty() {
            return;
        }
        page.heading("GPUs");
        let columns = [
            ("", Align::Right),
            ("name", Align::Left),
            ("capability", Align::Left),
            ("SMs", Align::Right),
            ("memory", Align::Right),
            ("free", Align::Right),
            ("workspace", Align::Right),
        ];
        let row = |device: &GpuReport| {
            vec![
                device.ordinal.to_string(),
                device.name.clone(),
                device.compute_capability.clone(),
                device.multiprocessors.to_string(),
                Bytes(device.memory_bytes).to_string(),
                size(device.free_memory_bytes),
                Bytes(device.matmul_workspace_bytes).to_string(),
            ]
        };
        page.table(&columns, &self.devices.iter().map(row).collect::<Vec<_>>());
        if let Some(ProfileReport { title, profile }) = &self.gpus {
            let profile = profile.as_ref().map(|path| path.display().to_string());
            let unmeasured = "not measured yet: `narrows calibrate --backend cuda`";
            let profile = profile.unwrap_or_else(|| unmeasured.into());
            page.fields(&[("measured as", title.clone()), ("profile", profile)]);
        }
    }
}

fn size(bytes: Option<u64>) -> String {
    bytes.map_or("unknown".into(), |bytes| Bytes(bytes).to_string())
}

impl GpuReport {
    fn of(gpu: GpuInfo) -> GpuReport {
        GpuReport {
            ordinal: gpu.ordinal,
            name: gpu.name,
            compute_capability: format!("{}.{}", gpu.capability.0, gpu.capability.1),
            multiprocessors: gpu.multiprocessors,
            memory_bytes: gpu.memory.0,
            free_memory_bytes: narrows_cuda::free_gpu_memory(gpu.ordinal).map(|free| free.0),
            matmul_workspace_bytes: narrows_cuda::recommended_workspace(gpu.capability).0,
        }
    }
}

/// Whether the CUDA backend can run. NCCL is needed for several GPUs only, and without cuDNN
/// attention runs on own kernels.
fn cuda_availability(
    libraries: &[LibraryReport],
    gpus: &Result<Vec<GpuInfo>, String>,
) -> Availability {
    let (mut reasons, mut hints) = (vec![], vec![]);
    let mut usable = true;
    let missing = CudaLibrary::ALL.iter().zip(libraries).filter(|(_, report)| !report.loads);
    for (library, report) in missing {
        let state = if report.path.is_some() { "does not load" } else { "not found" };
        reasons.push(format!("{} ({}) {state}", report.name, report.purpose));
        hints.push(library.install_hint().to_owned());
        usable &= matches!(library, CudaLibrary::Nccl | CudaLibrary::Cudnn);
    }
    if let Some(outdated) = narrows_cuda::outdated_driver() {
        reasons.push(outdated);
        hints.push(CudaLibrary::Driver.install_hint().to_owned());
        usable = false;
    }
    hints.dedup();
    let problem = match gpus {
        Err(error) => Some(format!("the driver does not initialise: {error}")),
        Ok(gpus) if gpus.is_empty() => Some("there is no GPU".into()),
        Ok(gpus) if gpus.iter().all(|gpu| gpu.capability < COMPUTE_CAPABILITY_MIN) => {
            let (major, minor) = COMPUTE_CAPABILITY_MIN;
            Some(format!("no GPU has compute capability {major}.{minor} or more"))
        }
        Ok(_) => None,
    };
    usable &= problem.is_none();
    reasons.extend(problem);
    Availability { usable, reasons, hints }
}
