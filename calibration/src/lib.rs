//! Measurements, fits of hardware profiles to them, and prices of other frameworks.

pub mod fit;
pub mod gpt;
pub mod measurements;
