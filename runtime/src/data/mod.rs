//! Token files, and what a training step reads of them.
//!
//! - [`TokenFile`]: a file of token ids, memory-mapped: our own format (`header.rs` has its layout) or
//!   one of the two that llm.c writes (`llm_c.rs`).
//! - [`TokenWriter`]: writes our format, whole or not at all.
//! - [`Sampler`]: which tokens sequence g of a run is. That depends on the file, the sequence length
//!   and a seed, and on nothing else: not on the mesh, not on microbatches, not on what was read
//!   before.
//!
//! Files come from anywhere. Whatever bytes they hold, what is wrong is a [`DataError`] with the
//! place it is at, never a panic, and no id reaches a step that its vocabulary does not have.

mod error;
mod header;
mod llm_c;
mod permutation;
mod sampler;
mod token_file;
mod token_writer;

pub use error::{DataError, DataFault};
pub use header::{TokenFileHeader, TokenFileLayout, TokenWidth, TokenizerId};
pub use sampler::{Cursor, Sampler, SamplerConfig};
pub use token_file::TokenFile;
pub use token_writer::{TokenFileInfo, TokenWriter};
