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
    assert_eq!(html.matches("<svg").count(), 5, "{html}");
    let headings = [
        "Step time by part",
        "Memory",
        "Pipeline",
        "One block",
        "Roofline",
        "Where the time goes",
        "Uncertainty",
        "Reproduce",
    ];
    let places = headings.map(|heading| html.find(&format!("<h2>{heading}</h2>")));
    assert!(places.is_sorted() && places[0].is_some(), "{places:?}");
    let summary = format!("<p>A step takes {}, with 90 % probability", step_time(&answer));
    assert!(html.find(&summary).is_some_and(|at| Some(at) < places[0]), "{html}");
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

/// The text of an SVG picture, one line per text.
fn picture_text(request: &str, kind: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("picture.svg");
    stdout(&format!("{request} --plot {} --plot-kind {kind}", file.display()));
    let svg = fs::read_to_string(&file).unwrap();
    let texts = svg.split("</text>").filter_map(|text| text.rsplit_once(">\n"));
    texts.map(|(_, text)| text.trim_end()).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_block_graph_has_every_op_and_the_collectives_of_the_report() {
    let request = "plan --model cola-tiny --hardware a100-80gb --devices 2 --tensor 2 --weights sharded \
        --global-batch 4 --sequence-length 128";
    let (report, picture) = (stdout(request), picture_text(request, "block"));
    let rows = report.lines().skip_while(|line| !line.starts_with("Blocks")).skip(5);
    let mut collectives = 0;
    for row in rows.take_while(|line| !line.trim_start().starts_with('*')) {
        let words: Vec<&str> = row.split_whitespace().collect();
        assert!(picture.contains(&format!("{}: {}\n", words[0], words[1])), "{row}\n{picture}");
        for (short, long) in [("AR", "all-reduce"), ("RS", "reduce-scatter"), ("AG", "all-gather")]
        {
            for (index, _) in words.iter().enumerate().filter(|(_, word)| **word == short) {
                let bytes = format!("{long} {} {},", words[index + 1], words[index + 2]);
                assert!(picture.contains(&bytes), "{row}\n{picture}");
                collectives += 1;
            }
        }
    }
    assert!(collectives > 4 && picture.contains("partial sum"), "{report}\n{picture}");
    assert_eq!(picture.matches("reduce").count() + picture.matches("gather").count(), collectives);
}

#[test]
fn the_roofline_has_every_gemm_below_its_roof() {
    let picture = picture_text(&format!("plan {SMALL}"), "roofline");
    let shares: Vec<f64> = picture
        .lines()
        .filter_map(|line| line.strip_suffix(" % of roof")?.rsplit_once(' ')?.1.parse().ok())
        .collect();
    assert!(shares.len() >= 6 && shares.iter().all(|share| *share <= 100.0), "{picture}");
    assert!(picture.contains("peak 312 TFLOP/s") && picture.contains("memory 2.04 TB/s"));
}

#[test]
fn a_picture_that_an_answer_does_not_have_is_an_error_with_the_others_as_a_hint() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("picture.svg");
    let line = format!("plan {SMALL} --plot {}", file.display());
    let message = failure(&format!("{line} --plot-kind heat-map"), 2);
    assert!(
        message.contains("draws no picture `heat-map`") && message.contains("block"),
        "{message}"
    );
    let message = failure(
        &format!("{line} --pipeline 1 --plot-kind pipeline").replacen("--pipeline 2 ", "", 1),
        2,
    );
    assert!(
        message.contains("has no picture `pipeline`") && message.contains("step-time"),
        "{message}"
    );
    assert!(!file.exists());
    assert!(failure("plan --plot-kind block", 2).contains("--plot <FILE>"));
}
