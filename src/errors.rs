//! What is told to somebody whose command cannot be carried out: what, where, why, what to try.

use std::fmt;

use narrows_plan::{Defect, Defects};
use narrows_runtime::RunError;
use narrows_runtime::checkpoint::CheckpointError;
use narrows_runtime::data::DataError;
use narrows_runtime::train::TrainError;

/// How a command ends when it does not end well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// There is no plan, or a check failed: exit code 1.
    Failed,
    /// What was asked makes no sense: exit code 2.
    BadInput,
    /// Somebody wanted it to end before it was done: exit code 130.
    Stopped,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// A file's name, or a flag.
    pub place: String,
    /// Where in it; empty for the whole of it.
    pub field: String,
    /// What is wrong, as a sentence without a full stop.
    pub problem: String,
    /// Why: a chain of clauses, each beginning with its own conjunction.
    pub because: Vec<String>,
    /// What to try.
    pub hints: Vec<String>,
}

/// Why a command ends without its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// How it ends.
    pub ending: ExitStatus,
    /// Everything that is wrong, at least one thing.
    pub problems: Vec<Problem>,
}

/// A result, or why there is none.
pub type CommandResult<T> = Result<T, Failure>;

impl Problem {
    /// A problem with something named by `place`.
    pub fn new(place: impl Into<String>, problem: impl Into<String>) -> Problem {
        Problem {
            place: place.into(),
            field: String::new(),
            problem: problem.into(),
            because: vec![],
            hints: vec![],
        }
    }

    /// A defect of the file called `file`.
    pub fn in_file(file: &str, defect: Defect) -> Problem {
        let Defect { field, problem, hint } = defect;
        Problem { field, hints: hint.into_iter().collect(), ..Problem::new(file, problem) }
    }

    /// A defect whose field is the flag it belongs to, or a place in the model.
    pub fn in_flag(defect: Defect) -> Problem {
        if defect.field.contains(['.', '[']) {
            return Problem::in_file("--model", defect);
        }
        let place = if defect.field.is_empty() { String::new() } else { flag(&defect.field) };
        let hints = defect.hint.into_iter().collect();
        Problem { hints, ..Problem::new(place, defect.problem) }
    }

    /// Adds what to try.
    pub fn hint(mut self, hint: impl Into<String>) -> Problem {
        self.hints.push(hint.into());
        self
    }

    /// Adds a chain of reasons.
    pub fn because(mut self, causes: impl IntoIterator<Item = String>) -> Problem {
        self.because.extend(causes);
        self
    }
}

fn flag(name: &str) -> String {
    if name.starts_with("--") { name.to_owned() } else { format!("--{name}") }
}

impl Failure {
    /// Bad input: one problem.
    pub fn input(problem: Problem) -> Failure {
        Failure { ending: ExitStatus::BadInput, problems: vec![problem] }
    }

    /// Bad input: every defect of a file.
    pub fn file(name: &str, defects: Defects) -> Failure {
        let problems = defects.0.into_iter().map(|d| Problem::in_file(name, d)).collect();
        Failure { ending: ExitStatus::BadInput, problems }
    }

    /// Bad input: every defect of the flags.
    pub fn flags(defects: Defects) -> Failure {
        let problems = defects.0.into_iter().map(Problem::in_flag).collect();
        Failure { ending: ExitStatus::BadInput, problems }
    }

    /// Bad input: a token file that cannot be read or written.
    pub fn token_file(error: DataError) -> Failure {
        let DataError { file, fault } = error;
        Failure::input(Problem {
            field: fault.location().unwrap_or_default(),
            hints: fault.hint().into_iter().collect(),
            ..Problem::new(file.display().to_string(), fault.to_string())
        })
    }

    /// Bad input: a checkpoint that cannot be read or written.
    pub fn checkpoint(error: CheckpointError) -> Failure {
        let CheckpointError { path, fault } = error;
        Failure::input(Problem {
            field: fault.location().unwrap_or_default(),
            hints: fault.hint().map(str::to_owned).into_iter().collect(),
            ..Problem::new(path.display().to_string(), fault.to_string())
        })
    }

    /// A program that could not be executed.
    pub fn execution(error: &RunError) -> Failure {
        let problem = match error {
            RunError::NonFiniteGradients { step, loss } => {
                let problem = format!(
                    "the loss is {loss} and the gradients are not finite; no weight was changed"
                );
                Problem::new(format!("step {step}"), problem)
                    .hint("a smaller --learning-rate, or more --warm-up-steps")
            }
            RunError::Cluster(error) => {
                Problem::new("", error.fault.to_string()).because(journal(&error.recent_operations))
            }
            _ => Problem::new("", error.to_string()),
        };
        Failure::failed(vec![problem])
    }

