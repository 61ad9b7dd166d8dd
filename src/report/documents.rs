//! Answers as files for people: a picture, and a page with pictures.

use super::Report;
use super::html::html;
use crate::args::{Detail, DocumentFiles};
use crate::errors::{CommandResult, Failure, Problem};
use crate::output;
use crate::plot::{Figure, PlotKind};

/// Writes the first of `figures`, or that of the requested kind, and the page of a report to the files that are asked for.
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
    if let Some(file) = &files.plot {
        let chosen = figures.iter().find(|figure| files.plot_kind.is_none_or(|k| figure.kind == k));
        match (chosen, files.plot_kind) {
            (Some(figure), _) => figure.picture.write(file)?,
            (None, Some(kind)) => {
                let message = format!("this answer has no picture `{}`", kind.name());
                let kinds: Vec<PlotKind> = figures.iter().map(|figure| figure.kind).collect();
                let hint = PlotKind::names(&kinds);
                return Err(Failure::input(Problem::new("--plot-kind", message).hint(hint)));
            }
            (None, None) => {
                let file = file.display();
                output::warn(&format!("{file} is not written: there is nothing to draw"));
            }
        }
    }
    if let Some(file) = &files.report {
        let page = report.page(Detail::Full);
        output::write_file(
            file,
            html(&page, &report.summary(), &figures, &command_line())?.as_bytes(),
        )?;
    }
    Ok(())
}

/// The command line of this process, with the words quoted that a shell would split or expand.
fn command_line() -> String {
    let words = std::env::args_os().skip(1).map(|word| quoted(&word.to_string_lossy()));
    std::iter::once("narrows".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "-_=.,:/+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn words_that_a_shell_would_change_are_quoted() {
        for (word, expected) in [
            ("--devices=8", "--devices=8"),
            ("devices=8..64*2", "'devices=8..64*2'"),
            ("my model.json", "'my model.json'"),
            ("it's", r"'it'\''s'"),
            ("", "''"),
        ] {
            assert_eq!(quoted(word), expected);
        }
    }
}
