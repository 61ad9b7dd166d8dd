//! `narrows`: plans, prices, checks and runs the training of low-rank language models on many devices.
//!
//! `args` parses the command line and resolves it into settings, `commands` has one file per command, and `report`
//! prints results as text or JSON. `generate` continues texts, `tokenize` converts texts into tokens, and `calibrate` measures this machine.
//! Prices, search, validation and training are in other crates.
//!
//! The library is the whole command line: [`main`] for the program, [`answer`] for a program that has it within.

mod allocator;
mod args;
mod breakdown;
mod cache_dir;
mod calibrate;
mod captured_output;
mod checkpoint_folder;
mod cluster;
mod collectives;
mod commands;
mod compare;
mod corpus;
mod cuda_loader;
mod defaults;
mod diagnosis;
mod embedded;
mod errors;
mod export;
mod field_name;
mod generate;
mod gpu;
mod host;
mod input;
mod library_panic;
mod locked_file;
mod metrics_file;
mod nanotron_model;
mod op_decisions;
mod output;
mod plot;
mod priced_plan;
mod progress;
mod report;
mod resource_limits;
mod search_defects;
mod sensitivity;
mod signals;
mod stage_memory;
mod step_cost;
mod tensorboard;
mod text;
mod tokenize;
mod ui;
mod unit;
mod weight_files;
mod weights_folder;
mod whatif;
mod yaml;

pub use allocator::Allocator;
pub use captured_output::Answer;
pub use embedded::answer;

/// Runs the command line of this process.
pub fn main() -> std::process::ExitCode {
    signals::catch_file_size_limit();
    commands::main(std::env::args_os())
}
