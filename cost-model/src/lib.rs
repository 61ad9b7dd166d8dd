//! Hardware profiles and prices.
//!
//! A profile says what a device and its links can do; `price` turns a kernel
//! into seconds with it, and a whole search space into a [`CostTable`].

pub mod interval;
pub mod memory;
pub mod price;
pub mod profile;
pub mod segment;
pub mod simulate;
pub mod table;

pub use price::Prices;
pub use profile::{Executor, Profile};
pub use table::CostTable;
