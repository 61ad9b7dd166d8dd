//! What this machine can run.

use std::env;
use std::path::PathBuf;

use narrows_cluster::LaunchInfo;
use narrows_cuda::{COMPUTE_CAPABILITY_MIN, CudaLibrary, GpuInfo};
use narrows_plan::Bytes;
use serde::Serialize;

use crate::args::run::cores;
use crate::calibrate::cache::CachedProfileKey;
use crate::calibrate::{gpu, machine};
use crate::loader;
use crate::memory;
use crate::report::page::{Align, TextPage};

/// The finding; its JSON form is the answer of `doctor --format json`.
#[derive(Debug, Serialize)]
pub struct DoctorReport {
    version: &'static str,
    machine: MachineReport,
    backends: BackendReports,
    driver_version: Option<String>,
    libraries: Vec<LibraryReport>,
    devices: Vec<DeviceReport>,
    /// What is kept of the GPUs; `null` where there are none.
    gpus: Option<ProfileReport>,
    /// Which process of how many this is; `null` when nobody started several.
    launch: Option<ProcessReport>,
}

#[derive(Debug, Serialize)]
struct MachineReport {
    title: String,
    cores: u64,
    memory_bytes: Option<u64>,
    free_memory_bytes: Option<u64>,
    /// The profile that `run` predicts with, once this machine was measured.
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
    because: Vec<String>,
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
struct DeviceReport {
    ordinal: u32,
    name: String,
    compute_capability: String,
    multiprocessors: u32,
    memory_bytes: u64,
    free_memory_bytes: Option<u64>,
}

/// The profile of the GPUs.
#[derive(Debug, Serialize)]
struct ProfileReport {
    /// Which they are, with their driver and libraries.
    title: String,
    /// The profile that `run --backend cuda` predicts with, once they were measured.
    profile: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct ProcessReport {
    launcher: &'static str,
    rank: u64,
    processes: u64,
    meeting: String,
}

impl DoctorReport {
    /// Looks at this machine.
    pub fn look() -> DoctorReport {
        let found = loader::found();
        let library = |library: CudaLibrary| LibraryReport {
            name: format!("lib{}", library.file_stem()),
            purpose: library.purpose(),
            loads: narrows_cuda::library_loads(library),
            version: narrows_cuda::library_version(library),
            // Where links lead: those that this program makes say little.
            path: found.get(&library).map(|file| {
                std::fs::canonicalize(&file.path).unwrap_or_else(|_| file.path.clone())
            }),
        };
        let libraries: Vec<LibraryReport> = CudaLibrary::ALL.into_iter().map(library).collect();
        let gpus = narrows_cuda::gpus();
        let usable = cuda_usable(&libraries, &gpus);
        let threads = cores();
        let launch = LaunchInfo::from_environment(|name| env::var(name).ok()).ok().flatten();
        DoctorReport {
            version: env!("CARGO_PKG_VERSION"),
            machine: MachineReport {
                title: machine::title(threads),
                cores: threads,
                memory_bytes: memory::total().map(|bytes| bytes.0),
                free_memory_bytes: memory::available().map(|bytes| bytes.0),
                profile: CachedProfileKey::of_processors(threads).found(),
            },
            backends: BackendReports {
                cpu: Availability { usable: true, because: vec![], hints: vec![] },
                cuda: usable,
            },
            driver_version: libraries.first().and_then(|driver| driver.version.clone()),
            libraries,
            devices: gpus.unwrap_or_default().into_iter().map(DeviceReport::of).collect(),
            gpus: gpu::title().map(|title| ProfileReport { title, profile: gpu::kept(1) }),
            launch: launch.map(|launch| ProcessReport {
                launcher: launch.launcher.name(),
                rank: launch.rank,
                processes: launch.world_size,
                meeting: launch.rendezvous.to_string(),
            }),
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        let DoctorReport { machine, backends, .. } = self;
        let mut page = TextPage::default();
        page.heading(format!("narrows {} on this machine", self.version));
        let size = |bytes: Option<u64>| bytes.map_or("unknown".into(), |b| Bytes(b).to_string());
        let mut fields = vec![
            ("processor", machine.title.clone()),
            ("memory", size(machine.memory_bytes)),
            ("free", size(machine.free_memory_bytes)),
        ];
        let profile = machine.profile.as_ref().map(|path| path.display().to_string());
        let unmeasured = "not measured yet: `narrows calibrate`, or the first `narrows run`";
        fields.push(("profile", profile.unwrap_or_else(|| unmeasured.into())));
        if let Some(ProcessReport { launcher, rank, processes, meeting }) = &self.launch {
            let process =
                format!("{rank} of {processes}, started by {launcher}, meeting at {meeting}");
            fields.push(("process", process));
        }
        page.fields(&fields);
        page.heading("Backends");
        for (name, backend) in [("cpu", &backends.cpu), ("cuda", &backends.cuda)] {
            page.line(format!(
                "{name:5} {}",
                if backend.usable { "can run" } else { "cannot run" }
            ));
            backend.because.iter().for_each(|why| page.line(format!("      because {why}")));
            backend.hints.iter().for_each(|hint| page.line(format!("      hint: {hint}")));
        }
        page.heading("Libraries of CUDA");
        let columns = [
            ("library", Align::Left),
            ("for", Align::Left),
            ("loads", Align::Left),
            ("version", Align::Left),
            ("found", Align::Left),
        ];
        let row = |library: &LibraryReport| {
            let path = library.path.as_ref().map(|path| path.display().to_string());
            vec![
                library.name.clone(),
                library.purpose.into(),
                if library.loads { "yes" } else { "no" }.into(),
                library.version.clone().unwrap_or_default(),
                path.unwrap_or_else(|| {
                    if library.loads { "by the loader" } else { "nowhere" }.into()
                }),
            ]
        };
        page.table(&columns, &self.libraries.iter().map(row).collect::<Vec<_>>());
        if !self.devices.is_empty() {
            page.heading("GPUs");
            let columns = [
                ("", Align::Right),
                ("name", Align::Left),
                ("capability", Align::Left),
                ("multiprocessors", Align::Right),
                ("memory", Align::Right),
                ("free", Align::Right),
            ];
            let row = |device: &DeviceReport| {
                vec![
                    device.ordinal.to_string(),
                    device.name.clone(),
                    device.compute_capability.clone(),
                    device.multiprocessors.to_string(),
                    Bytes(device.memory_bytes).to_string(),
                    size(device.free_memory_bytes),
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
        page.finish()
    }
}

impl DeviceReport {
    fn of(gpu: GpuInfo) -> DeviceReport {
        DeviceReport {
            ordinal: gpu.ordinal,
            name: gpu.name,
            compute_capability: format!("{}.{}", gpu.capability.0, gpu.capability.1),
            multiprocessors: gpu.multiprocessors,
            memory_bytes: gpu.memory.0,
            free_memory_bytes: narrows_cuda::free_gpu_memory(gpu.ordinal).map(|free| free.0),
        }
    }
}

fn cuda_usable(libraries: &[LibraryReport], gpus: &Result<Vec<GpuInfo>, String>) -> Availability {
    let (mut because, mut hints) = (vec![], vec![]);
    for (library, found) in CudaLibrary::ALL.iter().zip(libraries).filter(|(_, found)| !found.loads)
    {
        let is = if found.path.is_some() { "does not load" } else { "is not there" };
        because.push(format!("{} ({}) {is}", found.name, found.purpose));
        hints.push(library.install_hint().to_owned());
    }
    if let Some(outdated) = narrows_cuda::outdated_driver() {
        because.push(outdated);
        hints.push(CudaLibrary::Driver.install_hint().to_owned());
    }
    hints.dedup();
    match gpus {
        Err(why) => because.push(format!("the driver does not come up: {why}")),
        Ok(gpus) if gpus.is_empty() => because.push("there is no GPU".into()),
        Ok(gpus) if gpus.iter().all(|gpu| gpu.capability < COMPUTE_CAPABILITY_MIN) => {
            let (major, minor) = COMPUTE_CAPABILITY_MIN;
            because.push(format!("no GPU has compute capability {major}.{minor} or more"));
        }
        Ok(_) => {}
    }
    // NCCL is for several GPUs, and products are cuBLASLt's alone.
    let done_without =
        |because: &String| ["libnccl ", "libcublas "].iter().any(|name| because.starts_with(name));
    let usable = because.iter().all(done_without);
    Availability { usable, because, hints }
}
