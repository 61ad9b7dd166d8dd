//! Every kernel compiles for the A100 and the H100 within its register limit and without spilling.
//!
//! Needs libnvrtc of a toolkit or of the Python wheel `nvidia-cuda-nvrtc-cu12`, but no driver and no headers. It is
//! searched for at `NARROWS_NVRTC` (the library, or a folder above it), then in `LD_LIBRARY_PATH`, `CUDA_HOME`,
//! `VIRTUAL_ENV` and /usr/local/cuda. Each family is compiled in a child process, so that a crash of the compiler fails
//! this test only.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, ptr};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use narrows_cuda::{KERNEL_HEADERS, KernelFamily, NVRTC_OPTIONS};

use super::probes;

/// With 256 threads per block, four blocks per multiprocessor leave 64 registers per thread.
const REGISTERS_MAX: u32 = 64;
/// Limits of the kernels with 128 threads per block and tiles in registers: two to four blocks per multiprocessor.
const TILE_REGISTERS_MAX: [(&str, u32); 7] = [
    ("bf16_w128", 255),
    ("bf16_w64", 168),
    ("bf16_w256_v1", 255),
    ("bf16_w32_v1", 128),
    ("f32_w128", 128),
    ("f32_w256_v1", 255),
    ("f32_w32_v1", 128),
];
const CHILD: &str = "NARROWS_NVRTC_CHILD";
/// The line between the assembler's report and the PTX of a family.
const PTX: &str = "\nPTX:\n";

/// Resources of a kernel, as the assembler reports them.
#[derive(Debug)]
struct Usage {
    kernel: String,
    registers: u32,
    spilled_bytes: u32,
    stack_bytes: u32,
}

#[test]
fn kernels_compile_and_fit() {
    check_kernels("sm_80");
}

#[test]
#[ignore = "second level: another architecture"]
fn kernels_compile_and_fit_on_hopper() {
    check_kernels("sm_90");
}

/// Compiles all kernels in child processes. In one of these, compiles a family and prints the report.
fn check_kernels(architecture: &str) {
    let Some(library) = find("NARROWS_NVRTC", "libnvrtc.so") else {
        println!(
            "skipped: no libnvrtc; `pip install nvidia-cuda-nvrtc-cu12` into a virtual environment \
             and set NARROWS_NVRTC to its folder"
        );
        return;
    };
    if let Ok(work) = env::var(CHILD) {
        let (name, architecture) = work.split_once(' ').expect("a family and an architecture");
        println!("{}", compile(&library, source(name), architecture));
        return;
    }
    let has_vectors = |kernel: &str| {
        let optimizer = ["adamw_bf16", "adamw_f32", "square_sum"];
        kernel.ends_with("_v8") || kernel.ends_with("_v4") || optimizer.contains(&kernel)
    };
    for name in KernelFamily::ALL.map(KernelFamily::name).into_iter().chain(["probes"]) {
        let output = compile_in_child(&library, name, architecture);
        let (log, ptx) = output.split_once(PTX).expect("a report and PTX");
        let usages = usages(log);
        let declared = source(name).matches("KERNEL(").count();
        assert!(usages.len() >= declared, "{name}: {declared} kernels, compiled {usages:?}");
        for usage in usages {
            println!(
                "| `{}` | {architecture} | {} | {} |",
                usage.kernel, usage.registers, usage.spilled_bytes
            );
            let fits = usage.registers <= registers_max(&usage.kernel)
                && usage.spilled_bytes == 0
                && usage.stack_bytes == 0;
            assert!(fits, "{architecture}: {usage:?}");
        }
        let kernels: Vec<&str> = ptx.split(".entry ").skip(1).collect();
        assert!(kernels.len() >= declared, "{name}: {} kernels in PTX", kernels.len());
        // Kernels named for vectors, and those of the optimizer, access 16 bytes at a time.
        for kernel in kernels {
            let entry = kernel.split('(').next().unwrap_or_default();
            let missing: Vec<_> = required_instructions(entry)
                .iter()
                .filter(|name| !kernel.contains(**name))
                .collect();
            assert!(missing.is_empty(), "{entry} has no {missing:?}");
            let wide = kernel.contains("ld.global.v4") || kernel.contains("st.global.v4");
            assert!(wide || !has_vectors(entry), "{entry} has no 16-byte memory access: {kernel}");
        }
    }
}

