//! Tests of training, token files and the null backend. One program, which is linked once and runs its tests on all cores.

mod data;
mod loro;
mod null;
mod train;
