//! Seeds of tests that draw other cases in every run.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

/// A seed that differs each time.
pub fn random_seed() -> u64 {
    RandomState::new().hash_one(std::process::id())
}
