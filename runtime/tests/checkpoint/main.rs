//! Checkpoints: saved runs resume under any plan, damaged files are rejected with their location, and a
//! process may be killed at any moment.

mod damage;
mod folder;
mod kill;
mod resume;
mod support;
