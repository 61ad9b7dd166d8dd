//! Failures of commands: what is wrong, where, why, and what to try.

use std::process::ExitCode;
use std::{fmt, io};

use narrows_plan::{Defect, Defects, printable};
use narrows_planner::{RequestDefect, RequestDefects, RequestField};
use narrows_runtime::RunError;
use narrows_runtime::checkpoint::{CheckpointError, CheckpointFault};
use narrows_runtime::data::{DataError, DataFault};
use narrows_runtime::interchange::WeightsError;
use narrows_runtime::train::TrainError;

use crate::resource_limits;
use crate::text::thousands;

/// Outcome of a command that does not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// No plan exists, or a check or a step failed.
    Failed,
    /// A flag or a file is invalid.
    BadInput,
    /// The environment failed, as a full disk does: the same command may succeed later.
    Environment,
    /// A signal stopped the run.
    Stopped,
}

impl ExitStatus {
    /// The exit code, on which scripts rely. Shells report 130 for a program that Ctrl-C ended; 75 is `EX_TEMPFAIL` of
    /// `sysexits.h`, after which schedulers try again.
    pub fn code(self) -> u8 {
        match self {
            ExitStatus::Failed => 1,
            ExitStatus::BadInput => 2,
            ExitStatus::Environment => 75,
            ExitStatus::Stopped => 130,
        }
    }

    /// The status of a file that cannot be read or written: names and permissions are input, as is what this program
    /// rejects itself (`Other`). All else, such as a full disk, a quota or a device error, is the environment.
    pub fn of_io(error: &io::Error) -> ExitStatus {
        ExitStatus::of_kind(error.kind())
    }

    /// The status of an error of this kind, as [`of_io`](ExitStatus::of_io).
    pub fn of_kind(kind: io::ErrorKind) -> ExitStatus {
        match kind {
            io::ErrorKind::NotFound
            | io::ErrorKind::PermissionDenied
            | io::ErrorKind::IsADirectory
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::AlreadyExists
            | io::ErrorKind::InvalidFilename
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::InvalidData
            | io::ErrorKind::Unsupported
            | io::ErrorKind::Other => ExitStatus::BadInput,
            _ => ExitStatus::Environment,
        }
    }
}

impl From<ExitStatus> for ExitCode {
    fn from(status: ExitStatus) -> ExitCode {
        status.code().into()
    }
}

/// One error message: what is wrong, where, why, and what to try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// A file name or a flag; empty when neither applies.
    pub location: String,
    /// The place within the file; empty for the whole file.
    pub field: String,
    /// The problem, without a full stop.
    pub message: String,
    /// Causes, each a clause that begins with its own conjunction.
    pub causes: Vec<String>,
    /// Corrections to try.
    pub hints: Vec<String>,
}

/// The errors of a command that did not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The exit status of the command.
    pub status: ExitStatus,
    /// All error messages. Empty only for a run that was stopped.
    pub problems: Vec<Problem>,
}

/// The result of a command, or of a part of it.
pub type CommandResult<T> = Result<T, Failure>;

impl Problem {
    /// A problem at `location`.
    pub fn new(location: impl Into<String>, message: impl Into<String>) -> Problem {
        Problem {
            location: location.into(),
            field: String::new(),
            message: message.into(),
            causes: vec![],
            hints: vec![],
        }
    }

    /// A defect of the file called `file`.
    pub fn in_file(file: &str, defect: Defect) -> Problem {
        let Defect { field, problem, hint } = defect;
        Problem { field, hints: hint.into_iter().collect(), ..Problem::new(file, problem) }
    }

    /// A defect of the value of a flag.
    pub fn in_flag(flag: &str, defect: Defect) -> Problem {
        let hints = defect.hint.into_iter().collect();
        Problem { hints, ..Problem::new(flag, defect.problem) }
    }

