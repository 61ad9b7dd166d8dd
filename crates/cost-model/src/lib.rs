//! Hardware profiles and prices.
//!
//! A profile says what a device and its links can do; `price` turns a kernel
//! into seconds with it, and a whole search space into a [`CostTable`].

pub mod table;

pub use table::CostTable;
