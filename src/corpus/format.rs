//! Formats of input files.

use std::path::Path;

use clap::ValueEnum;

/// `--input-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum InputFormat {
    /// One document
    Text,
    /// One JSON object per line, each a document
    Jsonl,
    /// One row per document
    Parquet,
    /// Tokens of Megatron-LM: NAME.bin beside NAME.idx
    Megatron,
    /// Tokens of nanotron: NAME.ds beside NAME.ds.index
    Nanoset,
}

/// Endings of compressed files.
const COMPRESSED: [&str; 3] = ["gz", "zst", "zstd"];

impl InputFormat {
    /// The format that the name of a file stands for; without a known ending, text.
    pub fn of_name(path: &Path) -> InputFormat {
        let ending = |path: &Path| path.extension().map(|ending| ending.to_ascii_lowercase());
        let mut path = path.to_path_buf();
        if ending(&path).is_some_and(|ending| COMPRESSED.iter().any(|known| ending == *known)) {
            path.set_extension("");
        }
        match ending(&path).as_deref().and_then(|ending| ending.to_str()) {
            Some("jsonl" | "ndjson" | "json") => InputFormat::Jsonl,
            Some("parquet") => InputFormat::Parquet,
            Some("idx") => InputFormat::Megatron,
            Some("bin") if path.with_extension("idx").exists() => InputFormat::Megatron,
            Some("ds") => InputFormat::Nanoset,
            _ => InputFormat::Text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_for_formats() {
        for (name, format) in [
            ("a.txt", InputFormat::Text),
            ("a", InputFormat::Text),
            ("c4-train.00000-of-01024.json.gz", InputFormat::Jsonl),
            ("a.JSONL.zst", InputFormat::Jsonl),
            ("a.txt.gz", InputFormat::Text),
            ("a.parquet", InputFormat::Parquet),
            ("a.idx", InputFormat::Megatron),
            ("no/such.bin", InputFormat::Text),
            ("00000_tokens.ds", InputFormat::Nanoset),
        ] {
            assert_eq!(InputFormat::of_name(Path::new(name)), format, "{name}");
        }
    }
}
