//! The command line, in two steps: [`low`] is what was typed, [`resolve`] is what it means,
//! [`calibrate`], [`data`] and [`run`] what the flags of the commands of that name mean, and [`checkpoint`] and
//! [`trace`] those of checkpoints and traces. [`gpu`] says which GPUs there are for a run.

pub mod calibrate;
pub mod checkpoint;
pub mod data;
pub mod doctor;
pub mod gpu;
pub mod launch;
pub mod low;
pub mod resolve;
pub mod run;
pub mod trace;
pub mod units;
pub mod validate;
