//! Pictures and pages of answers: `--plot` and `--report`.

use std::fs;

use super::{failure, narrows, stdout};

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
        "Step time",
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
    let text = failure(&format!("plan {SMALL} --plot out/p.pdf"), 2);
    assert!(text.contains("neither .svg nor .png"), "{text}");
    assert!(text.contains("hint: out/p.svg or out/p.png"), "{text}");
}

#[test]
fn the_page_of_a_sweep_has_its_rows_and_its_chart() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("whatif.html");
    let sweep = "whatif --sweep global_batch=8,16,32";
    stdout(&format!("{sweep} {SMALL} --report {}", page.display()));
    let html = fs::read_to_string(&page).unwrap();
    // Step times, and memory against step time.
    assert_eq!((html.matches("<svg").count(), html.matches("<tr><td").count()), (2, 3), "{html}");
    // Two fields make a heat map and a chart of crossovers too.
    let sweep = format!("{sweep} --sweep zero=off,1 --data-parallel 2");
    stdout(&format!("{sweep} {SMALL} --report {}", page.display()));
    let html = fs::read_to_string(&page).unwrap();
    assert_eq!((html.matches("<svg").count(), html.matches("<tr><td").count()), (4, 6), "{html}");
    assert!(html.contains("P2 D2 Z1"), "{html}");
    // Fields without numbers have rows, but no chart over numbers.
    stdout(&format!("whatif --sweep zero=off,1 {SMALL} --report {}", page.display()));
    let html = fs::read_to_string(&page).unwrap();
    assert_eq!((html.matches("<svg").count(), html.matches("<tr><td").count()), (1, 2), "{html}");
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

/// Passes through later model chunks of a stage are lighter, and the legend says so.
#[test]
fn the_pipeline_shows_model_chunks() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pipeline.svg");
    let request = format!("plan {SMALL} --tensor 1 --micro-batch 1");
    for (schedule, light_passes) in [("interleaved", 4 * 2), ("1f1b", 0)] {
        let flags = format!("--schedule {schedule} --plot-kind pipeline --plot {}", file.display());
        stdout(&format!("{request} {flags}"));
        let svg = fs::read_to_string(&file).unwrap();
        let passes = |colour: &str| svg.matches(&format!("fill=\"#{colour}\"")).count();
        // Forward and backward passes through the second chunk, and their colours in the legend.
        for colour in ["A6CEE4", "F0C7A6"] {
            let in_legend = usize::from(light_passes > 0);
            assert_eq!(passes(colour), light_passes + in_legend, "{schedule} {colour}");
        }
        let legend = "2 model chunks per stage: the later, the lighter";
        assert_eq!(svg.contains(legend), light_passes > 0, "{schedule}");
    }
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
    // The search alone can tell that its plan has one stage. The other outputs are written.
    let written = ["plan.json", "page.html", "trace.json"].map(|name| folder.path().join(name));
    let [plan, page, trace] = [0, 1, 2].map(|index| written[index].display());
    let request = format!(
        "plan --model cola-tiny --devices 2 --plot {} --plot-kind pipeline",
        file.display()
    );
    let outputs = format!("--output {plan} --report {page} --trace {trace}");
    let output = narrows(&format!("{request} {outputs}")).assert().code(1).get_output().clone();
    let [answer, message] =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(answer.contains("step time"), "{answer}");
    for part in [
        "--plot-kind: this answer has no picture `pipeline`",
        "because the plan has one pipeline stage",
        "hint: step-time, memory, block, roofline",
    ] {
        assert!(message.contains(part), "{part} in {message}");
    }
    assert!(!file.exists() && written.iter().all(|file| file.exists()), "{message}");
    // Requests and plan files of one stage are refused before they are planned.
    let one_device = request.replacen("--devices 2", "--devices 1", 1);
    let priced = request.replacen("plan --model cola-tiny --devices 2", &format!("cost {plan}"), 1);
    for line in [format!("{request} --pipeline 1"), one_device, priced] {
        let message = failure(&line, 2);
        let part = "--plot-kind: a plan with one pipeline stage has no picture `pipeline`";
        assert!(message.contains(part) && message.contains("hint: step-time"), "{message}");
    }
    assert!(failure("plan --plot-kind block", 2).contains("--plot <FILE>"));
}

