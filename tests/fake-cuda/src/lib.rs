//! Fake CUDA libraries, with which code for GPUs runs on the CPU in tests.
//!
//! [`build`] compiles them and returns the folder for `LD_LIBRARY_PATH`. The loader reads that variable when a process
//! starts, so tests run their bodies in child processes ([`child`]). The libraries are adversarial: wherever CUDA leaves
//! an order open, they choose the least convenient one.
//!
//! | library | contents |
//! |---|---|
//! | `libcuda` | devices, memory, streams, events, graphs; kernels through the shim of `narrows-cuda` |
//! | `libnvrtc` | returns an image that names the kernel family, for the families of `narrows-cuda` |
//! | `libcublasLt` | matmuls on streams, which overwrite their workspace |
//! | `libnccl` | collectives among processes and threads of one machine, through files |
//! | `libcudnn` | graphs of operations, interpreted one by one |
//!
//! | variable | meaning and default |
//! |---|---|
//! | `NARROWS_FAKE_CUDA_SEED` | draws the order of execution; modulo 4 it is a policy (`scheduler.cpp`); 0 |
//! | `NARROWS_FAKE_CUDA_DEVICES` | number of devices; 1 |
//! | `NARROWS_FAKE_CUDA_MEMORY` | bytes of memory per device; 4 GiB |
//! | `NARROWS_FAKE_CUDA_CAPABILITY` | compute capability; 9.0 |
//! | `NARROWS_FAKE_CUDA_DRIVER` | version that `cuDriverGetVersion` returns; 12090 |
//! | `NARROWS_FAKE_CUDA_CUDNN` | version that `cudnnGetVersion` returns; 91002 |
//! | `NARROWS_FAKE_CUDA_ONE_COLLECTIVE` | 1: a device runs one collective at a time, over all communicators |
//! | `NARROWS_FAKE_CUDA_LOG` | file that receives a line for every operation and host call |
//!
//! A line of the log begins with `process=…`. `run device=0 stream=1 launch norm_bf16_v8` is an operation that has
//! completed; in a graph `graph=3 node=5` precedes its name. `host synchronises`, `host launches graph=3` and
//! `host captures graph=3 nodes=9` are host calls; `failed device=0 result=700` is a sticky error; `zeros in` precedes a
//! matmul whose first factor is zero.

mod build_unit;
pub mod child;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::{env, fs, io, thread};

use narrows_cuda::{KERNEL_HEADERS, KernelFamily, KernelHeader};
use narrows_runtime::fnv1a;

use build_unit::{BuildUnit, digest};

/// Additional headers for a C++ compiler with `NARROWS_SHIM` defined.
const SHIM_HEADERS: [KernelHeader; 3] = [
    KernelHeader { name: "shim.h", text: include_str!("shim/shim.h") },
    KernelHeader { name: "shim_mma.h", text: include_str!("shim/shim_mma.h") },
    KernelHeader { name: "fiber.h", text: include_str!("shim/fiber.h") },
];

const DRIVER: &str = "libcuda.so.1";

/// Compiles the fake libraries and returns the folder that contains them. They are cached in the target folder under a
/// hash of their sources, so that all test programs of a target folder share them.
///
/// # Errors
/// The reason to skip a test: there is no C++ compiler (`$CXX`, or `c++`), or the system is not Linux.
///
/// # Panics
/// When the sources do not compile without warnings, the folder cannot be written, or this program is not in a target
/// folder.
pub fn build() -> Result<PathBuf, String> {
    static BUILDING: Mutex<()> = Mutex::new(());
    let _guard = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    if !cfg!(target_os = "linux") {
        return Err("the fake CUDA libraries are for Linux".into());
    }
    let compiler = compiler()?;
    let store = store();
    let units = library_units();
    let all = digest(units.iter().map(|unit| unit.digest(&compiler)));
    let libraries = store.join(format!("libraries-{all}"));
    if libraries.exists() {
        return Ok(libraries);
    }
    let files = compile_all(&compiler, &store, &units);
    // Renamed when it is complete: another process may look for the folder.
    let temporary = store.join(format!("libraries-{all}-{}", std::process::id()));
    fs::create_dir_all(&temporary).expect("a folder");
    for (unit, file) in units.iter().zip(&files) {
        for name in [unit.name.as_str()].iter().chain(unit.aliases) {
            hard_link_or_copy(file, &temporary.join(name)).expect("a link");
        }
    }
    if fs::rename(&temporary, &libraries).is_err() {
        // Another process was faster.
        fs::remove_dir_all(&temporary).expect("a temporary folder");
    }
    Ok(libraries)
}

/// Compiles a CUDA source with the shim and returns the shared library of its kernels, whose entry points take the
/// shim's launches. The kernels of a [`KernelFamily`] share their library with [`build`].
///
/// # Errors
/// As [`build`].
///
/// # Panics
/// As [`build`].
pub fn compile_kernels(name: &str, source: &str) -> Result<PathBuf, String> {
    let compiler = compiler()?;
    Ok(kernel_unit(name, source).compile(&compiler, &store(), None))
}

/// Compiles the kernels of all families.
///
/// # Errors
/// As [`build`].
///
/// # Panics
/// As [`build`].
pub fn compile_all_kernels() -> Result<(), String> {
    let units = KernelFamily::ALL.map(|family| kernel_unit(family.name(), family.source()));
    compile_all(&compiler()?, &store(), &units);
    Ok(())
}

