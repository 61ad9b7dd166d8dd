//! `completions` and `man`: every command and every flag is in them.

use std::fs;

use super::{failure, stdout};

/// Commands in the help.
fn commands() -> Vec<String> {
    let help = stdout("help");
    let list = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let lines = list.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = lines.filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

#[test]
fn completions_name_every_command_and_its_flags() {
    let commands = commands();
    assert!(commands.len() > 20, "{commands:?}");
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = stdout(&format!("completions {shell}"));
        for word in commands.iter().map(String::as_str).chain(["keep-best", "top-p"]) {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    failure("completions tcsh", 2);
}

#[test]
fn there_is_a_manual_page_for_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("share/man1");
    stdout(&format!("man {}", pages.display()));
    assert!(fs::read_to_string(pages.join("narrows.1")).unwrap().contains("narrows\\-plan(1)"));
    for command in commands() {
        let page = fs::read_to_string(pages.join(format!("narrows-{command}.1"))).unwrap();
        assert!(page.starts_with(".ie") || page.contains(".TH"), "{command}: {page}");
    }
    let message = failure("man README.md", 2);
    assert!(message.contains("README.md: cannot be written: it is a file"), "{message}");
    let message = failure("man -", 2);
    assert!(message.contains("DIR: a folder cannot go to standard output"), "{message}");
}
