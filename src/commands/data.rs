//! `narrows data`: makes token files from texts, and inspects them.

use std::path::Path;

use indicatif::ProgressBar;
use narrows_runtime::data::{DataError, DataFault, TokenFile, TokenWriter};

use crate::args::{DataArgs, DataTask, Detail, OutputFormat, TokenFileSettings};
use crate::errors::{CommandResult, ExitStatus, Failure, Problem};
use crate::input::TextDocument;
use crate::progress;
use crate::report::{self, NewTokenFileReport, TokenFileReport};
use crate::tokenize::TokenizeError;

/// Makes a token file, or inspects one.
pub fn run(args: &DataArgs) -> CommandResult<()> {
    match args.resolve()? {
        DataTask::Make(settings) => make(&settings, args.format.format),
        DataTask::Inspect(file) => inspect(&file, args.format.format),
    }
}

fn make(settings: &TokenFileSettings, format: OutputFormat) -> CommandResult<()> {
    let TokenFileSettings { documents, tokenizer, output } = settings;
    let mut writer =
        TokenWriter::create(output, tokenizer.description()).map_err(Failure::token_file)?;
    let progress = progress_bar(documents, format);
    let end_of_text = tokenizer.description().end_of_text;
    let mut text_bytes = 0;
    for (index, document) in documents.iter().enumerate() {
        if let Some(end_of_text) = end_of_text.filter(|_| index > 0) {
            writer.push(&[end_of_text]).map_err(Failure::token_file)?;
        }
        let on_progress = |bytes| {
            text_bytes += bytes;
            progress.inc(bytes);
        };
        tokenizer
            .tokenize(document.open()?, &mut writer, on_progress)
            .map_err(|error| failure(document, error))?;
    }
    progress.finish_and_clear();
    if text_bytes == 0 || writer.token_count() == 0 {
        let names: Vec<&str> = documents.iter().map(TextDocument::name).collect();
        let message = if text_bytes == 0 { "there is no text" } else { "has no tokens" };
        return Err(Failure::input(Problem::new(names.join(", "), message)));
    }
    let header = writer.finish().map_err(Failure::token_file)?;
    let report = NewTokenFileReport::new(
        TokenFileReport::new(output, &header),
        documents.len() as u64,
        text_bytes,
        tokenizer.end_of_text(),
    );
    report::print(&report, format, Detail::Summary, false)
}

fn inspect(file: &Path, format: OutputFormat) -> CommandResult<()> {
    let tokens = TokenFile::open(file).map_err(Failure::token_file)?;
    // Contents that contradict the header fail the check; anything else is bad input.
    let invalid = |error: DataError| match error.fault {
        DataFault::ChecksumMismatch { .. } | DataFault::OutOfVocabulary { .. } => {
            Failure { status: ExitStatus::Failed, ..Failure::token_file(error) }
        }
        _ => Failure::token_file(error),
    };
    tokens.verify_checksum().map_err(invalid)?;
    let largest_id = tokens.validate_tokens(u32::MAX).map_err(invalid)?;
    let report = TokenFileReport::new(file, tokens.header()).verified(largest_id);
    report::print(&report, format, Detail::Summary, false)
}

/// A bar if all sizes are known, or else a spinner.
fn progress_bar(documents: &[TextDocument], format: OutputFormat) -> ProgressBar {
    let total: Option<u64> = documents.iter().map(TextDocument::bytes).sum();
    match (format, total) {
        (OutputFormat::Json, _) => ProgressBar::hidden(),
        (OutputFormat::Text, Some(total)) => progress::styled(
            ProgressBar::new(total),
            "{spinner} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
        ),
        (OutputFormat::Text, None) => {
            progress::styled(ProgressBar::new_spinner(), "{spinner} {bytes}, {bytes_per_sec}")
        }
    }
}

fn failure(document: &TextDocument, error: TokenizeError) -> Failure {
    let name = document.name();
    let at = |byte: u64, message: String| Problem::new(name, message).field(format!("byte {byte}"));
    Failure::input(match error {
        TokenizeError::Unreadable(error) => Problem::new(name, format!("cannot be read: {error}")),
        TokenizeError::NotText(byte) => at(byte, "is not UTF-8".into())
            .hint("text in UTF-8, or no --tokenizer, so that every byte is a token"),
        TokenizeError::Rejected { first_byte, message } => at(first_byte, message)
            .because(["because the tokenizer rejects the text that begins there".into()])
            .hint("a tokenizer with a token for unknown text"),
        TokenizeError::Unwritable(error) => return Failure::token_file(error),
    })
}
