//! Text reports.

use super::{narrows, stdout};

const ARGUMENTS: &str = "plan --model cola-7b --devices 4 --global-batch 4 --tensor 4 \
    --micro-batch 4 --strategy btp";

#[test]
fn a_report_has_the_decisions_and_the_prediction() {
    let report = stdout(ARGUMENTS);
    for part in [
        "cola-7b on 4 devices of a100-80gb",
        "2.69 B parameters, 32 blocks of width 4096, rank 1024",
        "tensor 4 × pipeline 1 × data 1",
        "sharded on features between blocks",
        "step time",
        "tokens/s, ",
        " TFLOP/s a device, MFU ",
        "recompute     none",
        "GiB per device of 77.0 GiB",
        "Where the time goes",
        "Blocks 0–31 (`block`)",
        "Collective payload of a middle block, per microbatch",
        "224.0 MiB",
        "optimal: proven the fastest",
    ] {
        assert!(report.contains(part), "{part} in {report}");
    }
    let row = |op: &str| {
        let row = report.lines().find(|line| line.trim_start().starts_with(op));
        row.unwrap_or_else(|| panic!("{op} in {report}")).to_owned()
    };
    assert!(row("down.a ").contains(" row ") && row("down.a ").contains("AR 32.0 MiB"));
    assert!(row("down.b ").contains(" column "));
}

/// The memory of many stages takes no more room than that of one.
#[test]
fn the_memory_of_many_stages_is_a_range() {
    let plan = "plan --model cola-60m --sequence-length 512 --global-batch 16";
    for (stages, lines) in [(2, 2), (4, 4), (8, 1)] {
        let arguments = format!("{plan} --devices {stages} --pipeline {stages}");
        let bytes = super::json(&arguments)["prediction"]["peak_memory_bytes"].clone();
        let report = stdout(&arguments);
        let (head, _) = report.split_once("\n\n").unwrap();
        assert_eq!(head.matches("  memory").count(), lines, "{head}");
        let bytes: Vec<u64> = serde_json::from_value(bytes).unwrap();
        let largest = (0..bytes.len()).rev().max_by_key(|stage| bytes[*stage]).unwrap();
        let words = head.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(words.contains(&format!(" on stage {largest}; ")), stages == 8, "{head}");
    }
}

#[test]
fn colours_follow_the_environment() {
    assert!(!stdout(ARGUMENTS).contains('\u{1b}'));
    let forced = || {
        let mut command = narrows(ARGUMENTS);
        command.env("CLICOLOR_FORCE", "1").env_remove("NO_COLOR");
        command
    };
    let coloured = forced().assert().success().get_output().stdout.clone();
    assert!(coloured.contains(&0x1b));
    let json = forced().args(["--format", "json"]).assert().success().get_output().stdout.clone();
    assert!(!json.contains(&0x1b));
    let plain = narrows(ARGUMENTS).env("NO_COLOR", "1").assert().success();
    assert!(!plain.get_output().stdout.contains(&0x1b));
}

#[test]
fn reports_for_one_device_have_no_layouts() {
    let report = stdout("plan --model cola-tiny");
    assert!(!report.contains("strategy") && !report.contains("AR "), "{report}");
}

#[test]
fn a_plan_on_standard_output_moves_the_report_to_standard_error() {
    let assert = narrows("plan --model cola-tiny --output -").assert().success();
    let output = assert.get_output();
    assert!(output.stdout.starts_with(b"{"));
    assert!(String::from_utf8_lossy(&output.stderr).contains("Where the time goes"));
}

/// Columns of a terminal that a line takes: two for every character that may be wide, such as ideographs. Absolute paths,
/// which are not wrapped, depend on the machine and are not counted.
fn columns(line: &str) -> usize {
    let is_narrow = |c: char| c < '\u{1100}' || ('\u{2000}'..'\u{2c00}').contains(&c);
    let words = line.split(' ').map(|word| if word.starts_with('/') { "" } else { word });
    let characters = words.flat_map(|word| word.chars().chain([' ']));
    let columns: usize = characters.map(|c| if is_narrow(c) { 1 } else { 2 }).sum();
    columns - 1
}

