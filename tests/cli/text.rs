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
        "tokens/s",
        "MFU",
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
