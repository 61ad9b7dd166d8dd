//! Commands within another program.

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::args::{CommandLine, in_words};
use crate::captured_output::{Answer, capture, plain};
use crate::commands;
use crate::errors::ExitStatus;

/// Runs the command of these arguments, without the name of the program. It installs no handlers of signals: its searches
/// end soon after `stop` is set, and then the exit code is all that is returned.
pub fn answer(arguments: impl IntoIterator<Item = OsString>, stop: Arc<AtomicBool>) -> Answer {
    let program = OsString::from("narrows");
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let words = [program].into_iter().chain(arguments.iter().cloned());
    let command_line = match CommandLine::parse_from_words(words) {
        Ok(command_line) => command_line,
        Err(error) => {
            let text = in_words(error.render().to_string());
            return match error.use_stderr() {
                true => Answer {
                    exit_code: ExitStatus::BadInput.code(),
                    messages: text,
                    ..Answer::default()
                },
                false => Answer { output: text, ..Answer::default() },
            };
        }
    };
    let (result, mut answer) =
        capture(arguments, Arc::clone(&stop), || commands::execute(&command_line.command));
    if stop.load(Ordering::Relaxed) {
        // The answer of a stopped search looks like that of one that reached a time limit.
        return Answer { exit_code: ExitStatus::Stopped.code(), ..Answer::default() };
    }
    if let Err(failure) = result {
        answer.exit_code = failure.status.code();
        answer.messages.push_str(&plain(&failure.to_string()));
    }
    answer
}

#[cfg(test)]
mod tests {
    use crate::captured_output::stop_flag;

    use super::*;

    fn answer_to(line: &str) -> Answer {
        answer(line.split_whitespace().map(OsString::from), Arc::default())
    }

    #[test]
    fn an_answer_has_the_text_and_the_exit_code_of_the_program() {
        let answer = answer_to("plan --model cola-tiny --format json");
        assert_eq!((answer.exit_code, answer.messages.as_str()), (0, ""));
        let plan: serde_json::Value = serde_json::from_str(&answer.output).expect("JSON");
        assert_eq!(plan["search"]["status"], "optimal");
        assert!(stop_flag().is_none());

        let answer = answer_to("plan --model cola-7");
        assert_eq!((answer.exit_code, answer.output.as_str()), (2, ""));
        assert!(answer.messages.starts_with("error: --model: there is no preset"), "{answer:?}");

        assert_eq!(answer_to("paln").exit_code, 2);
        let help = answer_to("plan --help");
        assert!(help.exit_code == 0 && help.output.contains("--devices"), "{help:?}");
    }

    /// Signals belong to the program around the command.
    #[cfg(target_os = "linux")]
    #[test]
    fn an_answer_installs_no_handlers() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let text = folder.path().join("text.txt");
        std::fs::write(&text, "Call me Ishmael.").expect("a text");
        for line in [
            "run --model cola-tiny --backend null --hardware cpu-local".to_owned(),
            format!("data {0} --output {0}.tokens", text.display()),
        ] {
            let answer = answer_to(&line);
            assert_eq!((answer.exit_code, answer.messages.as_str()), (0, ""), "{line}");
            let status = std::fs::read_to_string("/proc/self/status").expect("a status");
            let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
            let mask = u64::from_str_radix(mask.expect("a mask").trim(), 16).expect("a number");
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGUSR1] {
                assert_eq!(mask >> (signal - 1) & 1, 0, "{line} handles signal {signal}");
            }
        }
    }

    /// Not that of the program around the command.
    #[test]
    fn a_page_has_the_command_that_reproduces_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let page = folder.path().join("page.html");
        let line = format!("plan --model cola-tiny --report {}", page.display());
        assert_eq!(answer_to(&line).exit_code, 0);
        let page = std::fs::read_to_string(page).expect("the page");
        assert!(page.contains(&format!("<code>narrows {line}</code>")), "{page}");
    }

    #[test]
    fn a_flag_stops_a_search() {
        let stop = Arc::new(AtomicBool::new(true));
        let line = "plan --model cola-7b --devices 512 --global-batch 4096 --format json";
        let answer = answer(line.split_whitespace().map(OsString::from), Arc::clone(&stop));
        assert_eq!(answer, Answer { exit_code: 130, ..Answer::default() });
    }
}
