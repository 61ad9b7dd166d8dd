//! Answers as files for people: a picture, and a page with pictures.

use std::ffi::OsString;
use std::path::Path;

use super::Report;
use super::html::html;
use crate::args::{Detail, DocumentFiles};
use crate::captured_output::arguments;
use crate::errors::{self, CommandResult, ExitStatus, Failure, Problem};
use crate::output;
use crate::plot::{Figure, PlotKind};
use crate::text::shell_word;

/// Writes the first of `figures`, or that of the requested kind, and the page of a report to the files that are asked for.
/// Each is written though the other one fails.
///
/// # Errors
/// A file cannot be written, or no figure has the requested kind.
pub fn write_documents(
    report: &impl Report,
    figures: impl FnOnce() -> Vec<Figure>,
    files: &DocumentFiles,
) -> CommandResult<()> {
    if files.plot.is_none() && files.report.is_none() {
        return Ok(());
    }
    let figures = figures();
    let plot = files.plot.as_deref();
    let page = files.report.as_deref();
    errors::all([
        plot.map_or(Ok(()), |file| write_picture(report, &figures, files.plot_kind, file)),
        page.map_or(Ok(()), |file| {
            let page = report.page(Detail::Full);
            let text = html(&page, &report.summary(), &figures, &command_line())?;
            output::write_file(file, text.as_bytes())
        }),
    ])
}

fn write_picture(
    report: &impl Report,
    figures: &[Figure],
    kind: Option<PlotKind>,
    file: &Path,
) -> CommandResult<()> {
    let chosen = figures.iter().find(|figure| kind.is_none_or(|kind| figure.kind == kind));
    match (chosen, kind) {
        (Some(figure), _) => figure.picture.write(file),
        (None, Some(kind)) => {
            let message = format!("this answer has no picture `{}`", kind.name());
            let kinds: Vec<PlotKind> = figures.iter().map(|figure| figure.kind).collect();
            let reason = report.reason_without_picture(kind);
            let status = reason.as_ref().map_or(ExitStatus::BadInput, |_| ExitStatus::Failed);
            let problem = Problem::new("--plot-kind", message).because(reason);
            let problem = match kinds.is_empty() {
                true => problem,
                false => problem.hint(PlotKind::names(&kinds)),
            };
            Err(Failure { status, problems: vec![problem] })
        }
        (None, None) => {
            let file = file.display();
            output::warn(&format!("{file} is not written: there is nothing to draw"));
            Ok(())
        }
    }
}

/// The command line of this command, with the words quoted that a shell would split or expand.
fn command_line() -> String {
    let arguments = arguments().unwrap_or_else(|| std::env::args_os().skip(1).collect());
    command_text(&arguments)
}

/// Flags of files that are written, for which `-` is standard output.
const OUTPUT_FLAGS: [&str; 3] = ["--csv", "--output", "--trace"];

fn command_text(arguments: &[OsString]) -> String {
    let words = arguments.iter().map(|word| shell_word(&word.to_string_lossy()));
    let is_input =
        |pair: &[OsString]| pair[1] == "-" && !OUTPUT_FLAGS.iter().any(|f| pair[0] == *f);
    // What was read from standard input has no name.
    let input = arguments.windows(2).any(is_input).then(|| "< FILE".to_owned());
    std::iter::once("narrows".to_owned()).chain(words).chain(input).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_reads_standard_input_names_a_file() {
        for (line, expected) in [
            ("cost - --report x.html", "narrows cost - --report x.html < FILE"),
            ("plan --model - --output p.json", "narrows plan --model - --output p.json < FILE"),
            ("whatif --csv - --sweep rank=1", "narrows whatif --csv - --sweep rank=1"),
            ("plan --sweep a*b", "narrows plan --sweep 'a*b'"),
        ] {
            let arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            assert_eq!(command_text(&arguments), expected);
        }
    }
}
