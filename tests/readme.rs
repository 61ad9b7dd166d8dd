//! Every command in README.md, in the gallery, in tests/errors.md and in tests/export.md runs and prints the output shown there, or draws
//! the picture.
//!
//! A `sh` block contains commands; a `console` block contains commands after `$ ` and their output. In an expected line
//! `…` matches any text; as the first line it matches all lines before the shown ones, as the last line all lines after
//! them. The comment `# exits with 1` states the exit code of a command. After a deliberate change,
//! `NARROWS_BLESS=1 cargo test --test readme -- --include-ignored` writes the new output into the documents.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs, thread};

/// Stands for any text.
const ANY: &str = "…";

/// A command and its shown output; `None` without output.
#[derive(Debug)]
struct Example {
    line: String,
    output: Option<Vec<String>>,
    /// The lines of the document that hold the output.
    at: std::ops::Range<usize>,
}

/// Whether expected outputs are to be replaced.
fn is_blessing() -> bool {
    env::var_os("NARROWS_BLESS").is_some()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn commands_of_the_readme_print_the_shown_output() {
    check_document("README.md", folder_with_inputs().path());
}

#[test]
fn error_messages_are_the_recorded_ones() {
    check_document("tests/errors.md", folder_with_inputs().path());
}

#[test]
fn exported_plans_are_the_recorded_ones() {
    check_document("tests/export.md", folder_with_inputs().path());
}

/// A temporary folder with the files that commands of documents read.
fn folder_with_inputs() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for inputs in ["models", "data"] {
        copy_files(&root().join(inputs), &folder.path().join(inputs));
    }
    folder
}

/// The commands of the gallery draw the pictures that it shows.
#[test]
#[ignore = "second level: draws the pictures of the gallery"]
fn commands_of_the_gallery_draw_its_pictures() {
    let folder = tempfile::tempdir().expect("a folder");
    check_document("docs/gallery/README.md", folder.path());
    let gallery = root().join("docs/gallery");
    let document = fs::read_to_string(gallery.join("README.md")).expect("the gallery");
    let shown: Vec<&str> = document
        .lines()
        .filter_map(|line| line.strip_prefix("![")?.split_once("](")?.1.strip_suffix(')'))
        .collect();
    assert!(shown.len() >= 10, "the gallery has lost its pictures");
    let mut different = vec![];
    for name in shown {
        let drawn = fs::read_to_string(folder.path().join(name))
            .unwrap_or_else(|error| panic!("no command draws {name}: {error}"));
        if is_blessing() {
            fs::write(gallery.join(name), &drawn).expect("a picture");
        } else if fs::read_to_string(gallery.join(name)).ok().as_ref() != Some(&drawn) {
            different.push(name);
        }
    }
    assert!(different.is_empty(), "NARROWS_BLESS=1 draws these pictures anew: {different:?}");
}

/// Runs the commands of a document in a folder, and compares their output with the one that it shows.
fn check_document(name: &str, folder: &Path) {
    let path = root().join(name);
    let document = fs::read_to_string(&path).expect(name);
    let examples = examples(&document);
    assert!(examples.len() >= 5, "{name} has lost its examples");
    let mut updated: Vec<String> = document.lines().map(str::to_string).collect();
    let mut mismatches = vec![];
    let mut replacements = vec![];
    for (example, printed) in examples.iter().zip(run_all(&examples, folder)) {
        let Some(printed) = printed else { continue };
        let Some(expected) = &example.output else { continue };
        if !matches(expected, &printed) {
            mismatches.push(format!("$ {}\n{}", example.line, printed.join("\n")));
        }
        replacements.push((example.at.clone(), shown(expected, &printed)));
    }
    if is_blessing() {
        for (at, lines) in replacements.into_iter().rev() {
            updated.splice(at, lines);
        }
        fs::write(&path, updated.join("\n") + "\n").expect(name);
    } else {
        assert!(
            mismatches.is_empty(),
            "{name} shows other output; NARROWS_BLESS=1 writes the output of these commands:\n\n{}",
            mismatches.join("\n\n")
        );
    }
}

fn examples(document: &str) -> Vec<Example> {
    let mut examples: Vec<Example> = vec![];
    let mut block = "";
    for (number, line) in document.lines().enumerate() {
        if let Some(kind) = line.strip_prefix("```") {
            block = if block.is_empty() { if kind.is_empty() { "text" } else { kind } } else { "" };
        } else if block == "sh" && !line.trim().is_empty() && !line.starts_with('#') {
            examples.push(Example { line: line.into(), output: None, at: 0..0 });
        } else if block == "console" {
            if let Some(command) = line.strip_prefix("$ ") {
                let at = number + 1..number + 1;
                examples.push(Example { line: command.into(), output: Some(vec![]), at });
            } else if let Some(Example { output: Some(output), at, .. }) = examples.last_mut() {
                output.push(line.into());
                at.end = number + 1;
            }
        }
    }
    examples
}

/// The arguments for the program under test; `None` for commands of other programs.
fn program(example: &Example) -> Option<Vec<&str>> {
    let (line, _) = split_comment(&example.line);
    let words = words(line);
    match &words[..] {
        ["cargo", "run", "--release", "--", rest @ ..] | ["narrows", rest @ ..] => {
            Some(rest.to_vec())
        }
        ["cargo", "test" | "build" | "install", ..] | [".ci/run"] => None,
        ["cargo", "run", "--release", "--example", name, ..] => {
            let file = format!("{}/examples/{name}.rs", env!("CARGO_MANIFEST_DIR"));
            assert!(Path::new(&file).exists(), "there is no example `{name}`");
            None
        }
        _ => panic!("an unknown command: {line}"),
    }
}