fn registers_max(kernel: &str) -> u32 {
    let mut tiles = TILE_REGISTERS_MAX.into_iter();
    let summing = kernel.starts_with("attention_sums");
    let tile = tiles.find(|(ending, _)| kernel.ends_with(ending) && !summing);
    tile.map_or(REGISTERS_MAX, |(_, limit)| limit)
}

/// PTX instructions that a kernel must contain: those of tensor cores and asynchronous copies.
fn required_instructions(kernel: &str) -> &'static [&'static str] {
    let tiles = kernel.contains("_bf16_w") && !kernel.ends_with("_v1");
    let tiles = tiles && !kernel.starts_with("attention_sums");
    if !tiles {
        return &[];
    }
    &[
        "ldmatrix.sync.aligned.m8n8.x4.shared",
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared",
        "mma.sync.aligned.m16n8k16",
        "cp.async.cg.shared.global",
    ]
}

fn source(name: &str) -> &'static str {
    let family = KernelFamily::ALL.into_iter().find(|family| family.name() == name);
    family.map_or(probes::SOURCE, KernelFamily::source)
}

fn compile_in_child(library: &Path, name: &str, architecture: &str) -> String {
    let test = concat!(module_path!(), "::kernels_compile_and_fit");
    let test = test.split_once("::").map_or(test, |(_, path)| path);
    let output = Command::new(env::current_exe().expect("this program"))
        .args([test, "--exact", "--nocapture"])
        .env(CHILD, format!("{name} {architecture}"))
        .env("NARROWS_NVRTC", library)
        .output()
        .expect("this program runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} for {architecture}: {text}{errors}");
    text
}

/// Parses the assembler's report: a line that names a kernel, then lines with its resources.
fn usages(log: &str) -> Vec<Usage> {
    let mut usages = vec![];
    let before = |line: &str, unit: &str| -> Option<u32> {
        line.split(unit).next()?.split_whitespace().last()?.parse().ok()
    };
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let kernel = rest.split('\'').next().unwrap_or_default().to_string();
            let unknown = u32::MAX;
            let (registers, spilled_bytes, stack_bytes) = (unknown, unknown, unknown);
            usages.push(Usage { kernel, registers, spilled_bytes, stack_bytes });
        }
        let Some(usage) = usages.last_mut() else { continue };
        if line.contains("bytes stack frame") {
            let of = |unit| before(line, unit).unwrap_or(u32::MAX);
            usage.stack_bytes = of(" bytes stack frame");
            usage.spilled_bytes =
                of(" bytes spill stores").saturating_add(of(" bytes spill loads"));
        }
        if line.contains("Used ") {
            usage.registers = before(line, " registers").unwrap_or(u32::MAX);
        }
    }
    usages
}

/// Path of the library whose file name begins with `prefix`, if it is installed. `variable` names folders that are
/// searched first, or the file.
pub fn find(variable: &str, prefix: &str) -> Option<PathBuf> {
    let list = |name: &str| env::var_os(name).unwrap_or_default();
    let mut places: Vec<PathBuf> = env::split_paths(&list(variable)).collect();
    places.extend(env::split_paths(&list("LD_LIBRARY_PATH")));
    places.extend(["CUDA_HOME", "VIRTUAL_ENV"].map(|name| PathBuf::from(list(name))));
    places.push("/usr/local/cuda".into());
    let mut places = places.iter().filter(|place| !place.as_os_str().is_empty());
    places.find_map(|place| within(place, prefix, 7))
}

