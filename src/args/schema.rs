//! Flags of `schema`.

use clap::{Args, ValueEnum};

/// Flags of `schema`.
#[derive(Debug, Args)]
pub struct SchemaArgs {
    /// The file format
    #[arg(value_enum)]
    pub kind: SchemaKind,
}

/// File formats with a schema.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum SchemaKind {
    /// Model files
    Model,
    /// Hardware profiles
    Profile,
    /// Plans
    Plan,
    /// Measurements
    Measurements,
}
