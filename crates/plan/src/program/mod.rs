//! Programs: what each device of each pipeline stage executes.

pub mod action;

pub use action::{Action, Exchange, Extent, Hop, PassOp, Product, ProductForm, Reduction};
