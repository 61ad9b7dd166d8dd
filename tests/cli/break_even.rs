//! `narrows whatif --break-even`.

use serde_json::Value;

use super::whatif::SMALL;
use super::{failure, json, narrows, stdout};

/// On both sides of the break-even point, plans of separate requests are in the order that the answer states.
#[test]
fn break_even_points_are_enclosed() {
    let request = "--model cola-350m --devices 8";
    let field = "hardware.links.inter_node.bandwidth_gbps";
    let question = format!(
        "whatif {request} --break-even {field}=2..100 --between tensor=4+btp,data-parallel"
    );
    let answer = json(&question);
    let break_even = &answer["break_even"];
    let regions = break_even["regions"].as_array().expect("regions");
    assert_eq!(regions.len(), 2, "{break_even}");
    let [low, high] = [0, 1].map(|end| break_even["break_even"][0][end].as_f64().expect("a value"));
    assert!(low < high && high / low <= 1.011, "{low} {high}");
    let times = ["--tensor 4 --strategy btp", "--tensor 1 --pipeline 1"].map(|flags| {
        let sweep = json(&format!("whatif {request} {flags} --sweep {field}={low},{high}"));
        let time = |point: usize| &sweep["points"][point]["prediction"]["step_time_s"];
        [0, 1].map(|point| time(point).as_f64().expect("a time"))
    });
    let [first, second] = times;
    assert_eq!(regions[0]["faster"], "first_faster");
    assert!(first[0] < second[0] && first[1] > second[1], "{times:?}");
    let schema: Value = serde_json::from_str(&stdout("schema whatif")).expect("JSON");
    jsonschema::validate(&schema, &answer).expect("an answer that follows its schema");

    let text = stdout(&question.replace("2..100", "2,100"));
    let verdict: Vec<&str> = text.lines().skip(1).take(4).map(str::trim).collect();
    assert!(
        verdict.join(" ").contains("tensor=4+btp is faster than data-parallel below"),
        "{text}"
    );
    assert!(text.contains(" GB/s"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(!text.contains("Step times are compared"), "{text}");
    let text = stdout(&question.replace("2..100", "50,100"));
    assert!(text.contains("There is no break-even point"), "{text}");
    assert_eq!(break_even["compared"], "step_time_s");
    let text = stdout(&format!("{} --objective memory", question.replace("2..100", "2,100")));
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words.contains("Step times are compared, of plans for the objective memory."),
        "{text}"
    );
}

/// A value without a plan says why, as a point of a sweep does.
#[test]
fn break_even_values_without_a_plan_say_why() {
    let values = "--break-even hardware.links.inter_node.bandwidth_gbps=2,100";
    let text = stdout(&format!("{SMALL} {values} --between tensor=3,data-parallel"));
    assert_eq!(text.matches("  no plan (1)").count(), 2, "{text}");
    assert!(text.contains("(1) --devices: 2 devices are not a multiple of 3"), "{text}");
    let command = format!("{SMALL} --memory-limit 1MiB {values} --between tensor=2,data-parallel");
    let output = narrows(&command).assert().code(1);
    let text = String::from_utf8_lossy(&output.get_output().stdout).replace("\n  ", " ");
    assert!(text.contains("(1) No plan exists because "), "{text}");
    assert!(text.contains("(2) No plan exists because "), "{text}");
}

/// Whole numbers of the profile have ranges, of which only whole numbers are planned.
#[test]
fn whole_numbers_have_ranges() {
    for (range, count) in [("compute_units=96.4..99.4", 4), ("memory_bytes=6e10..9e10", 13)] {
        let question = format!("--break-even hardware.device.{range} --between tensor=2,zero=off");
        let answer = json(&format!("{SMALL} {question}"));
        let points = answer["points"].as_array().unwrap();
        assert_eq!(points.len(), 2 * count, "{range}: {points:?}");
        for point in points {
            let settings = point["settings"].as_object().unwrap();
            assert!(settings.values().any(|value| value.is_u64()), "{settings:?}");
        }
    }
}

#[test]
fn bad_break_even_questions_are_refused() {
    for (arguments, part) in [
        ("--break-even devices=2..16 --between btp,data-parallel", "devices=2..16*2"),
        ("--break-even devices=2..16*2 --between btp", "no two alternatives"),
        ("--break-even devices=2..16*2 --between btp,btp", "no two alternatives"),
        ("--break-even devices=2..16*2 --between bpt,auto", "`bpt` is not an alternative"),
        ("--break-even devices=2..16*2 --between tensor=2+tensor=4,auto", "sets tensor twice"),
        ("--break-even devices=4 --between btp,auto", "no two numbers"),
        ("--break-even tensor=2,4 --between btp,data-parallel", "`data-parallel` sets tensor"),
        ("--break-even rank=64,128 --between auto,btp+rank=32", "alternatives without rank"),
        (
            "--break-even hardware.links.intra_node.bandwidth_gbps=5..50 \
             --between auto,hardware.links.intra_node.bandwidth_bytes_per_s=1e10",
            "which --break-even varies",
        ),
        (
            "--break-even rank=64,128 --between auto,model.blocks.default.all.rank=32",
            "sets model.blocks.default.all.rank, which --break-even varies",
        ),
        ("--break-even devcies=4,8 --between btp,auto", "did you mean devices"),
        (
            "--break-even hardware.device.compute_units=96.6..97.4 --between btp,auto",
            "--break-even: `96.6..97.4` has no two whole numbers, and `hardware.device.compute_units` is one",
        ),
        ("--break-even devices=4,8", "--between"),
        (
            "--break-even hardware.links.inter_node.bandwidth_gbps=100..2 --between btp,auto",
            "--break-even: 100 is above 2\n  hint: a range such as 5..400",
        ),
        ("--break-even devices=4,8 --between btp,auto --sweep rank=1,2", "cannot be used with"),
    ] {
        let message = failure(&format!("{SMALL} {arguments}"), 2);
        assert!(message.contains(part), "{arguments}: {message}");
    }
}
