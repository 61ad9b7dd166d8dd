//! `narrows`: plans, prices and checks the training of low-rank language models on many devices.
//!
//! What was typed ([`args::low`]) is resolved in one place ([`args::resolve`]); each command is one
//! file under [`commands`]; what it found is printed by [`report`]; texts become tokens
//! in [`tokenize`]; this machine is measured by [`calibrate`]. Nothing here prices or searches.

mod args;
mod calibrate;
mod commands;
mod errors;
mod input;
mod lines;
mod loader;
mod memory;
mod output;
mod processes;
mod report;
mod tokenize;

fn main() -> std::process::ExitCode {
    commands::main(std::env::args_os())
}
