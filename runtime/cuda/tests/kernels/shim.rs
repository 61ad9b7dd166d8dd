//! Compiles kernels for processors, and runs launches of them.
//!
//! The compiler is `$CXX`, or `c++`. A library is kept by the hash of its sources, so that only
//! what changed is compiled. Where there is no compiler nothing runs, and the reason is printed.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::{env, fs};

use libloading::Library;
use narrows_cuda::source::{HEADERS, KernelFamily, KernelHeader, SHIM};
use narrows_cuda::{Argument, Launch, MemorySpace};
use sha2::{Digest, Sha256};

/// In which order blocks and threads run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Ascending,
    Descending,
}

/// Memory that launches work on.
#[derive(Default)]
pub struct Memories<'a> {
    pub arena: &'a mut [u8],
    pub scratch: &'a mut [u8],
    pub rotary: &'a mut [f32],
    pub coefficients: &'a mut [f32],
    pub loss: &'a mut [f64],
}

/// As shim.h has it.
#[repr(C)]
struct RawLaunch {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    descending: u32,
    arguments: *const *const c_void,
    kinds: *const c_char,
    error: *mut c_char,
    error_bytes: u32,
}

type Entry = unsafe extern "C" fn(*const RawLaunch) -> c_int;

/// A library of kernels. Its state is the running block's: one launch at a time.
pub struct Kernels(Mutex<Library>);

/// The compiler, or why there is none.
fn compiler() -> Result<&'static str, &'static str> {
    static FOUND: OnceLock<Result<String, String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let name = env::var("CXX").unwrap_or_else(|_| "c++".into());
        match Command::new(&name).arg("--version").output() {
            Ok(answer) if answer.status.success() => Ok(name),
            _ => Err(format!("`{name}` is no C++ compiler that runs (set CXX to one)")),
        }
    });
    match found {
        Ok(name) => Ok(name),
        Err(why) => Err(why),
    }
}

/// The kernels of a family on this processor; `None`, and a printed reason, where nothing compiles.
pub fn kernels(family: KernelFamily) -> Option<&'static Kernels> {
    source(family.name(), family.text())
}

/// The kernels of a text.
pub fn source(name: &'static str, text: &'static str) -> Option<&'static Kernels> {
    static LOADED: OnceLock<Mutex<HashMap<&'static str, &'static Kernels>>> = OnceLock::new();
    let compiler = match compiler() {
        Ok(compiler) => compiler,
        Err(why) => {
            println!("skipped: {why}");
            return None;
        }
    };
    let mut loaded = lock(LOADED.get_or_init(Mutex::default));
    let kernels = loaded.entry(name).or_insert_with(|| {
        let path = compiled(compiler, name, text);
        // SAFETY: the library was made here from our sources; loading it runs nothing but the
        // construction of a few empty containers.
        let library = unsafe { Library::new(&path) };
        let library = library.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Box::leak(Box::new(Kernels(Mutex::new(library))))
    });
    Some(kernels)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

const FLAGS: [&str; 8] = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    "-DNARROWS_SHIM",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
];

fn compiled(compiler: &str, name: &str, text: &str) -> PathBuf {
    let mut hash = Sha256::new();
    let headers: Vec<KernelHeader> = HEADERS.into_iter().chain(SHIM).collect();
    let texts = headers.iter().map(|header| header.text).chain(FLAGS).chain([compiler, text]);
    texts.for_each(|text| hash.update(text));
    let digest: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-shim");
    let library = folder.join(format!("{name}-{digest}.so"));
    if library.exists() {
        return library;
    }
    // In a folder of its own, so that two processes do not meet.
    let build = folder.join(format!("{name}-{digest}-{}", std::process::id()));
    fs::create_dir_all(&build).expect("a folder");
    for header in headers {
        fs::write(build.join(header.name), header.text).expect("a header");
    }
    let (file, made) = (build.join(format!("{name}.cu")), build.join("made.so"));
    fs::write(&file, text).expect("a source");
    let mut command = Command::new(compiler);
    let output = command.args(FLAGS).args(["-x", "c++"]).arg(&file).arg("-o").arg(&made).output();
    let output = output.expect("the compiler runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{compiler} {name}: {said}");
    assert!(said.is_empty(), "{compiler} warns of {name}: {said}");
    fs::rename(&made, &library).expect("a library");
    fs::remove_dir_all(&build).expect("an own folder");
    library
}

impl Kernels {
    /// Whether there is a kernel of this name.
    pub fn has(&self, kernel: &str) -> bool {
        // SAFETY: every kernel of the shim has this signature, and it is not called.
        unsafe { lock(&self.0).get::<Entry>(kernel.as_bytes()).is_ok() }
    }

    /// Runs a launch.
    ///
    /// # Errors
    /// What the shim found wrong with it.
    pub fn run(&self, launch: &Launch, memory: &mut Memories, order: Order) -> Result<(), String> {
        let (mut kinds, mut bits) = (vec![], vec![]);
        for argument in &launch.arguments {
            let (kind, value) = self::bits(argument, memory);
            kinds.push(kind);
            bits.push(value);
        }
        let pointers: Vec<*const c_void> =
            bits.iter().map(|bits| std::ptr::from_ref(bits).cast()).collect();
        let kinds = CString::new(kinds).expect("letters");
        let mut error = vec![0u8; 1024];
        let raw = RawLaunch {
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            descending: u32::from(order == Order::Descending),
            arguments: pointers.as_ptr(),
            kinds: kinds.as_ptr(),
            error: error.as_mut_ptr().cast(),
            error_bytes: error.len() as u32,
        };
        let library = lock(&self.0);
        // SAFETY: every kernel of the shim has this signature.
        let entry = unsafe { library.get::<Entry>(launch.kernel.as_bytes()) };
        let entry = entry.map_err(|error| format!("`{}`: {error}", launch.kernel))?;
        // SAFETY: all that `raw` points to outlives the call, the shim compares the kinds of the
        // arguments with the kernel's, and the pointers are to memory that is borrowed mutably. That
        // the kernel stays within it is what the tests are about: they leave room around.
        let failed = unsafe { entry(&raw) };
        let end = error.iter().position(|byte| *byte == 0).unwrap_or(error.len());
        let said = String::from_utf8_lossy(&error[..end]).into_owned();
        if failed == 0 { Ok(()) } else { Err(said) }
    }
}

/// What kind of argument it is for the shim, and its bits (on a machine of little ends).
fn bits(argument: &Argument, memory: &mut Memories) -> (u8, u64) {
    match argument {
        Argument::Memory(span) => {
            let memory = match span.memory {
                MemorySpace::Arena => &mut *memory.arena,
                MemorySpace::Scratch => &mut *memory.scratch,
                MemorySpace::Rotary => bytemuck::cast_slice_mut(memory.rotary),
                MemorySpace::Coefficients => bytemuck::cast_slice_mut(memory.coefficients),
                MemorySpace::Loss => bytemuck::cast_slice_mut(memory.loss),
            };
            let begin = usize::try_from(span.begin).expect("an address");
            (b'p', memory[begin..].as_mut_ptr() as u64)
        }
        Argument::Absent => (b'p', 0),
        Argument::U32(value) => (b'u', u64::from(*value)),
        Argument::U64(value) => (b'l', *value),
        Argument::F32(value) => (b'f', u64::from(value.to_bits())),
    }
}
