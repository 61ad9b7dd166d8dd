//! Pictures of metrics files.

use std::fs;

use super::run::SMALL;
use super::{failure, narrows, stdout};

#[test]
fn runs_are_drawn_in_one_picture() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (tokens, text) = (at("eval.tokens"), at("eval.txt"));
    fs::write(&text, "Call me Ishmael. ".repeat(9)).unwrap();
    stdout(&format!("data {text} --output {tokens}"));
    for (name, flags) in [("a.jsonl", format!("--eval-data {tokens}")), ("b.jsonl", String::new())]
    {
        stdout(&format!("{SMALL} --steps 3 --metrics {} {flags}", at(name)));
    }
    // A line that is still being written is left out.
    let mut lines = fs::read_to_string(at("b.jsonl")).unwrap();
    lines.push_str("{\"step\":4,\"lo");
    fs::write(at("b.jsonl"), lines).unwrap();
    let files = format!("{} {}", at("a.jsonl"), at("b.jsonl"));
    stdout(&format!("plot {files} --output {}", at("runs.svg")));
    let svg = fs::read_to_string(at("runs.svg")).unwrap();
    for part in ["loss (nats)", "gradient norm", "learning rate", "step time (s)", ">\nb.jsonl"] {
        assert!(svg.contains(part), "{part}");
    }
    assert!(svg.contains("<circle"), "evaluations are discs");
    // The same lines from a pipe, as `run --metrics -` writes them.
    let piped = narrows(&format!("plot {} - --output {}", at("a.jsonl"), at("piped.svg")))
        .write_stdin(fs::read(at("b.jsonl")).unwrap())
        .assert();
    piped.success();
    let piped = fs::read_to_string(at("piped.svg")).unwrap();
    assert_eq!(piped.replace("&lt;stdin&gt;", "b.jsonl"), svg);
    stdout(&format!("plot {files} --output {}", at("runs.png")));
    assert!(fs::read(at("runs.png")).unwrap().starts_with(b"\x89PNG"));
}

/// Values near the ends of what a number can be have a picture of the usual size.
#[test]
fn extreme_values_are_drawn_with_few_ticks() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    for [first, second] in
        [["1e300"; 2], ["1e308"; 2], ["5e-324"; 2], ["5", "1e300"], ["-1e308", "1e308"]]
    {
        let line =
            |step, value| format!("{{\"step\":{step},\"loss\":{value},\"step_time_s\":{value}}}\n");
        fs::write(at("m.jsonl"), line(1, first) + &line(2, second)).unwrap();
        let mut plot = narrows(&format!("plot {} --output {}", at("m.jsonl"), at("m.svg")));
        plot.timeout(std::time::Duration::from_secs(20)).assert().success();
        let svg = fs::read_to_string(at("m.svg")).unwrap();
        let labels = svg.matches("<text").count();
        assert!((8..60).contains(&labels), "{labels} labels for {first} and {second}");
    }
}

/// The legend has as many folders as tell the files apart.
#[test]
fn files_of_one_name_are_told_apart_by_their_folders() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    for name in ["one/run", "two/run", "other"] {
        fs::create_dir_all(at(name)).unwrap();
    }
    let files = ["one/run/m.jsonl", "two/run/m.jsonl", "other/n.jsonl"];
    stdout(&format!("{SMALL} --steps 2 --metrics {}", at(files[0])));
    for file in &files[1..] {
        fs::copy(at(files[0]), at(file)).unwrap();
    }
    let names = files.map(at).join(" ");
    stdout(&format!("plot {names} --output {}", at("runs.svg")));
    let svg = fs::read_to_string(at("runs.svg")).unwrap();
    for name in ["one/run/m.jsonl", "two/run/m.jsonl", "n.jsonl"] {
        assert!(svg.contains(&format!(">\n{name}\n<")), "{name}: {svg}");
    }
}

#[test]
fn other_files_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    fs::write(at("empty.jsonl"), "").unwrap();
    fs::write(at("text.jsonl"), "step 1\n").unwrap();
    fs::write(at("run.svg"), "").unwrap();
    for (arguments, part) in [
        (format!("{} --output {}", at("no.jsonl"), at("a.svg")), "no.jsonl: cannot be read"),
        (format!("{} --output {}", at("empty.jsonl"), at("a.svg")), "empty.jsonl: has no steps"),
        (
            format!("{} --output {}", at("text.jsonl"), at("a.svg")),
            "line 1: is not a line of metrics",
        ),
        (
            format!("{} --output {}", at("text.jsonl"), at("a.svg")),
            "hint: the file of `narrows run --metrics FILE`\n",
        ),
        (format!("{} --output {}", at("run.svg"), at("run.svg")), "is an input too"),
        (format!("{} --output {}", at("empty.jsonl"), at("a.gif")), "--output: `"),
        (format!("{} --output {}", at("empty.jsonl"), at("a.gif")), "neither .svg nor .png"),
        (format!("{} --output -", at("empty.jsonl")), "--output: a picture does not go to"),
        (format!("- - --output {}", at("a.svg")), "two inputs are `-`"),
        (format!("- --output {}", at("a.svg")), "<stdin>: has no steps"),
        (format!("{} --output {}", "x ".repeat(9), at("a.svg")), "9 runs are too many"),
    ] {
        let message = failure(&format!("plot {arguments}"), 2);
        assert!(message.contains(part), "{arguments}: {message}");
    }
}
