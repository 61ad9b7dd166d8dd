//! Checkpoints: what was saved is loaded, under any plan; what was damaged is refused with a place;
//! and a process may be killed at any moment.

mod damage;
mod folder;
mod kill;
mod resume;
mod support;