/// Every report fits a terminal of 80 columns, with details too. Commands that are not listed print no report.
#[test]
#[ignore = "second level: runs every command twice"]
fn every_report_fits_80_columns() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (plan, other, profile) = (at("a.json"), at("b.json"), at("profile.json"));
    let tokens = at("tokens.bin");
    let model = "--model cola-60m --sequence-length 512";
    for (file, strategy) in [(&plan, "auto"), (&other, "btp")] {
        let mesh = "--devices 4 --tensor 2 --pipeline 2 --global-batch 8";
        stdout(&format!("plan {model} {mesh} --strategy {strategy} --output {file}"));
    }
    let one_step = "--model cola-tiny --devices 1 --steps 1 --checkpoint-dir";
    stdout(&format!("{} {one_step} {}", super::run::SMALL, at("kept")));
    let cases = std::fs::read_to_string("tests/golden/weights/cases.json").unwrap();
    let cases: serde_json::Value = serde_json::from_str(&cases).unwrap();
    let dense = at("dense.json");
    std::fs::write(&dense, cases["llama"]["config"].to_string()).unwrap();
    // A name that is wider than a terminal.
    let long = at("long.json");
    let text = std::fs::read_to_string("models/mixed-ranks.json").unwrap();
    let name = "a-name-of-more-than-eighty-columns-".repeat(3);
    let text = text.replace("\"name\": \"mixed-ranks\"", &format!("\"name\": \"{name}\""));
    assert!(text.contains(&name));
    std::fs::write(&long, text).unwrap();
    let reports = [
        (
            "export-weights",
            format!("{} --model cola-tiny --to cola --output {}", at("kept"), at("cola")),
        ),
        (
            "factor",
            format!(
                "tests/golden/weights/llama --model {dense} --rank 4 --output {}",
                at("factors")
            ),
        ),
        ("plan", format!("{model} --devices 64 --pipeline 8 --global-batch 64")),
        ("plan", "--model models/mixed-ranks.json --devices 8 --tensor 4 --tokens 3e11".into()),
        ("plan", format!("--model {long} --devices 2 --tokens 1e18 --power-watts 1e6")),
        ("sensitivity", format!("--model {long} --devices 1")),
        ("cost", format!("{plan} --global-batch 16")),
        ("explain", plan.clone()),
        ("explain", "--model lax-60m --devices 8 --tensor 8".into()),
        ("validate", String::new()),
        (
            "whatif",
            format!(
                "{model} --sweep devices=1,2 --sweep rank=64,128 \
                 --sweep hardware.links.inter_node.bandwidth_gbps=5,10 --sweep memory_limit=1GiB,1MiB"
            ),
        ),
        ("whatif", format!("{model} --list")),
        (
            "whatif",
            format!(
                "{model} --devices 8 --until fits --vary hardware.device.memory_bytes=4e9..8e10*2"
            ),
        ),
        ("sensitivity", format!("{model} --devices 2")),
        ("compare", format!("{plan} {other}")),
        ("compare", format!("{plan} {other} {plan} {other} {plan} --tokens 1e18")),
        ("check", plan.clone()),
        ("export", format!("{other} --to nanotron --allow-loss --output {}", at("run.yaml"))),
        ("export", format!("{plan} --to megatron --allow-loss --output {}", at("arguments.sh"))),
        ("data", format!("README.md --output {tokens}")),
        ("doctor", String::new()),
        ("calibrate", format!("--quick --threads 1 --devices 1 --output {profile}")),
        ("run", format!("{} --steps 20", super::run::SMALL.trim_start_matches("run "))),
        ("run", "--backend null --model cola-tiny --devices 2 --tensor 2".into()),
    ];
    for (command, arguments) in &reports {
        let help = stdout(&format!("{command} --help"));
        for details in ["", "--details"] {
            if !details.is_empty() && !help.contains(details) {
                continue;
            }
            let report = stdout(&format!("{command} {arguments} {details}"));
            assert!(!report.trim().is_empty(), "{command} {arguments} {details}");
            for line in report.lines() {
                assert!(columns(line) <= 80, "{command} {arguments} {details}: {line}");
            }
        }
    }
    let listed = |command: &str| reports.iter().any(|(known, _)| *known == command);
    let help = stdout("--help");
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    let names = commands.lines().take_while(|line| !line.is_empty());
    let names = names.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    let without_report =
        ["convert", "plot", "schema", "ui", "generate", "completions", "man", "help", ""];
    for name in names.filter(|name| !without_report.contains(name)) {
        assert!(listed(name), "the width of `{name}` is checked");
    }
}
