//! Tests of searches, one file for each property. One program, which is linked once and runs its tests on all cores.

mod bounds;
mod context_axis;
mod enumeration;
mod exact_steps;
mod exactness;
mod intervals;
mod memory;
mod meshes;
mod metamorphic;
mod microbatch_pairs;
mod needed_memory;
mod objectives;
mod rediscovery;
mod shared_cache;
mod stages;
mod threads;
mod zero;

/// The allocator of the command line. Searches allocate so much that another would take a sixth of the time of these tests.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
