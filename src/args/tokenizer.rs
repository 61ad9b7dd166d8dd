//! Tokenizers: reading one, and finding the files that belong together.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use narrows_runtime::checkpoint::TokenizerFile;

use crate::errors::{CommandResult, Failure, Problem};
use crate::input;
use crate::tokenize::{HuggingFace, Tokenizer};

/// The file that this program reads.
pub(super) const TOKENIZER_FILE: &str = "tokenizer.json";

/// Files that Hugging Face's classes read beside it.
const COMPANIONS: [&str; 4] =
    ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"];

/// Reads a `tokenizer.json`.
///
/// # Errors
/// A file that cannot be read, or is no tokenizer.
pub(super) fn read_tokenizer(argument: &OsStr) -> CommandResult<Tokenizer> {
    let (name, text) = input::text(argument)?;
    Ok(Tokenizer::HuggingFace(Box::new(HuggingFace::read(&name, &text)?)))
}

/// The files of a tokenizer, of which the first is `tokenizer.json`; `path` is that file, or its folder.
///
/// # Errors
/// A file that cannot be read.
pub(super) fn tokenizer_files(path: &Path) -> CommandResult<Vec<TokenizerFile>> {
    let file = if path.is_dir() { path.join(TOKENIZER_FILE) } else { path.to_path_buf() };
    let mut files = vec![read_file(TOKENIZER_FILE, &file)?];
    let companions = COMPANIONS.map(|name| (name, file.with_file_name(name)));
    for (name, path) in companions.iter().filter(|(_, path)| path.is_file()) {
        files.push(read_file(name, path)?);
    }
    Ok(files)
}

/// The files of the tokenizer in a folder, as many as there are.
///
/// # Errors
/// A file that cannot be read.
pub fn tokenizer_files_of(folder: &Path) -> CommandResult<Vec<TokenizerFile>> {
    let names = [TOKENIZER_FILE].into_iter().chain(COMPANIONS);
    let files = names.map(|name| (name, folder.join(name))).filter(|(_, path)| path.is_file());
    files.map(|(name, path)| read_file(name, &path)).collect()
}

fn read_file(name: &str, path: &PathBuf) -> CommandResult<TokenizerFile> {
    let contents = fs::read(path).map_err(|error| {
        let message = format!("cannot be read: {error}");
        Failure::input(Problem::new(path.display().to_string(), message))
    })?;
    Ok(TokenizerFile { name: name.to_owned(), contents })
}
