//! Runs launches of kernels that were compiled for the CPU with the shim.
//!
//! Without a C++ compiler nothing runs, and the reason is printed.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::{fs, thread};

use libloading::Library;
use narrows_cuda::{Argument, KernelFamily, Launch, MemorySpace};

/// Order in which blocks and threads run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecutionOrder {
    Ascending,
    Descending,
}

/// Memory that launches access.
#[derive(Default)]
pub struct ShimMemory<'a> {
    pub arena: &'a mut [u8],
    pub scratch: &'a mut [u8],
    pub rotary: &'a mut [f32],
    pub coefficients: &'a mut [f32],
    pub loss: &'a mut [f64],
}

/// `shim::Launch` of shim.h.
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

/// Most copies of a library.
const COPIES_MAX: usize = 4;

type Entry = unsafe extern "C" fn(*const RawLaunch) -> c_int;

/// A library of kernels. Its state is that of the running block, so a copy of it runs one launch at a time.
pub struct ShimKernels {
    copies: Vec<Mutex<Library>>,
}

/// The kernels of a family; `None`, with a printed reason, where they cannot be compiled.
pub fn kernels(family: KernelFamily) -> Option<&'static ShimKernels> {
    static COMPILED: OnceLock<()> = OnceLock::new();
    // All families in parallel, so that tests do not wait for one after the other.
    COMPILED.get_or_init(|| {
        let _ = narrows_fake_cuda::compile_all_kernels();
    });
    load(family.name(), family.source())
}

/// The kernels of a source; `None`, with a printed reason, where it cannot be compiled.
pub fn load(name: &'static str, source: &'static str) -> Option<&'static ShimKernels> {
    static LOADED: OnceLock<Mutex<HashMap<&'static str, &'static ShimKernels>>> = OnceLock::new();
    let mut loaded = lock(LOADED.get_or_init(Mutex::default));
    if let Some(kernels) = loaded.get(name) {
        return Some(kernels);
    }
    let path = match narrows_fake_cuda::compile_kernels(name, source) {
        Ok(path) => path,
        Err(reason) => {
            println!("skipped: {reason}");
            return None;
        }
    };
    let kernels = Box::leak(Box::new(ShimKernels::open(&path)));
    loaded.insert(name, kernels);
    Some(kernels)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl ShimKernels {
    /// Loads one copy per core that tests run on. The loader knows libraries by their files.
    fn open(path: &Path) -> ShimKernels {
        let folder = tempfile::tempdir().expect("a folder");
        let count = thread::available_parallelism().map_or(1, |count| count.get().min(COPIES_MAX));
        let load = |index: usize| {
            let copy = folder.path().join(format!("{index}.so"));
            fs::copy(path, &copy).expect("a copy");
            // SAFETY: the library was compiled from our sources; loading it only constructs empty containers.
            let library = unsafe { Library::new(&copy) };
            Mutex::new(library.unwrap_or_else(|error| panic!("{}: {error}", path.display())))
        };
        ShimKernels { copies: (0..count).map(load).collect() }
    }

    /// A copy that runs nothing, or else the first when it is free.
    fn free_copy(&self) -> MutexGuard<'_, Library> {
        let free = self.copies.iter().find_map(|copy| copy.try_lock().ok());
        free.unwrap_or_else(|| lock(&self.copies[0]))
    }

    /// Whether there is a kernel of this name.
    pub fn has(&self, kernel: &str) -> bool {
        // SAFETY: every kernel of the shim has this signature, and it is not called.
        unsafe { self.free_copy().get::<Entry>(kernel.as_bytes()).is_ok() }
    }

    /// Runs a launch.
    ///
    /// # Errors
    /// The mistake that the shim detected.
    pub fn run(
        &self,
        launch: &Launch,
        memory: &mut ShimMemory,
        order: ExecutionOrder,
    ) -> Result<(), String> {
        let (mut kinds, mut values) = (vec![], vec![]);
        for argument in launch.all_arguments() {
            let (kind, value) = kind_and_bits(argument, memory);
            kinds.push(kind);
            values.push(value);
        }
        kinds.truncate(launch.arguments.len());
        if !launch.table.is_empty() {
            kinds.extend(format!("({})", 8 * launch.table.len()).bytes());
        }
        // The table is one argument, at its first word.
        let pointers: Vec<*const c_void> = values
            .iter()
            .take(launch.arguments.len() + 1)
            .map(|value| std::ptr::from_ref(value).cast())
            .collect();
        let kinds = CString::new(kinds).expect("letters");
        let mut error = vec![0u8; 1024];
        let raw = RawLaunch {
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            descending: u32::from(order == ExecutionOrder::Descending),
            arguments: pointers.as_ptr(),
            kinds: kinds.as_ptr(),
            error: error.as_mut_ptr().cast(),
            error_bytes: error.len() as u32,
        };
        let library = self.free_copy();
        // SAFETY: every kernel of the shim has this signature.
        let entry = unsafe { library.get::<Entry>(launch.kernel.as_bytes()) };
        let entry = entry.map_err(|error| format!("`{}`: {error}", launch.kernel))?;
        // SAFETY: all pointers of `raw` outlive the call, the shim compares the kinds of the arguments with the
        // kernel's parameters, and the memory is borrowed mutably. Tests surround it with guard bytes to verify that
        // kernels stay within it.
        let failed = unsafe { entry(&raw) };
        let end = error.iter().position(|byte| *byte == 0).unwrap_or(error.len());
        let message = String::from_utf8_lossy(&error[..end]).into_owned();
        if failed == 0 { Ok(()) } else { Err(message) }
    }
}

/// The kind of an argument for the shim, and its bits on a little-endian machine.
fn kind_and_bits(argument: &Argument, memory: &mut ShimMemory) -> (u8, u64) {
    match argument {
        Argument::Pointer(span) => {
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
        Argument::Null => (b'p', 0),
        Argument::U32(value) => (b'u', u64::from(*value)),
        Argument::U64(value) => (b'l', *value),
        Argument::F32(value) => (b'f', u64::from(value.to_bits())),
    }
}
