//! Loaded kernels, and launches with resolved addresses.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction_attribute_enum, CUstream};
use cudarc::driver::{CudaFunction, CudaModule, DriverError, result};
use cudarc::nvrtc::Ptx;

use super::gpu::{DeviceMemory, OpenGpu};
use crate::compile::CubinCache;
use crate::error::CudaError;
use crate::kernel_source::KernelFamily;
use crate::launch::{Argument, Launch, MemorySpace};

/// Dynamic shared memory that needs no opt-in, in bytes.
const SHARED_BYTES_DEFAULT: u32 = 48 << 10;

/// The loaded kernels of a program.
pub(crate) struct KernelModules {
    functions: HashMap<(KernelFamily, String), CudaFunction>,
}

/// The GPU memory behind each [`MemorySpace`].
pub(crate) struct DeviceBuffers {
    pub arena: DeviceMemory,
    pub scratch: DeviceMemory,
    pub rotary: DeviceMemory,
    pub coefficients: DeviceMemory,
    pub loss: DeviceMemory,
}

impl DeviceBuffers {
    fn memory(&self, memory: MemorySpace) -> &DeviceMemory {
        match memory {
            MemorySpace::Arena => &self.arena,
            MemorySpace::Scratch => &self.scratch,
            MemorySpace::Rotary => &self.rotary,
            MemorySpace::Coefficients => &self.coefficients,
            MemorySpace::Loss => &self.loss,
        }
    }

    /// Bytes besides the arena.
    pub fn auxiliary_bytes(&self) -> u64 {
        let others = [&self.scratch, &self.rotary, &self.coefficients, &self.loss];
        others.iter().map(|memory| memory.bytes()).sum()
    }
}

/// A launch with a loaded kernel and resolved addresses.
pub(crate) struct ReadyLaunch {
    function: CudaFunction,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    /// Arguments, each in the low bytes of a word, and the words of the table.
    words: Vec<u64>,
    /// Number of arguments.
    arguments: usize,
}

impl KernelModules {
    /// Compiles and loads kernels, and opts in to the shared memory that each needs, in bytes.
    ///
    /// # Errors
    /// When a kernel does not compile, or needs more shared memory than the GPU has.
    pub fn load(
        gpu: &OpenGpu,
        kernels: &BTreeMap<(KernelFamily, String), u32>,
        cubins: &mut CubinCache,
    ) -> Result<KernelModules, CudaError> {
        let mut modules: HashMap<KernelFamily, Arc<CudaModule>> = HashMap::new();
        let mut functions = HashMap::new();
        for ((family, name), shared_bytes) in kernels {
            let module = match modules.get(family) {
                Some(module) => module.clone(),
                None => {
                    let cubin = cubins.load_or_compile(*family, gpu.capability, &[])?;
                    let loaded = gpu.context.load_module(Ptx::from_binary(cubin.bytes));
                    let module = gpu.check(&format!("loading {}.cu", family.name()), loaded)?;
                    modules.insert(*family, module.clone());
                    module
                }
            };
            let call = format!("kernel {name} of {}.cu", family.name());
            let function = gpu.check(&call, module.load_function(name))?;
            if *shared_bytes > gpu.shared_bytes_max {
                let message = format!(
                    "it needs {shared_bytes} bytes of shared memory, and the GPU has {}",
                    gpu.shared_bytes_max
                );
                let ordinal = gpu.ordinal;
                return Err(CudaError::Driver { ordinal, call, message, hint: None });
            }
            if *shared_bytes > SHARED_BYTES_DEFAULT {
                let most =
                    CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                gpu.check(&call, function.set_attribute(most, *shared_bytes as i32))?;
            }
            functions.insert((*family, name.clone()), function);
        }
        Ok(KernelModules { functions })
    }

    /// Resolves a launch; `None` when its kernel is not loaded.
    pub fn prepare(&self, launch: &Launch, buffers: &DeviceBuffers) -> Option<ReadyLaunch> {
        let function = self.functions.get(&(launch.family, launch.kernel.clone()))?.clone();
        let argument = |argument: &Argument| match argument {
            Argument::Pointer(span) => buffers.memory(span.memory).address(span.begin),
            Argument::Null => 0,
            Argument::U32(value) => u64::from(*value),
            Argument::U64(value) => *value,
            Argument::F32(value) => u64::from(value.to_bits()),
        };
        Some(ReadyLaunch {
            function,
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            words: launch.all_arguments().map(argument).collect(),
            arguments: launch.arguments.len(),
        })
    }
}

impl ReadyLaunch {
    /// Enqueues the launch on a stream.
    pub fn enqueue(&self, stream: CUstream) -> Result<(), DriverError> {
        // Assumes little-endian words; CUDA runs on no other hosts. The table is one argument, at its first word.
        let arguments = self.words.iter().take(self.arguments + 1);
        let mut arguments: Vec<*mut c_void> =
            arguments.map(|word| std::ptr::from_ref(word).cast_mut().cast()).collect();
        let [grid, block] = [self.grid, self.block].map(|[x, y, z]| (x, y, z));
        // SAFETY: the arguments match the kernel's declaration, which tests verify, and the kernel accesses only
        // its operands, which `bounds_check` verifies. The call copies the arguments.
        unsafe {
            result::launch_kernel(
                self.function.cu_function(),
                grid,
                block,
                self.shared_bytes,
                stream,
                &mut arguments,
            )
        }
    }
}
