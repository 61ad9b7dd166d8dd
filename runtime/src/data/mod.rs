//! Token files, and the sequences that training steps read from them.
//!
//! - [`TokenFile`]: a file of token ids, in the Narrows format (`header.rs` has its
//!   layout) or in one of the two formats of llm.c (`llm_c.rs`).
//! - [`TokenWriter`]: writes a file in the Narrows format atomically.
//! - [`Sampler`]: the tokens of sequence g of a run. They depend on the file, the sequence length and a
//!   seed alone: not on the mesh, the microbatches or earlier reads.
//!
//! Files are untrusted input. Invalid bytes are a [`DataError`] with their location, never a panic, and
//! every id is checked against the vocabulary before a step reads it.

mod error;
mod header;
mod llm_c;
mod permutation;
mod sampler;
mod token_bytes;
mod token_file;
mod token_writer;

pub use error::{DataError, DataFault};
pub use header::{TokenFileHeader, TokenFileLayout, TokenWidth, TokenizerId};
pub use sampler::{Cursor, LastTarget, Sampler, SamplerConfig, TargetRule};
pub use token_file::TokenFile;
pub use token_writer::{TokenFileInfo, TokenWriter};
