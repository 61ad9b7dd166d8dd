//! Flags for initial weights.

use std::path::PathBuf;

use clap::Args;

/// Flags for initial weights.
#[derive(Debug, Args)]
pub struct InitialWeightsArgs {
    /// Start from these weights instead of random ones: a safetensors file, a folder of them, or a checkpoint
    ///
    /// In a folder of checkpoints, the last one is used. The naming scheme is detected: LLaMA and CoLA in Hugging
    /// Face's format, Phi-3, InternLM2, CoLA-M, LORO, and Nanotron and BOOST (the folder of a checkpoint). A folder may
    /// have an index of several files. Elements are F32, BF16 or F16. A run that resumes from a checkpoint does not
    /// read the file.
    #[arg(long, value_name = "FILE|DIR")]
    pub init_from: Option<PathBuf>,
}
