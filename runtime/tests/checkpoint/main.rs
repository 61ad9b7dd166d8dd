//! Checkpoints: saved runs resume under any plan, corrupted files are rejected with their location, and a
//! process may be killed at any moment. Weights in the formats of other training codes.

mod corruption;
mod folder;
mod interchange;
mod kill;
mod pending;
mod resume;
mod support;
