//! Corpora: documents in text files, JSON lines, Parquet files, and token files of other programs.
//!
//! Documents of any number and size are read in bounded memory, one after the other, or interleaved by weights
//! (`mixture.rs`). Files may be compressed with gzip or zstd, whatever their names.

mod compressed;
#[cfg(test)]
mod damage_tests;
mod document_writer;
mod format;
mod json_lines;
mod megatron;
mod mixture;
mod nanoset;
mod parquet_file;
mod source;
mod text_batch;
mod token_documents;

pub use document_writer::{DocumentLayout, DocumentWriter};
pub use format::InputFormat;
pub use mixture::write_mixture;
pub use source::{Corpus, CorpusFile, CorpusReader, files_of_folder};
