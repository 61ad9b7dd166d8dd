//! Flags by name, so that sweeps can set them.

use clap::{Args, Command};

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
        let problem = Problem::new(format!("--sweep {flag}"), message);
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