    /// A defect of a request that flags describe.
    pub fn in_request(defect: RequestDefect) -> Problem {
        let RequestDefect { field, problem, hint } = defect;
        Problem { hints: hint.into_iter().collect(), ..Problem::new(flag(field), problem) }
    }

    /// Sets the place within the file.
    pub fn field(mut self, field: impl Into<String>) -> Problem {
        self.field = field.into();
        self
    }

    /// Sets the location, which the caller of a parser knows.
    pub fn at(mut self, location: impl Into<String>) -> Problem {
        self.location = location.into();
        self
    }

    /// Adds a hint.
    pub fn hint(mut self, hint: impl Into<String>) -> Problem {
        self.hints.push(hint.into());
        self
    }

    /// Adds causes.
    pub fn because(mut self, causes: impl IntoIterator<Item = String>) -> Problem {
        self.causes.extend(causes);
        self
    }
}

fn flag(field: RequestField) -> &'static str {
    match field {
        RequestField::Devices => "--devices",
        RequestField::GlobalBatch => "--global-batch",
        RequestField::SequenceLength => "--sequence-length",
        RequestField::MicroBatch => "--micro-batch",
        RequestField::Tensor => "--tensor",
        RequestField::TensorMax => "--max-tensor",
        RequestField::Pipeline => "--pipeline",
        RequestField::Data => "--data-parallel",
        RequestField::Context => "--context",
        RequestField::ContextAttention => "--context-attention",
        RequestField::GradReduceDtype => "--grad-reduce-dtype",
        RequestField::ShardSize => "--shard-size",
        RequestField::LoroEvery => "--loro-every",
    }
}

impl Failure {
    /// Bad input: one problem.
    pub fn input(problem: Problem) -> Failure {
        Failure { status: ExitStatus::BadInput, problems: vec![problem] }
    }

    /// Bad input: every defect of a file.
    pub fn file(name: &str, defects: Defects) -> Failure {
        let problems = defects.0.into_iter().map(|d| Problem::in_file(name, d)).collect();
        Failure { status: ExitStatus::BadInput, problems }
    }

    /// Bad input: every defect of the value of a flag.
    pub fn flag(flag: &str, defects: Defects) -> Failure {
        let problems = defects.0.into_iter().map(|d| Problem::in_flag(flag, d)).collect();
        Failure { status: ExitStatus::BadInput, problems }
    }

    /// Bad input: every defect of a request that flags describe.
    pub fn request(defects: RequestDefects) -> Failure {
        let problems = defects.0.into_iter().map(Problem::in_request).collect();
        Failure { status: ExitStatus::BadInput, problems }
    }

    /// A token file that is invalid, or cannot be read or written.
    pub fn token_file(error: DataError) -> Failure {
        let DataError { file, fault } = error;
        let mut hints: Vec<String> = fault.hint().into_iter().collect();
        let status = match &fault {
            DataFault::Io { source, .. } => {
                hints.extend(resource_limits::file_size_hint(source.kind()));
                ExitStatus::of_io(source)
            }
            DataFault::Truncated { .. } => ExitStatus::Environment,
            _ => ExitStatus::BadInput,
        };
        let problem = Problem {
            field: fault.location().unwrap_or_default(),
            hints,
            ..Problem::new(file.display().to_string(), fault.to_string())
        };
        Failure { status, problems: vec![problem] }
    }

    /// A checkpoint that is invalid, or cannot be read or written.
    pub fn checkpoint(error: CheckpointError) -> Failure {
        let CheckpointError { path, fault } = error;
        let mut hints: Vec<String> = fault.hint().into_iter().collect();
        let status = match &fault {
            CheckpointFault::Session(error) => return Failure::execution(error),
            CheckpointFault::Io { source, .. } => {
                hints.extend(resource_limits::file_size_hint(source.kind()));
                ExitStatus::of_io(source)
            }
            CheckpointFault::LockLost { .. } => ExitStatus::Environment,
            CheckpointFault::OtherProcess { kind: Some(kind), .. } => ExitStatus::of_kind(*kind),
            _ => ExitStatus::BadInput,
        };
        let problem = Problem {
            field: fault.location().unwrap_or_default(),
            hints,
            ..Problem::new(path.display().to_string(), fault.to_string())
        };
        Failure { status, problems: vec![problem] }
    }

