//! Tests of fits and their intervals. One program, which is linked once and runs its tests on all cores.

mod fit;
mod fit_gpu;
mod frameworks;
mod intervals;
mod kernels;
mod published;
