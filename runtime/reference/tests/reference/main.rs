//! The reference interpreter against central differences, against values that PyTorch made
//! (`tests/golden` at the root of the repository), and on what it must refuse.

mod cases;
mod differences;
mod golden;
mod programs;
mod refusals;
mod training;
