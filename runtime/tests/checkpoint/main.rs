//! Checkpoints: saved runs resume under any plan, corrupted files are rejected with their location, and a
//! process may be killed at any moment.

mod corruption;
mod folder;
mod kill;
mod resume;
mod support;
