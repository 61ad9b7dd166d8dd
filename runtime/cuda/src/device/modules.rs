//! Kernels on a GPU, ready to be launched.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction_attribute_enum, CUstream};
use cudarc::driver::{CudaFunction, CudaModule, DriverError, result};
use cudarc::nvrtc::Ptx;

use super::super::compile::CubinCache;
use super::super::error::CudaError;
use super::super::launch::{Argument, KernelFamily, Launch, MemorySpace};
use super::gpu::{DeviceMemory, OpenGpu};

/// Shared memory that every kernel may have; for more it must be allowed.
const SHARED_BYTES_ALWAYS: u32 = 48 << 10;

/// The kernels of a program.
pub struct KernelModules {
    functions: HashMap<(KernelFamily, String), CudaFunction>,
}

/// The memories that launches point into.
pub struct DeviceBuffers {
    pub arena: DeviceMemory,
    pub scratch: DeviceMemory,
    pub rotary: DeviceMemory,
    pub coefficients: DeviceMemory,
    pub loss: DeviceMemory,
}

impl DeviceBuffers {
    fn of(&self, memory: MemorySpace) -> &DeviceMemory {
        match memory {
            MemorySpace::Arena => &self.arena,
            MemorySpace::Scratch => &self.scratch,
            MemorySpace::Rotary => &self.rotary,
            MemorySpace::Coefficients => &self.coefficients,
            MemorySpace::Loss => &self.loss,
        }
    }

    /// Bytes besides the arena.
    pub fn besides(&self) -> u64 {
        let others = [&self.scratch, &self.rotary, &self.coefficients, &self.loss];
        others.iter().map(|memory| memory.bytes()).sum()
    }
}

/// A launch with its kernel and all addresses.
pub struct ReadyLaunch {
    function: CudaFunction,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    /// The arguments, each in the first bytes of a word of its own.
    arguments: Vec<u64>,
}

impl KernelModules {
    /// Compiles and loads kernels, each with the shared memory that it must be allowed.
    ///
    /// # Errors
    /// When they do not compile, or need more than the GPU has.
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
                    let cubin = cubins.cubin(*family, gpu.capability, &[])?;
                    let loaded = gpu.context.load_module(Ptx::from_binary(cubin.bytes));
                    let module = gpu.said(&format!("loading {}.cu", family.name()), loaded)?;
                    modules.insert(*family, module.clone());
                    module
                }
            };
            let call = format!("kernel {name} of {}.cu", family.name());
            let function = gpu.said(&call, module.load_function(name))?;
            if *shared_bytes > gpu.shared_bytes_max {
                let said = format!(
                    "it takes {shared_bytes} bytes of shared memory, and the GPU has {}",
                    gpu.shared_bytes_max
                );
                let ordinal = gpu.ordinal;
                return Err(CudaError::Driver { ordinal, call, said, hint: "" });
            }
            if *shared_bytes > SHARED_BYTES_ALWAYS {
                let most =
                    CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                gpu.said(&call, function.set_attribute(most, *shared_bytes as i32))?;
            }
            functions.insert((*family, name.clone()), function);
        }
        Ok(KernelModules { functions })
    }

    /// A launch, ready; `None` when its kernel was not loaded.
    pub fn ready(&self, launch: &Launch, memories: &DeviceBuffers) -> Option<ReadyLaunch> {
        let function = self.functions.get(&(launch.family, launch.kernel.clone()))?.clone();
        let argument = |argument: &Argument| match argument {
            Argument::Memory(span) => memories.of(span.memory).at(span.begin),
            Argument::Absent => 0,
            Argument::U32(value) => u64::from(*value),
            Argument::U64(value) => *value,
            Argument::F32(value) => u64::from(value.to_bits()),
        };
        Some(ReadyLaunch {
            function,
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            arguments: launch.arguments.iter().map(argument).collect(),
        })
    }
}

impl ReadyLaunch {
    /// Puts it on a stream.
    pub fn start(&self, stream: CUstream) -> Result<(), DriverError> {
        // Machines of big ends would need the last bytes; CUDA runs on none.
        let mut arguments: Vec<*mut c_void> =
            self.arguments.iter().map(|word| std::ptr::from_ref(word).cast_mut().cast()).collect();
        let [grid, block] = [self.grid, self.block].map(|[x, y, z]| (x, y, z));
        // SAFETY: the kernel has these arguments, which tests hold against its declaration, and
        // touches nothing but the operands, which `bounds` counts. Arguments are copied in the call.
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
