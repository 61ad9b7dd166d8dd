//! `narrows data`: makes token files from texts, and inspects them.

use std::fs;
use std::path::Path;

use indicatif::ProgressBar;
use narrows_runtime::data::{DataError, DataFault, TokenFile, TokenFileInfo, TokenWriter};

use crate::args::{DataArgs, DataTask, Detail, OutputFormat, TokenFileSettings};
use crate::corpus::{Corpus, CorpusFile, CorpusReader, DocumentWriter, write_mixture};
use crate::errors::{CommandResult, ExitStatus, Failure, Problem};
use crate::output;
use crate::progress;
use crate::report::{self, NewTokenFileReport, TokenFileReport};
use crate::signals::end_on_signals;

/// Makes a token file, or inspects one.
pub fn run(args: &DataArgs) -> CommandResult<()> {
    match args.resolve()? {
        DataTask::Make(settings) => make(*settings, args.format.format),
        DataTask::Inspect(file) => inspect(&file, args.format.format),
    }
}

fn make(settings: TokenFileSettings, format: OutputFormat) -> CommandResult<()> {
    let TokenFileSettings { corpora, weights, text_field, tokenizer, layout, output } = settings;
    // The end-of-text token of the tokenizer, unless documents are without one.
    let info = TokenFileInfo { end_of_text: layout.separator(), ..tokenizer.description() };
    let writer = TokenWriter::create(&output, info).map_err(Failure::token_file)?;
    remove_on_signals(writer.temporary_path(), &output);
    let mut writer = DocumentWriter::new(writer, layout);
    let progress = progress_bar(&corpora, format);
    let all_texts = !corpora.iter().flat_map(|corpus| &corpus.files).any(CorpusFile::has_tokens);
    let names: Vec<String> = corpora.iter().map(|corpus| corpus.name.clone()).collect();
    let reader = |corpus| CorpusReader::new(corpus, &tokenizer, &text_field, progress.clone());
    let mut readers: Vec<CorpusReader> = corpora.into_iter().map(reader).collect();
    let tokens = write_mixture(&mut readers, weights.as_deref(), &mut writer)?;
    progress.finish_and_clear();
    let (documents, text_bytes) = (writer.documents(), writer.text_bytes());
    if tokens.iter().all(|tokens| tokens.of_documents == 0) {
        let message = match (documents, text_bytes) {
            (0, _) => "has no documents",
            (_, 0) if all_texts => "there is no text",
            _ => "has no tokens",
        };
        return Err(Failure::input(Problem::new(names.join(", "), message)));
    }
    for (name, _) in names.iter().zip(&tokens).filter(|(_, tokens)| tokens.of_documents == 0) {
        let tokenizer = tokenizer.description().tokenizer.name;
        output::warn(&format!(
            "{name} has no tokens: it is empty, or {tokenizer} knows none of its characters"
        ));
    }
    let header = writer.finish().map_err(Failure::token_file)?;
    let contents = TokenFileReport::new(&output, &header);
    let inputs = names.into_iter().zip(tokens.iter().map(|tokens| tokens.all)).collect();
    let report = NewTokenFileReport::new(
        contents,
        documents,
        (text_bytes, all_texts),
        (layout, tokenizer.end_of_text()),
        inputs,
    );
    report::print(&report, format, Detail::Summary, false)
}

/// Removes an unfinished file and ends the program when a signal asks for it.
fn remove_on_signals(temporary: &Path, output: &Path) {
    let (temporary, output) = (temporary.to_path_buf(), output.to_path_buf());
    end_on_signals("Ctrl-C will leave a temporary file", move || {
        // The file has no temporary name any more once it is complete.
        fs::remove_file(&temporary).ok()?;
        Some(format!("Stopped by a signal: nothing was written to {}", output.display()))
    });
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

/// A bar if all sizes are known, or else a spinner. Both count bytes of files.
fn progress_bar(corpora: &[Corpus], format: OutputFormat) -> ProgressBar {
    let files = corpora.iter().flat_map(|corpus| &corpus.files);
    let total: Option<u64> = files.map(|file| file.document.bytes()).sum();
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
