//! `narrows data`: texts into a token file, and what a token file holds.

use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};
use narrows_runtime::data::{DataError, DataFault, TokenFile, TokenWriter};

use crate::args::data::{DataSettings, DataTask, data};
use crate::args::low::{DataArgs, OutputFormat};
use crate::errors::{CommandResult, ExitStatus, Failure, Problem};
use crate::input::TextDocument;
use crate::output;
use crate::report::tokens::{NewTokenFileReport, TokenFileReport};
use crate::tokenize::TokenizeError;

/// Makes a token file, or inspects one.
pub fn run(args: &DataArgs) -> CommandResult<()> {
    match data(args)? {
        DataTask::Make(making) => make(&making, args.format),
        DataTask::Inspect(file) => inspect(&file, args.format),
    }
}

fn make(making: &DataSettings, format: OutputFormat) -> CommandResult<()> {
    let DataSettings { documents, tokenizer, output } = making;
    let mut writer =
        TokenWriter::create(output, tokenizer.description()).map_err(Failure::token_file)?;
    let progress = progress(documents, format);
    let end_of_text = tokenizer.description().end_of_text;
    let mut text_bytes = 0;
    for (index, document) in documents.iter().enumerate() {
        if let Some(end_of_text) = end_of_text.filter(|_| index > 0) {
            writer.push(&[end_of_text]).map_err(Failure::token_file)?;
        }
        let done = |bytes| {
            text_bytes += bytes;
            progress.inc(bytes);
        };
        tokenizer
            .tokenize(document.open()?, &mut writer, done)
            .map_err(|trouble| failure(document, trouble))?;
    }
    progress.finish_and_clear();
    if text_bytes == 0 || writer.token_count() == 0 {
        let names: Vec<&str> = documents.iter().map(TextDocument::name).collect();
        let problem = if text_bytes == 0 { "there is no text" } else { "has no tokens" };
        return Err(Failure::input(Problem::new(names.join(", "), problem)));
    }
    let header = writer.finish().map_err(Failure::token_file)?;
    let contents = TokenFileReport::of(output, &header);
    let made = NewTokenFileReport::of(
        contents,
        documents.len() as u64,
        text_bytes,
        tokenizer.end_of_text(),
    );
    match format {
        OutputFormat::Json => output::print_json(&made),
        OutputFormat::Text => output::print(&made.text()),
    }
}

fn inspect(file: &Path, format: OutputFormat) -> CommandResult<()> {
    let tokens = TokenFile::open(file).map_err(Failure::token_file)?;
    let damaged = |error: DataError| match error.fault {
        DataFault::ChecksumMismatch { .. } | DataFault::OutOfVocabulary { .. } => {
            Failure { ending: ExitStatus::Failed, ..Failure::token_file(error) }
        }
        _ => Failure::token_file(error),
    };
    tokens.verify_checksum().map_err(damaged)?;
    let largest_id = tokens.validate_tokens(u32::MAX).map_err(damaged)?;
    let contents = TokenFileReport::of(file, tokens.header()).verified(largest_id);
    match format {
        OutputFormat::Json => output::print_json(&contents),
        OutputFormat::Text => output::print(&contents.text()),
    }
}

/// A bar where the sizes are known. It is drawn on standard error, and only when that is a terminal.
fn progress(documents: &[TextDocument], format: OutputFormat) -> ProgressBar {
    let total: Option<u64> = documents.iter().map(TextDocument::bytes).sum();
    let (progress, template) = match (format, total) {
        (OutputFormat::Json, _) => return ProgressBar::hidden(),
        (_, Some(total)) => (
            ProgressBar::new(total),
            "{spinner} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} to go",
        ),
        (_, None) => (ProgressBar::new_spinner(), "{spinner} {bytes}, {bytes_per_sec}"),
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        progress.set_style(style);
    }
    progress.enable_steady_tick(super::TICK);
    progress
}

fn failure(document: &TextDocument, trouble: TokenizeError) -> Failure {
    let name = document.name();
    let at = |byte: u64, problem: String| Problem {
        field: format!("byte {byte}"),
        ..Problem::new(name, problem)
    };
    Failure::input(match trouble {
        TokenizeError::Unreadable(error) => Problem::new(name, format!("cannot be read: {error}")),
        TokenizeError::NotText(byte) => at(byte, "is not UTF-8".into())
            .hint("text in UTF-8, or no --tokenizer: then every byte is a token"),
        TokenizeError::Refused { first_byte, problem } => at(first_byte, problem)
            .because(["because the tokenizer does not take the text from there on".into()])
            .hint("a tokenizer with a token for what is unknown to it"),
        TokenizeError::Unwritable(error) => return Failure::token_file(error),
    })
}
