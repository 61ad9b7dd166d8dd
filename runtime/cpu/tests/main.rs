//! Tests of the CPU backend. One program, which is linked once and runs its tests on all cores. Allocations are counted in
//! a program of their own.

mod cached_model;
mod cpu;
mod exact_report;
mod measure;
mod ring;
mod run_plan;
mod unusual;
