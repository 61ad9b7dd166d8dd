//! The reference interpreter compared with central differences and with results of PyTorch
//! (`tests/golden`), and its errors; imported weights.

mod cases;
mod differences;
mod errors;
mod golden;
mod programs;
mod training;
mod weights;
