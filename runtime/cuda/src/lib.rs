//! The CUDA backend: a device of a program on a GPU.
//!
//! | file | what it holds |
//! |---|---|
//! | `kernels/` | the kernels, in CUDA C++17, one file a family, for bf16 and f32 |
//! | [`source`] | the families, and the text that is given to a compiler |
//! | [`launch`] | a pass and its operands as launches: kernel, grid, shared memory, arguments |
//! | [`products`] | a product and its operands as what cublasLtMatmul takes, and its fastest algorithm |
//! | [`compile`] | the kernels as machine code, kept on disk |
//! | [`tape`] | all that a device does in a step, on which stream and after what |
//! | [`device`] | a GPU that plays it |
//! | [`bounds`] | that launches and products touch nothing but the operands of their instruction |
//! | [`libraries`], [`machine`] | where CUDA's libraries are, which of them load, and the GPUs |
//! | `shim/` | headers with which a C++ compiler makes the same kernels run on processors |
//!
//! Nothing but [`device`] needs a GPU. The launches of an instruction are data: a device executes them, the
//! shim runs them in tests, where they are held against the kernels of `narrows-cpu`, and
//! [`bounds`] counts which bytes they touch.
//!
//! A result depends on the shapes alone, never on the device or on what ran first: sums over rows
//! are made in parts whose number follows from the shape, then added in order, and no kernel adds
//! floats atomically.

pub mod bounds;
pub mod compile;
pub mod device;
pub mod error;
pub mod launch;
pub mod libraries;
pub mod machine;
pub mod products;
pub mod source;
pub mod tape;

pub use device::{GpuOptions, session};
pub use error::CudaError;
pub use launch::{
    Argument, KernelFamily, Launch, LaunchContext, Launches, MemorySpace, UnsupportedInstr,
};