    /// Bad input: a checkpoint that cannot be loaded. Damaged ones have a hint.
    pub fn loading_checkpoint(error: CheckpointError) -> Failure {
        let is_corruption = error.fault.is_corruption();
        let mut failure = Failure::checkpoint(error);
        if is_corruption {
            let hint = "move it out of the folder, and --resume takes the checkpoint before it";
            failure.problems.iter_mut().for_each(|problem| problem.hints.push(hint.into()));
        }
        failure
    }

    /// Weights that do not fit the model, or cannot be read or written.
    pub fn weights(WeightsError { path, defects, io }: WeightsError) -> Failure {
        let name = path.display().to_string();
        let in_tensor = |defect: Defect| match defect.field.is_empty() {
            true => defect,
            false => Defect { field: format!("tensor `{}`", defect.field), ..defect },
        };
        let status = io.map_or(ExitStatus::BadInput, ExitStatus::of_kind);
        let defects = Defects(defects.0.into_iter().map(in_tensor).collect());
        Failure { status, ..Failure::file(&name, defects) }
    }

    /// A step that could not be executed.
    pub fn execution(error: &RunError) -> Failure {
        let hint = error.hint();
        let problem = match error {
            RunError::NonFiniteGradients { step, loss } => {
                let message = format!(
                    "the loss is {loss} and the gradients are not finite; no weight was changed"
                );
                Problem::new(format!("step {step}"), message)
                    .hint("a smaller --learning-rate, or more --warm-up-steps")
            }
            RunError::UnsupportedOptimizer { reason, hint } => {
                Problem::new("--optimizer loro", reason.clone()).hint(*hint)
            }
            RunError::UnsupportedGemmDtype => Problem {
                hints: hint.into_iter().collect(),
                ..Problem::new("--dtype bf16", error.to_string())
            },
            RunError::Cluster(error) => {
                let causes = recent_operations(&error.recent_operations);
                Problem {
                    hints: hint.into_iter().collect(),
                    ..Problem::new("", error.fault.to_string()).because(causes)
                }
            }
            _ => {
                Problem { hints: hint.into_iter().collect(), ..Problem::new("", error.to_string()) }
            }
        };
        let status = match error {
            RunError::DeviceThreads { .. } => ExitStatus::Environment,
            RunError::UnsupportedOptimizer { .. } | RunError::UnsupportedGemmDtype => {
                ExitStatus::BadInput
            }
            _ => ExitStatus::Failed,
        };
        Failure { status, problems: vec![problem] }
    }

    /// No plan exists, or a check failed.
    pub fn failed(problems: Vec<Problem>) -> Failure {
        Failure { status: ExitStatus::Failed, problems }
    }
}

/// The last collectives and transfers of this process, as causes.
fn recent_operations(recent: &[String]) -> impl Iterator<Item = String> {
    let head = (!recent.is_empty()).then(|| "last collectives and transfers:".to_owned());
    head.into_iter().chain(recent.iter().map(|operation| format!("  {operation}")))
}

impl From<TrainError> for Failure {
    fn from(error: TrainError) -> Failure {
        match error {
            TrainError::Data(error) => Failure::token_file(error),
            TrainError::Run(error) => Failure::execution(&error),
            TrainError::NoPredictedToken => {
                let problem = Problem::new(
                    "--eval-data",
                    "contains no target tokens: every token is padding or ignored",
                );
                Failure::input(problem.hint("other tokens, or another --pad-id or --last-target"))
            }
            TrainError::SequenceLengthMismatch { .. } => {
                Failure::failed(vec![Problem::new("", error.to_string())])
            }
        }
    }
}