const SWEEP: &str =
    "whatif --model cola-60m --hardware a100-80gb --sequence-length 512 --micro-batch 1";

#[test]
fn a_sweep_of_devices_and_batches_shows_strong_and_weak_scaling() {
    let request = format!("{SWEEP} --sweep devices=2..8*2 --sweep global_batch=16..64*2");
    let points = super::json(&request)["points"].as_array().unwrap().clone();
    let rate = |devices: u64, batch: u64| {
        let is = |point: &&serde_json::Value| {
            point["settings"] == serde_json::json!({ "devices": devices, "global_batch": batch })
        };
        points.iter().find(is).unwrap()["prediction"]["tokens_per_s"].as_f64().unwrap()
    };
    let picture = picture_text(&request, "scaling");
    for (kind, first, last) in [("strong", (2, 64), (8, 64)), ("weak", (2, 16), (8, 64))] {
        let efficiency = 100.0 * rate(last.0, last.1) / rate(first.0, first.1) / 4.0;
        let text = format!("{kind}: {efficiency:.1} % at 8");
        assert!(picture.contains(&text), "{text} in {picture}");
    }
    let strong = format!("{SWEEP} --global-batch 64 --sweep devices=2..8*2");
    let strong = picture_text(&strong, "scaling");
    assert!(strong.contains("efficiency in %") && !strong.contains("weak"), "{strong}");
}

#[test]
fn the_front_names_the_plans_that_no_other_beats() {
    let request =
        format!("{SWEEP} --devices 4 --global-batch 16 --sweep zero=off,1 --sweep tensor=1,2,4");
    let points = super::json(&request)["points"].as_array().unwrap().clone();
    let measure = |point: &serde_json::Value| {
        let prediction = &point["prediction"];
        let peaks = prediction["peak_memory_bytes"].as_array().unwrap().iter();
        (prediction["step_time_s"].as_f64().unwrap(), peaks.map(|b| b.as_u64().unwrap()).max())
    };
    let picture = picture_text(&request, "memory");
    let mut named = 0;
    for point in &points {
        let (time, memory) = measure(point);
        let beats = |other: &serde_json::Value| {
            let (other_time, other_memory) = measure(other);
            other_time <= time && other_memory <= memory && measure(other) != measure(point)
        };
        let settings = &point["settings"];
        let zero =
            settings["zero"].as_str().map_or_else(|| settings["zero"].to_string(), str::to_owned);
        let name = format!("zero {zero}, tensor {}", settings["tensor"]);
        named += usize::from(picture.contains(&name));
        assert!(!picture.contains(&name) || !points.iter().any(beats), "{name} in {picture}");
    }
    assert!(named > 0 && named < points.len(), "{picture}");
}

#[test]
fn the_crossover_of_two_lines_is_marked_between_the_points_around_it() {
    let request = "whatif --model cola-7b --hardware a100-80gb --devices 16 --global-batch 64 --micro-batch 4 \
        --sweep hardware.links.inter_node.bandwidth_gbps=1,32 --sweep tensor=1,4";
    let points = super::json(request)["points"].as_array().unwrap().clone();
    let times: Vec<f64> =
        points.iter().map(|p| p["prediction"]["step_time_s"].as_f64().unwrap()).collect();
    assert!(times[0] > times[1] && times[2] < times[3], "the fastest changes: {times:?}");
    let picture = picture_text(request, "crossover");
    let name = "tensor 1 is faster from a value between 1 and 32 GB/s\n";
    assert!(picture.contains(name), "{picture}");
    assert!(picture.contains("inter node bandwidth in GB/s"), "{picture}");
    // A bisected break-even point is the one of the text.
    let question = "whatif --model cola-350m --devices 8 --between tensor=4+btp,data-parallel \
        --break-even hardware.links.inter_node.bandwidth_gbps=2..100";
    let picture = picture_text(question, "crossover");
    let (_, at) = picture.split_once("alternative data-parallel is faster from ").expect(&picture);
    let at = at.lines().next().unwrap();
    let text = super::stdout(question).replace("\n  ", " ");
    assert!(text.contains(&format!("data-parallel below {at} of ")), "{at} in {text}");
}