    /// No plan, or a check that failed.
    pub fn failed(problems: Vec<Problem>) -> Failure {
        Failure { ending: ExitStatus::Failed, problems }
    }
}

/// What a process did last, as a chain of reasons.
fn journal(recent: &[String]) -> impl Iterator<Item = String> {
    let head = (!recent.is_empty()).then(|| "after its last collectives and transfers:".to_owned());
    head.into_iter().chain(recent.iter().map(|done| format!("  {done}")))
}

impl From<TrainError> for Failure {
    fn from(error: TrainError) -> Failure {
        match error {
            TrainError::Data(error) => Failure::token_file(error),
            TrainError::Run(error) => Failure::execution(&error),
            TrainError::SequenceLengthMismatch { .. } => {
                Failure::failed(vec![Problem::new("", error.to_string())])
            }
        }
    }
}

/// Gathers the problems of several results, so that all of them are told at once.
#[derive(Default)]
pub struct Problems(Vec<Problem>);

impl Problems {
    /// The value, or its problems noted.
    pub fn take<T>(&mut self, outcome: CommandResult<T>) -> Option<T> {
        outcome.map_err(|failure| self.0.extend(failure.problems)).ok()
    }

    /// Notes one more.
    pub fn push(&mut self, problem: Problem) {
        self.0.push(problem);
    }

    /// The failure they amount to; `None` when nothing was noted.
    pub fn failure(&mut self) -> Option<Failure> {
        let problems = std::mem::take(&mut self.0);
        (!problems.is_empty()).then_some(Failure { ending: ExitStatus::BadInput, problems })
    }
}

/// The styles of messages; [`anstream`] drops them where nobody sees colours.
pub mod style {
    use anstyle::{AnsiColor, Style};

    /// `error:`.
    pub const ERROR: Style = AnsiColor::Red.on_default().bold();
    /// `warning:`.
    pub const WARNING: Style = AnsiColor::Yellow.on_default().bold();
    /// `hint:`.
    pub const HINT: Style = AnsiColor::Cyan.on_default();
    /// Headings of reports.
    pub const HEADING: Style = Style::new().bold();
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (error, hint) = (style::ERROR, style::HINT);
        write!(f, "{error}error:{error:#} ")?;
        for place in [&self.place, &self.field] {
            if !place.is_empty() {
                write!(f, "{}: ", visible(place))?;
            }
        }
        writeln!(f, "{}", visible(&self.problem))?;
        for cause in &self.because {
            writeln!(f, "  {}", visible(cause))?;
        }
        for text in &self.hints {
            writeln!(f, "  {hint}hint:{hint:#} {}", visible(text))?;
        }
        Ok(())
    }
}

/// Control characters of hostile files must not reach a terminal.
fn visible(text: &str) -> String {
    let escape = |c: char| match c {
        '\n' => "\n    ".to_owned(),
        c if c.is_control() => c.escape_default().to_string(),
        c => c.to_string(),
    };
    text.trim_end().chars().map(escape).collect()
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.problems.iter().try_for_each(|problem| write!(f, "{problem}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(problem: &Problem) -> String {
        anstream::adapter::strip_str(&problem.to_string()).to_string()
    }

    #[test]
    fn a_problem_says_what_where_why_and_what_to_try() {
        let defect = Defect::new("blocks[3].q.rank", "0 is not a rank").hint("a positive number");
        let problem =
            Problem::in_file("m.json", defect).because(["because nothing passes".to_owned()]);
        let expected = "error: m.json: blocks[3].q.rank: 0 is not a rank\n  \
            because nothing passes\n  hint: a positive number\n";
        assert_eq!(plain(&problem), expected);
    }

    #[test]
    fn defects_of_requests_name_their_flags() {
        let problem = Problem::in_flag(Defect::new("global-batch", "0 is too few"));
        assert_eq!(plain(&problem), "error: --global-batch: 0 is too few\n");
    }

    #[test]
    fn control_characters_are_escaped() {
        let problem = Problem::new("a\u{1b}[31m.json", "two\nlines");
        assert_eq!(plain(&problem), "error: a\\u{1b}[31m.json: two\n    lines\n");
    }
}
