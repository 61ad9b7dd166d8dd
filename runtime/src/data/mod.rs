//! Token files, and what a training step reads of them.
//!
//! - [`TokenFile`]: a file of token ids, memory-mapped: our own format ([`header`] has its layout) or
//!   one of the two that llm.c writes ([`llm_c`]).
//! - [`TokenWriter`]: writes our format, whole or not at all.
//! - [`Sampler`]: which tokens sequence g of a run is. That depends on the file, the sequence length
//!   and a seed, and on nothing else: not on the mesh, not on microbatches, not on what was read
//!   before.
//!
//! Files come from anywhere. Whatever bytes they hold, what is wrong is a [`DataError`] with the
//! place it is at, never a panic, and no id reaches a step that its vocabulary does not have.

pub mod error;
pub mod file;
pub mod header;
pub mod llm_c;
mod permutation;
pub mod sampler;
mod whole;
pub mod write;

pub use error::{DataError, DataFault};
pub use file::TokenFile;
pub use header::{TokenFileHeader, TokenFileLayout, TokenWidth, TokenizerName};
pub use sampler::{Cursor, Sampler, Sampling};
pub use whole::AtomicFile;
pub use write::{TokenFileInfo, TokenWriter};

use sha2::{Digest as _, Sha256};

/// A SHA-256.
pub type Digest = [u8; 32];

/// The SHA-256 of some bytes.
pub fn digest(bytes: &[u8]) -> Digest {
    Sha256::digest(bytes).into()
}

/// A digest as people compare it: 64 hex digits.
pub fn hex(digest: &Digest) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