fn compiler() -> Result<String, String> {
    let compiler = env::var("CXX").unwrap_or_else(|_| "c++".into());
    match Command::new(&compiler).arg("--version").output() {
        Ok(answer) if answer.status.success() => Ok(compiler),
        _ => Err(format!("`{compiler}` is not a working C++ compiler (set CXX to one)")),
    }
}

/// The folder of compiled libraries in the target folder of this program.
fn store() -> PathBuf {
    let program = env::current_exe().expect("the path of this program");
    // target/debug/deps/PROGRAM
    let target = program.ancestors().nth(3).expect("a target folder");
    let store = target.join("fake-cuda");
    fs::create_dir_all(&store).expect("a folder");
    store
}

/// Compiles units in parallel, the slowest first, and returns their files in order.
fn compile_all(compiler: &str, store: &Path, units: &[BuildUnit]) -> Vec<PathBuf> {
    let driver = units.iter().find(|unit| unit.name == DRIVER);
    let driver = driver.map(|unit| unit.compile(compiler, store, None));
    let compile = |unit: &BuildUnit| unit.compile(compiler, store, driver.as_deref());
    let mut queue: Vec<&BuildUnit> = units.iter().collect();
    queue.sort_by_key(|unit| unit.bytes());
    let queue = Mutex::new(queue);
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop();
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, |count| count.get().min(4)) {
            scope.spawn(|| {
                while let Some(unit) = next() {
                    compile(unit);
                }
            });
        }
    });
    units.iter().map(compile).collect()
}

fn hard_link_or_copy(file: &Path, link: &Path) -> io::Result<()> {
    fs::hard_link(file, link).or_else(|_| fs::copy(file, link).map(drop))
}

/// The sources of a library, with the headers it includes.
macro_rules! files {
    ($($name:literal),*) => {
        vec![$(($name.to_owned(), include_str!(concat!("../libraries/", $name)).to_owned())),*]
    };
}

fn library_units() -> Vec<BuildUnit> {
    let driver = files!(
        "operation.h",
        "cuda.h",
        "state.h",
        "scheduler.cpp",
        "device.cpp",
        "memory.cpp",
        "copy.cpp",
        "stream.cpp",
        "capture.cpp",
        "module.cpp"
    );
    let mut nvrtc = files!("operation.h", "nvrtc.cpp");
    nvrtc.push(("programs.h".into(), known_programs()));
    let cublaslt =
        files!("operation.h", "gemm.h", "gemm.cpp", "cublaslt.h", "cublaslt.cpp", "matmul.cpp");
    let nccl = files!(
        "operation.h",
        "nccl.h",
        "message_files.h",
        "message_files.cpp",
        "reduce.cpp",
        "collective.cpp",
        "nccl.cpp"
    );
    let library = |name: &str, files, flags: &[&str], aliases, links_driver| {
        let linker = [&format!("-Wl,-soname,{name}"), "-Wl,-rpath,$ORIGIN", "-Wl,-z,nodelete"];
        let flags = linker.iter().chain(flags).map(|flag| flag.to_string()).collect();
        BuildUnit { name: name.into(), files, flags, aliases, links_driver }
    };
    let cudnn = files!("operation.h", "gemm.h", "cudnn.h", "cudnn.cpp", "cudnn_graph.cpp");
    let mut units = vec![
        library(DRIVER, driver, &["-O2"], &["libcuda.so"], false),
        library("libcublasLt.so.12", cublaslt, &["-O3"], &["libcublasLt.so"], true),
        library("libnccl.so.2", nccl, &["-O2"], &["libnccl.so"], true),
        library("libnvrtc.so.12", nvrtc, &["-O1"], &["libnvrtc.so"], false),
        library("libcudnn.so.9", cudnn, &["-O2"], &["libcudnn.so"], true),
    ];
    units.extend(KernelFamily::ALL.map(|family| kernel_unit(family.name(), family.source())));
    units
}

fn kernel_unit(name: &str, source: &str) -> BuildUnit {
    let mut files = vec![(format!("{name}.cu"), source.to_owned())];
    let mut index = 0;
    while let Some((_, text)) = files.get(index) {
        for header in included_headers(text) {
            if files.iter().all(|(name, _)| *name != header.name) {
                files.push((header.name.into(), header.text.into()));
            }
        }
        index += 1;
    }
    let flags = ["-O2", "-fvisibility=hidden", "-DNARROWS_SHIM", "-Wno-unknown-pragmas"];
    BuildUnit {
        name: format!("kernels-{name}.so"),
        files,
        flags: flags.map(String::from).into(),
        aliases: &[],
        links_driver: false,
    }
}

/// The kernel and shim headers that a source includes directly.
fn included_headers(source: &str) -> Vec<KernelHeader> {
    let lines =
        source.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
    let names: Vec<&str> = lines.collect();
    let headers = KERNEL_HEADERS.into_iter().chain(SHIM_HEADERS);
    headers.filter(|header| names.contains(&header.name)).collect()
}

/// The header `programs.h`: the programs that the fake NVRTC accepts, with hashes of their sources.
fn known_programs() -> String {
    let rows = KernelFamily::ALL.map(|family| {
        let headers = KERNEL_HEADERS.into_iter().flat_map(|header| [header.name, header.text]);
        let hash = fnv1a([family.source()].into_iter().chain(headers).flat_map(str::bytes));
        format!("    {{\"{}\", {hash:#x}}},\n", family.name())
    });
    format!(
        "struct Known {{\n    const char* name;\n    unsigned long long hash;\n}};\n\
         constexpr Known PROGRAMS[] = {{\n{}}};\n",
        rows.concat()
    )
}
