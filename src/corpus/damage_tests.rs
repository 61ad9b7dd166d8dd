//! Damaged corpora in every format are read or refused with the name of the file.

use std::fs;
use std::path::Path;

use indicatif::ProgressBar;
use narrows_runtime::data::TokenWriter;
use narrows_test_support::damage::damaged;

use crate::errors::CommandResult;
use crate::input::TextDocument;
use crate::tokenize::{HuggingFace, Tokenizer};

use super::{Corpus, CorpusFile, CorpusReader, DocumentLayout, DocumentWriter, write_mixture};

/// Undamaged files.
const CORPUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/attack/corpus");

/// Files that are damaged, and the inputs that are read then.
const FILES: [(&str, &str); 8] = [
    ("docs.jsonl", "docs.jsonl"),
    ("docs.parquet", "docs.parquet"),
    ("megatron.idx", "megatron.idx"),
    ("megatron.bin", "megatron.idx"),
    ("nanoset.ds", "nanoset.ds"),
    ("nanoset.ds.index", "nanoset.ds"),
    ("nanoset.ds.metadata", "nanoset.ds"),
    ("tokenizer.json", "docs.jsonl"),
];

/// Milliseconds of attempts for each file.
const BUDGET_MS: u64 = 200;

/// Makes a token file of an input.
fn make(folder: &Path, input: &str) -> CommandResult<()> {
    let at = |name: &str| folder.join(name);
    let tokenizer = fs::read(at("tokenizer.json")).unwrap_or_default();
    let tokenizer = HuggingFace::read("tokenizer.json", &String::from_utf8_lossy(&tokenizer))?;
    let tokenizer = Tokenizer::HuggingFace(Box::new(tokenizer));
    let file = CorpusFile::new(TextDocument::find(at(input).as_os_str())?, None);
    let corpus = Corpus { name: input.into(), files: vec![file] };
    let writer = TokenWriter::create(&at("new.tokens"), tokenizer.description()).unwrap();
    let mut writer = DocumentWriter::new(writer, DocumentLayout::Separated(None));
    let field = if input == "docs.parquet" { "content" } else { "text" };
    let reader = CorpusReader::new(corpus, &tokenizer, field, ProgressBar::hidden());
    write_mixture(&mut [reader], None, &mut writer).map(drop)
}

#[test]
fn damaged_corpora_are_read_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(CORPUS).unwrap().map(Result::unwrap) {
        if entry.path().is_file() {
            fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
    }
    for (name, input) in FILES {
        let path = folder.path().join(name);
        let undamaged = fs::read(&path).unwrap();
        make(folder.path(), input).unwrap();
        arbtest::arbtest(|u| {
            fs::write(&path, damaged(u, &undamaged)?).unwrap();
            if let Err(failure) = make(folder.path(), input) {
                let message = failure.to_string();
                let stem = name.split('.').next().unwrap_or(name);
                assert!(message.contains(stem), "{name}: {message}");
            }
            Ok(())
        })
        .budget_ms(BUDGET_MS);
        fs::write(&path, undamaged).unwrap();
    }
}