/// The words of a command; text in double quotes is one word.
fn words(line: &str) -> Vec<&str> {
    let mut words = vec![];
    for (index, part) in line.split('"').enumerate() {
        if index % 2 == 1 {
            words.push(part);
        } else {
            let shell = ['|', '\'', '>', '<', '$'];
            assert!(!part.contains(shell), "too much shell for this test: {line}");
            words.extend(part.split_whitespace());
        }
    }
    words
}

fn split_comment(line: &str) -> (&str, &str) {
    line.split_once(" #").map_or((line, ""), |(command, comment)| (command, comment.trim()))
}

/// Outputs of the commands, in their order. A command may read files of those before it, but for questions that read
/// none: these run beside the others.
fn run_all(examples: &[Example], folder: &Path) -> Vec<Option<Vec<String>>> {
    let is_question = |example: &Example| {
        program(example).is_some_and(|words| ["whatif", "sensitivity"].contains(&words[0]))
    };
    let (questions, others): (Vec<usize>, Vec<usize>) =
        (0..examples.len()).partition(|index| is_question(&examples[*index]));
    let outputs: Vec<OnceLock<Option<Vec<String>>>> =
        examples.iter().map(|_| OnceLock::new()).collect();
    let run_at = |index: usize| {
        outputs[index].get_or_init(|| run(&examples[index], folder));
    };
    thread::scope(|scope| {
        scope.spawn(|| others.iter().for_each(|index| run_at(*index)));
        questions.iter().for_each(|index| run_at(*index));
    });
    outputs.into_iter().map(|output| output.into_inner().flatten()).collect()
}

/// The output of a command, standard output first; `None` for commands of other programs.
fn run(example: &Example, folder: &Path) -> Option<Vec<String>> {
    let arguments = program(example)?;
    let output = Command::new(env!("CARGO_BIN_EXE_narrows"))
        .args(arguments)
        .current_dir(folder)
        .env("NO_COLOR", "1")
        .env("XDG_CACHE_HOME", folder)
        .output()
        .expect("the program runs");
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8(printed).expect("UTF-8");
    let (_, comment) = split_comment(&example.line);
    let expected =
        comment.strip_prefix("exits with ").map_or(0, |code| code.parse().expect("a code"));
    assert_eq!(output.status.code(), Some(expected), "$ {}\n{printed}", example.line);
    // The machine may be busy while it is measured.
    let lines = printed.lines().filter(|line| !line.contains("was measured on a busy machine"));
    Some(lines.map(|line| line.trim_end().to_string()).collect())
}

/// The compared lines of the expected and of the printed output.
fn parts<'a>(expected: &'a [String], printed: &'a [String]) -> (&'a [String], &'a [String]) {
    let any = |line: Option<&String>| line.is_some_and(|line| line == ANY);
    if any(expected.last()) {
        let shown = &expected[..expected.len() - 1];
        (shown, &printed[..shown.len().min(printed.len())])
    } else if any(expected.first()) {
        let shown = &expected[1..];
        (shown, &printed[printed.len().saturating_sub(shown.len())..])
    } else {
        (expected, printed)
    }
}

fn matches(expected: &[String], printed: &[String]) -> bool {
    let (expected, printed) = parts(expected, printed);
    lines_match(expected, printed)
}

fn lines_match(expected: &[String], printed: &[String]) -> bool {
    expected.len() == printed.len()
        && expected.iter().zip(printed).all(|(expected, printed)| line_matches(expected, printed))
}

fn line_matches(expected: &str, printed: &str) -> bool {
    let mut parts = expected.split(ANY);
    let first = parts.next().unwrap_or("");
    let Some(mut rest) = printed.strip_prefix(first) else { return false };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    for part in middle {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// The new output lines for README.md: as many as before, unchanged where they match, and without wall times.
fn shown(expected: &[String], printed: &[String]) -> Vec<String> {
    let cut = |line: Option<&String>| line.filter(|line| *line == ANY).cloned();
    let (shown, compared) = parts(expected, printed);
    let before = cut(expected.first()).filter(|_| expected.len() > 1);
    let after = cut(expected.last());
    let lines = compared.iter().enumerate().map(|(index, line)| match shown.get(index) {
        Some(shown) if line_matches(shown, line) => shown.clone(),
        _ => without_wall_time(line),
    });
    before.into_iter().chain(lines).chain(after).collect()
}

fn without_wall_time(line: &str) -> String {
    match line.rsplit_once(" pruned, in ") {
        Some((before, _)) => format!("{before} pruned, in {ANY}"),
        None => line.into(),
    }
}

fn copy_files(from: &Path, to: &Path) {
    fs::create_dir(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder of inputs").flatten() {
        if entry.path().is_dir() {
            continue;
        }
        fs::copy(entry.path(), to.join(entry.file_name())).expect("an input");
    }
}

#[test]
fn an_ellipsis_matches_any_text() {
    assert!(line_matches("in … ms", "in 3.2 ms") && !line_matches("in … ms", "in 3.2 s"));
    assert!(line_matches("same", "same") && !line_matches("same", "same and more"));
    let lines = |text: &str| text.lines().map(str::to_string).collect::<Vec<_>>();
    assert!(matches(&lines("a\n…"), &lines("a\nb\nc")) && !matches(&lines("a\n…"), &lines("b")));
    assert!(matches(&lines("…\nc"), &lines("a\nb\nc")) && !matches(&lines("…\nb"), &lines("a\nc")));
}
