//! Flags of `schema`.

use clap::{Args, ValueEnum};

/// Flags of `schema`.
#[derive(Debug, Args)]
pub struct SchemaArgs {
    /// The file format, or the command whose answer with `--format json` is described
    #[arg(value_enum)]
    pub kind: SchemaKind,
}

/// File formats and answers with a schema.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum SchemaKind {
    /// Model files
    Model,
    /// Hardware profiles
    Profile,
    /// Plans
    Plan,
    /// Recipes of training runs
    Recipe,
    /// Measurements
    Measurements,
    /// Answers of `compare`
    Compare,
    /// Answers of `export`
    Export,
    /// Answers of `whatif`
    #[value(name = "whatif")]
    WhatIf,
    /// Answers of `whatif --list`
    #[value(name = "whatif-list")]
    WhatIfList,
    /// Answers of `sensitivity`
    Sensitivity,
}