#[test]
fn a_picture_that_does_not_suit_a_sweep_is_refused_before_it_is_planned() {
    for (sweep, kind, part) in [
        ("--sweep devices=2,4", "heat-map", "a heat map needs two fields"),
        ("--sweep rank=64,128", "scaling", "scaling needs a sweep of `devices`"),
        (
            "--sweep devices=2,4 --sweep rank=64,128",
            "scaling",
            "scaling needs a sweep of `devices`",
        ),
        ("--sweep devices=2,4", "crossover", "a crossover needs two or more lines"),
        ("--sweep devices=2", "memory", "a Pareto front needs two or more points"),
        ("--sweep devices=2,4", "block", "draws no picture `block`"),
        ("--sweep zero=off,1", "lines", "no swept field has two or more numbers"),
    ] {
        let message = failure(&format!("{SWEEP} {sweep} --plot picture.svg --plot-kind {kind}"), 2);
        assert!(message.contains(part) && message.contains("hint: "), "{sweep} {kind}: {message}");
    }
}

#[test]
fn measurements_are_drawn_beside_their_predictions() {
    let figures = super::json("validate")["figures"].as_array().unwrap().clone();
    for (kind, table, count) in [
        ("step-time", "steps", 8),
        ("gemm-efficiency", "utilisation", 24),
        ("communication", "all-reduces", 12),
    ] {
        let picture = picture_text("validate", kind);
        let of_table = figures.iter().filter(|figure| figure["table"] == table);
        let shown = of_table.filter(|figure| {
            let error = figure["error_percent"].as_f64().unwrap();
            picture.contains(figure["name"].as_str().unwrap())
                && picture.contains(&format!("(time {error:+.1} %)"))
        });
        assert_eq!(shown.count(), count, "{kind}: {picture}");
    }
}

/// Standard output has the answer, so that a page or a picture beside it would be lost in it.
#[test]
fn pages_and_pictures_need_files() {
    for flag in ["--report", "--plot"] {
        let message = failure(&format!("plan {SMALL} {flag} -"), 2);
        assert!(message.contains(flag) && message.contains("standard output"), "{message}");
        assert!(message.contains("a file such as"), "{message}");
    }
}

/// Of two outputs to one file, the later would replace the earlier.
#[test]
fn two_outputs_to_one_file_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("a.svg").display().to_string();
    // The same file under another name.
    let other = folder.path().join(".").join("a.svg").display().to_string();
    let small = "--model cola-tiny --devices 1 --sequence-length 64";
    for (command, [flag, first]) in [
        (
            format!("whatif {small} --sweep rank=8,16 --csv {file} --report {other}"),
            ["--csv", "--report"],
        ),
        (
            format!("whatif {small} --sweep rank=8,16 --plot {file} --report {other}"),
            ["--report", "--plot"],
        ),
        (format!("plan {small} --output {file} --trace {other}"), ["--trace", "--output"]),
        (format!("plan {small} --plot {file} --trace {other}"), ["--trace", "--plot"]),
        (format!("cost {small} --report {file} --trace {other}"), ["--trace", "--report"]),
        (format!("explain {small} --report {file} --output {other}"), ["--output", "--report"]),
        (format!("sensitivity {small} --csv {file} --plot {other}"), ["--csv", "--plot"]),
    ] {
        let message = crate::failure(&command, 2);
        let expected = format!("is the file of {first} too\n  hint: another file name");
        assert!(message.contains(flag) && message.contains(&expected), "{command}: {message}");
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0, "{command}");
    }
    crate::stdout(&format!("plan {small} --report /dev/null --trace /dev/null"));
}
