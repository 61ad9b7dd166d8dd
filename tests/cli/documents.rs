//! Pictures and pages of answers: `--plot` and `--report`.

use std::fs;

use super::{failure, stdout};

const SMALL: &str = "--model cola-tiny --hardware a100-80gb --devices 4 --pipeline 2 \
    --global-batch 8 --sequence-length 128";

/// The step time in a text report.
fn step_time(text: &str) -> &str {
    let line = text.lines().find(|line| line.trim_start().starts_with("step time")).unwrap();
    line.trim_start().trim_start_matches("step time").trim_start().split(" (").next().unwrap()
}

#[test]
fn a_page_shows_the_answer_with_pictures_and_needs_no_network() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("plan.html");
    let answer = stdout(&format!("plan {SMALL} --report {}", page.display()));
    let html = fs::read_to_string(&page).unwrap();
    assert!(html.contains(&format!("<dd>{} (", step_time(&answer))), "{answer}");
    assert_eq!(html.matches("<svg").count(), 3, "step time, memory and pipeline");
    assert!(html.contains(&format!("narrows plan {SMALL} --report")), "the command to reproduce");
    let without_namespace = html.replace("http://www.w3.org/2000/svg", "");
    for reference in ["http:", "https:", "src=", "href=", "url("] {
        assert!(!without_namespace.contains(reference), "{reference}");
    }
}

#[test]
fn pictures_are_svg_or_png_by_the_ending() {
    let folder = tempfile::tempdir().unwrap();
    for (command, name, start) in [
        ("plan", "plan.png", &b"\x89PNG\r\n\x1a\n"[..]),
        ("explain", "explain.svg", b"<svg "),
        ("cost", "cost.PNG", b"\x89PNG\r\n\x1a\n"),
        ("whatif --sweep global_batch=8,16", "whatif.png", b"\x89PNG\r\n\x1a\n"),
    ] {
        let file = folder.path().join(name);
        stdout(&format!("{command} {SMALL} --plot {}", file.display()));
        assert!(fs::read(&file).unwrap().starts_with(start), "{name}");
    }
    let text = failure(&format!("plan {SMALL} --plot plan.pdf"), 2);
    assert!(text.contains("neither .svg nor .png") && text.contains("plan.png"), "{text}");
}

#[test]
fn the_page_of_a_sweep_has_its_rows_and_its_chart() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("whatif.html");
    let sweep = "whatif --sweep global_batch=8,16,32";
    stdout(&format!("{sweep} {SMALL} --report {}", page.display()));
    let html = fs::read_to_string(&page).unwrap();
    assert_eq!((html.matches("<svg").count(), html.matches("<tr><td").count()), (1, 3), "{html}");
    // Two fields make a heat map too.
    let sweep = format!("{sweep} --sweep zero=off,1 --data-parallel 2");
    stdout(&format!("{sweep} {SMALL} --report {}", page.display()));
    let html = fs::read_to_string(&page).unwrap();
    assert_eq!((html.matches("<svg").count(), html.matches("<tr><td").count()), (2, 6), "{html}");
    assert!(html.contains("P2 D2 Z1"), "{html}");
    // Fields without numbers have rows, but no chart.
    stdout(&format!("whatif --sweep zero=off,1 {SMALL} --report {}", page.display()));
    let html = fs::read_to_string(&page).unwrap();
    assert_eq!((html.matches("<svg").count(), html.matches("<tr><td").count()), (0, 2), "{html}");
}
