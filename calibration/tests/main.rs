//! Tests of fits and their intervals. One program, which is linked once and runs its tests on all cores.

mod fit;
mod fit_gpu;
mod frameworks;
mod intervals;
mod kernels;
mod published;

/// The allocator of the command line, whose fits these tests repeat.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
