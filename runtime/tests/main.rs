//! Tests of training, token files and the null backend. One program, which is linked once and runs its tests on all cores.

mod data;
mod null;
mod train;