/// Outcome of steps that are all made though one fails, as are the outputs of an answer: the problems of all failures, with
/// the exit status of the first.
pub fn all<const N: usize>(outcomes: [CommandResult<()>; N]) -> CommandResult<()> {
    let failures = outcomes.into_iter().filter_map(Result::err);
    let joined = failures.reduce(|mut first, other| {
        first.problems.extend(other.problems);
        first
    });
    joined.map_or(Ok(()), Err)
}

/// Collects the problems of several results, so that all of them are reported at once.
#[derive(Default)]
pub struct Problems(Vec<Problem>);

impl Problems {
    /// The value of a result; its problems are collected.
    pub fn take<T>(&mut self, result: CommandResult<T>) -> Option<T> {
        result.map_err(|failure| self.0.extend(failure.problems)).ok()
    }

    /// Adds a problem.
    pub fn push(&mut self, problem: Problem) {
        self.0.push(problem);
    }

    /// Bad input if any problem was collected.
    pub fn into_result(self) -> CommandResult<()> {
        match self.0.is_empty() {
            true => Ok(()),
            false => Err(Failure { status: ExitStatus::BadInput, problems: self.0 }),
        }
    }
}

/// Styles of messages and reports; [`anstream`] drops them where the output is no terminal.
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
        for place in [&self.location, &self.field] {
            if !place.is_empty() {
                write!(f, "{}: ", message_text(place))?;
            }
        }
        writeln!(f, "{}", message_text(&self.message))?;
        for cause in &self.causes {
            writeln!(f, "  {}", message_text(cause))?;
        }
        for text in &self.hints {
            writeln!(f, "  {hint}hint:{hint:#} {}", message_text(text))?;
        }
        Ok(())
    }
}

/// Text of a message, whose lines after the first are indented. Control characters, which an input file could smuggle into
/// the terminal, are escaped.
fn message_text(text: &str) -> String {
    printable(text.trim_end()).replace('\n', "\n    ")
}

/// Largest number of problems in a message.
const PROBLEMS_MAX: usize = 100;

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = &self.problems[..self.problems.len().min(PROBLEMS_MAX)];
        shown.iter().try_for_each(|problem| write!(f, "{problem}"))?;
        match self.problems.len() - shown.len() {
            0 => Ok(()),
            more => {
                let more = format!("{} more errors are not shown", thousands(more as u64));
                write!(f, "{}", Problem::new("", more))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(problem: &Problem) -> String {
        anstream::adapter::strip_str(&problem.to_string()).to_string()
    }

    #[test]
    fn a_problem_prints_location_message_causes_and_hints() {
        let defect = Defect::new("blocks[3].q.rank", "0 is not a rank").hint("a positive number");
        let problem =
            Problem::in_file("m.json", defect).because(["because the latent is empty".to_owned()]);
        let expected = "error: m.json: blocks[3].q.rank: 0 is not a rank\n  \
            because the latent is empty\n  hint: a positive number\n";
        assert_eq!(plain(&problem), expected);
    }

    #[test]
    fn a_defect_of_a_request_names_its_flag() {
        let (field, problem) = (RequestField::GlobalBatch, "0 is too few".to_owned());
        let problem = Problem::in_request(RequestDefect { field, problem, hint: None });
        assert_eq!(plain(&problem), "error: --global-batch: 0 is too few\n");
    }

    #[test]
    fn hints_of_failed_steps_are_lines_of_their_own() {
        let mismatch = RunError::ProcessCountMismatch { devices: 4, processes: 2 };
        let failure = Failure::execution(&mismatch);
        let expected = "error: the program is for 4 devices, and 2 processes were started\n  \
            hint: one process for each device, or a plan for 2 devices\n";
        assert_eq!(plain(&failure.problems[0]), expected);
    }

    #[test]
    fn control_characters_are_escaped() {
        let problem = Problem::new("a\u{1b}[31m.json", "two\nlines\u{202e}");
        assert_eq!(plain(&problem), "error: a\\u{1b}[31m.json: two\n    lines\\u{202e}\n");
    }
}
