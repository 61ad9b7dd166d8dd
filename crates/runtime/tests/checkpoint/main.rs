//! Checkpoints: what was saved is loaded, under any plan; what was damaged is refused with a place;
//! and a process may be killed at any moment.

#[path = "../../../plan/tests/check_support/mod.rs"]
mod check_support;

mod damage;
mod folder;
mod kill;
mod resume;
mod support;
