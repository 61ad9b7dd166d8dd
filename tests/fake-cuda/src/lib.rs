//! Libraries that stand in for CUDA's, so that what is written for GPUs runs in tests, on processors.
//!
//! [`build`] compiles them and gives the folder to put on `LD_LIBRARY_PATH` of a process: a loader looks
//! where it was told to when a process began, so tests run what they test in a child. They are adversaries:
//! whatever CUDA leaves open they do in the least convenient order.
//!
//! | library | what it does |
//! |---|---|
//! | `libcuda` | devices, memory, streams, events, graphs; kernels by `cuda/shim/` of the runtime |
//! | `libnvrtc` | gives an image that names the program, if it is one of the runtime's |
//! | `libcublasLt` | products, on their stream, with a workspace that they do use |
//! | `libnccl` | collectives of processes and threads of one machine, by files |
//! | `libcublas` | nothing: it is there |
//!
//! | variable | meaning |
//! |---|---|
//! | `NARROWS_FAKE_CUDA_SEED` | draws what runs first; its remainder by 4 is a habit (`schedule.cpp`); 0 |
//! | `NARROWS_FAKE_CUDA_DEVICES` | devices; 1 |
//! | `NARROWS_FAKE_CUDA_MEMORY` | bytes of each; 4 GiB |
//! | `NARROWS_FAKE_CUDA_CAPABILITY` | compute capability; 9.0 |
//! | `NARROWS_FAKE_CUDA_DRIVER` | the driver's version, as `cuDriverGetVersion` says it; 12090 |
//! | `NARROWS_FAKE_CUDA_ONE_COLLECTIVE` | 1: a device runs one collective at once, of all communicators |
//! | `NARROWS_FAKE_CUDA_LOG` | a file that gets a line for everything that runs, and that the host does |
//!
//! A line of the log begins with `process=…`. `run device=0 stream=1 launch norm_bf16_v8` is an operation that is
//! done; in a graph `graph=3 node=5` stands before its name. `host synchronises`, `host launches graph=3` and
//! `host captures graph=3 nodes=9` are calls, `failed device=0 result=700` is an error that stays.

pub mod child;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::{env, fs, io, thread};

use narrows_cuda::KernelFamily;
use narrows_cuda::source::{HEADERS, KernelHeader, SHIM};
use sha2::{Digest, Sha256};

/// Something that is compiled: a library, or a family of kernels.
struct SourcePart {
    /// The file it becomes.
    name: String,
    /// Its texts by their names; headers are not compiled by themselves.
    files: Vec<(String, String)>,
    flags: Vec<String>,
    /// Also known by these names.
    links: &'static [&'static str],
    /// Whether it calls functions of the driver's stand-in.
    queues: bool,
}

const FLAGS: [&str; 6] = ["-std=c++17", "-fPIC", "-shared", "-Wall", "-Wextra", "-pthread"];
const DRIVER: &str = "libcuda.so.1";

/// The folder in which all test programs of one target folder share the compiled libraries.
///
/// # Panics
/// When this program is not in a target folder.
pub fn target_folder() -> PathBuf {
    let program = env::current_exe().expect("this program");
    // target/debug/deps/PROGRAM
    program.ancestors().nth(3).expect("a target folder").to_path_buf()
}

/// Compiles the libraries and keeps them in a folder, under the hash of their sources: what did not
/// change is not compiled again. Gives the folder that a loader finds them in.
///
/// # Errors
/// When there is no C++ compiler (`$CXX`, or `c++`), or this is not Linux: a reason to skip a test.
///
/// # Panics
/// When the sources do not compile without a warning, or the folder cannot be written.
pub fn build(folder: &Path) -> Result<PathBuf, String> {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !cfg!(target_os = "linux") {
        return Err("the stand-ins of CUDA's libraries are for Linux".into());
    }
    let compiler = env::var("CXX").unwrap_or_else(|_| "c++".into());
    match Command::new(&compiler).arg("--version").output() {
        Ok(answer) if answer.status.success() => {}
        _ => return Err(format!("`{compiler}` is no C++ compiler that runs (set CXX to one)")),
    }
    let store = folder.join("fake-cuda");
    fs::create_dir_all(&store).expect("a folder");
    let parts = parts();
    let all = digest(parts.iter().map(|part| part.digest(&compiler)));
    let libraries = store.join(format!("libraries-{all}"));
    if libraries.exists() {
        return Ok(libraries);
    }
    let (first, rest) = parts.split_first().expect("the driver");
    let driver = first.compiled(&compiler, &store, None);
    let left = Mutex::new(rest.iter());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, |count| count.get().min(4)) {
            scope.spawn(|| {
                while let Some(part) = next() {
                    part.compiled(&compiler, &store, Some(&driver));
                }
            });
        }
    });
    // Whole, or not there: another process may look for it.
    let made = store.join(format!("libraries-{all}-{}", std::process::id()));
    fs::create_dir_all(&made).expect("a folder");
    for part in &parts {
        let file = part.compiled(&compiler, &store, Some(&driver));
        for name in [part.name.as_str()].iter().chain(part.links) {
            link(&file, &made.join(name)).expect("a link");
        }
    }
    if fs::rename(&made, &libraries).is_err() {
        // Another process was faster.
        fs::remove_dir_all(&made).expect("an own folder");
    }
    Ok(libraries)
}

fn link(file: &Path, at: &Path) -> io::Result<()> {
    fs::hard_link(file, at).or_else(|_| fs::copy(file, at).map(drop))
}