/// A file with this beginning at most `depth` folders below a place.
fn within(place: &Path, prefix: &str, depth: u32) -> Option<PathBuf> {
    if place.is_file() {
        let name = place.file_name()?.to_string_lossy().into_owned();
        return name.starts_with(prefix).then(|| place.to_path_buf());
    }
    let mut entries: Vec<PathBuf> =
        fs::read_dir(place).ok()?.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    let files = entries.iter().filter(|path| path.is_file());
    let here = files.into_iter().find_map(|path| within(path, prefix, 0));
    let folders = entries.iter().filter(|path| path.is_dir() && !path.is_symlink());
    here.or_else(|| {
        folders.into_iter().find_map(|path| within(path, prefix, depth.checked_sub(1)?))
    })
}

type NvrtcProgram = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut NvrtcProgram,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(NvrtcProgram, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(NvrtcProgram, *mut usize) -> c_int;
type Get = unsafe extern "C" fn(NvrtcProgram, *mut c_char) -> c_int;

/// Compiles to machine code and returns the assembler's report, the line [`PTX`], and the PTX.
fn compile(library: &Path, text: &str, architecture: &str) -> String {
    let string = |text: &str| CString::new(text).expect("no zero bytes");
    let folder = library.parent().expect("a folder");
    let builtins = fs::read_dir(folder).expect("a folder").flatten().map(|entry| entry.path());
    let builtins = builtins.filter(|path| path.to_string_lossy().contains("libnvrtc-builtins.so"));
    // SAFETY: loading a CUDA library runs its constructors, as in any program that uses it.
    let open = |path: &Path| unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
    // NVRTC loads its builtins from the loader's path only.
    let _builtins: Vec<_> = builtins.map(|path| open(&path)).collect();
    let nvrtc = open(library).unwrap_or_else(|error| panic!("{}: {error}", library.display()));

    let headers: Vec<CString> = KERNEL_HEADERS.iter().map(|header| string(header.text)).collect();
    let names: Vec<CString> = KERNEL_HEADERS.iter().map(|header| string(header.name)).collect();
    let architecture = format!("--gpu-architecture={architecture}");
    let options: Vec<CString> = NVRTC_OPTIONS
        .into_iter()
        .chain([architecture.as_str(), "--ptxas-options=-v"])
        .map(string)
        .collect();
    let pointers = |strings: &[CString]| -> Vec<*const c_char> {
        strings.iter().map(|string| string.as_ptr()).collect()
    };
    let (header_texts, header_names, options) =
        (pointers(&headers), pointers(&names), pointers(&options));
    let source = string(text);
    // SAFETY: the functions have these signatures since CUDA 7 (nvrtc.h), all pointers outlive the calls, and the
    // buffers have the sizes that NVRTC reports.
    unsafe {
        let create = nvrtc.get::<Create>(b"nvrtcCreateProgram").expect("a function");
        let compile = nvrtc.get::<Compile>(b"nvrtcCompileProgram").expect("a function");
        let cubin_size = nvrtc.get::<Size>(b"nvrtcGetCUBINSize").expect("a function");
        let mut program = ptr::null_mut();
        let count = KERNEL_HEADERS.len() as c_int;
        let (texts, names) = (header_texts.as_ptr(), header_names.as_ptr());
        let created =
            create(&mut program, source.as_ptr(), c"kernels.cu".as_ptr(), count, texts, names);
        assert_eq!(created, 0, "NVRTC takes the source");
        let failed = compile(program, options.len() as c_int, options.as_ptr());
        let text = |size: &[u8], get: &[u8]| -> String {
            let size = nvrtc.get::<Size>(size).expect("a function");
            let get = nvrtc.get::<Get>(get).expect("a function");
            let mut bytes = 0;
            assert_eq!(size(program, &mut bytes), 0);
            let mut text = vec![0u8; bytes.max(1)];
            assert_eq!(get(program, text.as_mut_ptr().cast()), 0);
            let text = CStr::from_bytes_until_nul(&text).expect("a text");
            text.to_string_lossy().into_owned()
        };
        let log = text(b"nvrtcGetProgramLogSize", b"nvrtcGetProgramLog");
        assert_eq!(failed, 0, "{log}");
        let mut cubin = 0;
        assert_eq!(cubin_size(program, &mut cubin), 0);
        assert!(cubin > 0, "machine code, not PTX");
        log + PTX + &text(b"nvrtcGetPTXSize", b"nvrtcGetPTX")
    }
}
