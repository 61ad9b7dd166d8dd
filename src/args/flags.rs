//! Flags by name, so that sweeps and the page of `ui` can set them.

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};

use super::plan::PlanningArgs;
use super::training_run::TrainingRunArgs;
use crate::errors::{CommandResult, Failure, Problem};

/// The names of all flags of a group without dashes, and their help texts.
pub fn flags<T: Args>() -> Vec<(String, String)> {
    let command = T::augment_args(Command::new(""));
    let flag = |arg: &clap::Arg| {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        Some((arg.get_long()?.to_owned(), help))
    };
    command.get_arguments().filter_map(flag).collect()
}

/// Sets a flag of a group, as `--flag=value` would.
///
/// # Errors
/// A value that the flag does not take.
pub fn set_flag<T: Args>(group: &mut T, flag: &str, value: &str) -> CommandResult<()> {
    let command = T::augment_args_for_update(Command::new("").no_binary_name(true))
        .mut_args(|arg| arg.default_value(None::<&'static str>));
    let invalid = |error: clap::Error| {
        let text = in_words(error.to_string());
        let mut lines = text.lines().map(str::trim);
        let message = lines.next().unwrap_or_default().trim_start_matches("error: ");
        let problem = Problem::new(format!("--sweep {}", flag.replace('-', "_")), message);
        let values = lines.next().filter(|line| line.starts_with('['));
        Failure::input(match values {
            Some(values) => problem.hint(values.trim_matches(['[', ']'])),
            None => problem,
        })
    };
    let mut matches =
        command.try_get_matches_from([format!("--{flag}={value}")]).map_err(invalid)?;
    group.update_from_arg_matches_mut(&mut matches).map_err(invalid)
}

/// A group none of whose flags is given.
pub fn omitted<T: Args>() -> T {
    let command = T::augment_args(Command::new("").no_binary_name(true));
    let none: [&str; 0] = [];
    let matches = command
        .try_get_matches_from(none)
        .and_then(|mut matches| T::from_arg_matches_mut(&mut matches));
    matches.expect("no flag of the group is required")
}

/// Names and values, as typed, of the flags of planning requests and training runs that a command line gives. Groups
/// take their values out of the matches, so this one stands before them.
#[derive(Clone, Debug)]
pub struct TypedFlags(pub Vec<(String, String)>);

impl TypedFlags {
    fn of(matches: &ArgMatches) -> TypedFlags {
        let command = TrainingRunArgs::augment_args(PlanningArgs::augment_args(Command::new("")));
        let typed = command.get_arguments().filter_map(|arg| {
            let id = arg.get_id().as_str();
            let is_typed = matches.value_source(id) == Some(ValueSource::CommandLine);
            let value = matches.get_raw(id).filter(|_| is_typed)?.next_back()?;
            Some((arg.get_long()?.to_owned(), value.to_string_lossy().into_owned()))
        });
        TypedFlags(typed.collect())
    }
}

impl FromArgMatches for TypedFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<TypedFlags, clap::Error> {
        Ok(TypedFlags::of(matches))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = TypedFlags::of(matches);
        Ok(())
    }
}

impl Args for TypedFlags {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}

/// Messages of the standard library about numbers, and what they mean.
const NUMBER_MESSAGES: [(&str, &str); 4] = [
    ("number would be zero for non-zero type", "expected a whole number from 1"),
    ("invalid digit found in string", "expected a whole number"),
    ("cannot parse integer from empty string", "expected a whole number"),
    ("number too large to fit in target type", "the number is too large"),
];

/// A message about flags, without words of the standard library.
pub fn in_words(message: String) -> String {
    NUMBER_MESSAGES.iter().fold(message, |message, (std, words)| message.replace(std, words))
}
