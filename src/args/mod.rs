//! The command line, in two steps: [`low`] is what was typed, [`resolve`] is what it means,
//! and [`data`] and [`run`] what the flags of the commands of that name mean.

pub mod data;
pub mod low;
pub mod resolve;
pub mod run;
pub mod units;
