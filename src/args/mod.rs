//! The command line, in two steps: [`low`] is what was typed, [`resolve`] is what it means.

pub mod low;
pub mod resolve;
pub mod units;