fn digest(texts: impl Iterator<Item = impl AsRef<[u8]>>) -> String {
    let mut hash = Sha256::new();
    for text in texts {
        hash.update((text.as_ref().len() as u64).to_le_bytes());
        hash.update(text);
    }
    hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

impl SourcePart {
    fn digest(&self, compiler: &str) -> String {
        let files = self.files.iter().flat_map(|(name, text)| [name.as_str(), text.as_str()]);
        let flags = FLAGS.into_iter().chain(self.flags.iter().map(String::as_str));
        digest(files.chain(flags).chain([compiler, self.name.as_str()]))
    }

    /// The file it becomes, compiled unless it was before.
    fn compiled(&self, compiler: &str, store: &Path, driver: Option<&Path>) -> PathBuf {
        let library = store.join(format!("{}-{}", self.digest(compiler), self.name));
        if library.exists() {
            return library;
        }
        // In a folder of its own, so that two processes do not meet.
        let build = store.join(format!("{}-{}", self.name, std::process::id()));
        fs::create_dir_all(&build).expect("a folder");
        for (name, text) in &self.files {
            fs::write(build.join(name), text).expect("a source");
        }
        let mut command = Command::new(compiler);
        command.current_dir(&build).args(FLAGS).args(&self.flags).args(["-o", "made.so"]);
        let sources = self.files.iter().map(|(name, _)| name);
        command.args(["-x", "c++"]);
        command.args(sources.filter(|name| name.ends_with(".cpp") || name.ends_with(".cu")));
        command.args(["-x", "none", "-ldl"]);
        if let Some(driver) = driver.filter(|_| self.queues) {
            command.arg(fs::canonicalize(driver).expect("the driver's library"));
        }
        let output = command.output().expect("the compiler runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{compiler} {}: {said}", self.name);
        assert!(said.is_empty(), "{compiler} warns of {}: {said}", self.name);
        fs::rename(build.join("made.so"), &library).expect("a library");
        fs::remove_dir_all(&build).expect("an own folder");
        library
    }
}

/// The sources of a library, with the headers it includes.
macro_rules! files {
    ($($name:literal),*) => {
        vec![$(($name.to_owned(), include_str!(concat!("../libraries/", $name)).to_owned())),*]
    };
}

/// The driver first: others are linked with it.
fn parts() -> Vec<SourcePart> {
    let driver = files!(
        "work.h",
        "cuda.h",
        "state.h",
        "schedule.cpp",
        "device.cpp",
        "memory.cpp",
        "copy.cpp",
        "stream.cpp",
        "capture.cpp",
        "module.cpp"
    );
    let mut nvrtc = files!("work.h", "nvrtc.cpp");
    nvrtc.push(("programs.h".into(), programs()));
    let cublaslt =
        files!("work.h", "product.h", "product.cpp", "cublaslt.h", "cublaslt.cpp", "matmul.cpp");
    let nccl = files!(
        "work.h",
        "nccl.h",
        "wire.h",
        "wire.cpp",
        "reduce.cpp",
        "collective.cpp",
        "nccl.cpp"
    );
    let library = |name: &str, files, flags: &[&str], links, queues| {
        let linked = [&format!("-Wl,-soname,{name}"), "-Wl,-rpath,$ORIGIN", "-Wl,-z,nodelete"];
        let flags = linked.iter().chain(flags).map(|flag| flag.to_string()).collect();
        SourcePart { name: name.into(), files, flags, links, queues }
    };
    let mut parts = vec![
        library(DRIVER, driver, &["-O2"], &["libcuda.so"], false),
        library("libcublasLt.so.12", cublaslt, &["-O3"], &["libcublasLt.so"], true),
        library("libnccl.so.2", nccl, &["-O2"], &["libnccl.so"], true),
        library("libnvrtc.so.12", nvrtc, &["-O1"], &["libnvrtc.so"], false),
        library(
            "libcublas.so.12",
            files!("work.h", "cublas.cpp"),
            &["-O1"],
            &["libcublas.so"],
            false,
        ),
    ];
    parts.extend(KernelFamily::ALL.map(kernels));
    parts
}

fn kernels(family: KernelFamily) -> SourcePart {
    let headers = HEADERS.into_iter().chain(SHIM);
    let mut files: Vec<(String, String)> =
        headers.map(|KernelHeader { name, text }| (name.into(), text.into())).collect();
    files.push((format!("{}.cu", family.name()), family.text().into()));
    let flags = ["-O1", "-DNARROWS_SHIM", "-Wno-unknown-pragmas"].map(String::from).into();
    SourcePart {
        name: format!("kernels-{}.so", family.name()),
        files,
        flags,
        links: &[],
        queues: false,
    }
}

/// The programs that the stand-in of NVRTC knows, and the hashes of their texts.
fn programs() -> String {
    let rows = KernelFamily::ALL.map(|family| {
        let headers = HEADERS.into_iter().flat_map(|header| [header.name, header.text]);
        // FNV-1a; nvrtc.cpp has the same.
        let hash = [family.text()]
            .into_iter()
            .chain(headers)
            .flat_map(str::bytes)
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
            });
        format!("    {{\"{}\", {hash:#x}}},\n", family.name())
    });
    format!(
        "struct Known {{\n    const char* name;\n    unsigned long long hash;\n}};\n\
         constexpr Known PROGRAMS[] = {{\n{}}};\n",
        rows.concat()
    )
}
