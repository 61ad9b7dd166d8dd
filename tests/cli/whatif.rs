//! `narrows whatif`: sweeps.

use std::fs;

use serde_json::{Value, json};

use super::{failure, json, narrows, stdout};

/// A small request.
pub(super) const SMALL: &str = "whatif --model cola-60m --devices 2 --sequence-length 512";

/// A point of a sweep is what `plan` answers for the same request, but for the time it took.
#[test]
fn a_point_equals_the_plan_of_its_request() {
    let sweep = json(&format!("{SMALL} --sweep devices=1,2 --sweep zero=off,1"));
    assert_eq!(sweep["is_complete"], true);
    let points = sweep["points"].as_array().expect("points");
    assert_eq!(points.len(), 4);
    for point in points {
        let devices = point["settings"]["devices"].as_u64().expect("a number");
        let zero = match &point["settings"]["zero"] {
            Value::String(word) => word.clone(),
            number => number.to_string(),
        };
        let plan = json(&format!(
            "plan --model cola-60m --devices {devices} --zero {zero} --sequence-length 512"
        ));
        assert_eq!(point["decisions"], plan["decisions"]);
        assert_eq!(point["prediction"], plan["prediction"]);
        for key in ["status", "gap", "bound_s"] {
            assert_eq!(point["search"][key], plan["search"][key], "{key}");
        }
    }
}

#[test]
fn answers_follow_the_schema() {
    let schema: Value = serde_json::from_str(&stdout("schema whatif")).expect("JSON");
    jsonschema::meta::validate(&schema).expect("a JSON Schema");
    let answer = json(&format!("{SMALL} --sweep tensor=1,2,3 --sweep memory_limit=1MiB,auto"));
    jsonschema::validate(&schema, &answer).expect("an answer that follows its schema");
    for (pointer, field) in [("", "points"), ("/points/1", "search"), ("/points/0/error", "hints")]
    {
        let mut damaged = answer.clone();
        let object = damaged.pointer_mut(pointer).and_then(Value::as_object_mut).expect("object");
        object.remove(field).expect("a field");
        assert!(!jsonschema::is_valid(&schema, &damaged), "{field} is required");
    }
}

/// Model and hardware fields are set as an edited file would set them.
#[test]
fn fields_of_files_are_set() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = fs::read_to_string("profiles/a100-80gb.json").expect("a preset");
    let mut profile: Value = serde_json::from_str(&text).expect("JSON");
    profile["links"]["intra_node"]["bandwidth_bytes_per_s"] = json!(50e9);
    let path = folder.path().join("slow.json");
    fs::write(&path, profile.to_string()).expect("a file");
    let path = path.to_str().expect("a path");
    let fixed = "--model cola-60m --devices 2 --tensor 2 --sequence-length 512";
    let expected = json(&format!("plan {fixed} --hardware {path}"));
    // A number that was fitted is certain once it is set, in the file as in a sweep.
    profile["gemm"]["efficiency_max"] = json!(0.8);
    fs::write(path, profile.to_string()).expect("a file");
    let edited = json(&format!("plan {fixed} --hardware {path}"));
    let swept = json(&format!(
        "whatif {fixed} --sweep hardware.links.intra_node.bandwidth_gbps=50 --sweep hardware.gemm.efficiency_max=0.8"
    ));
    assert_eq!(swept["points"][0]["prediction"], edited["prediction"]);
    let sweep =
        json(&format!("whatif {fixed} --sweep hardware.links.intra_node.bandwidth_gbps=50,300"));
    assert_eq!(
        sweep["points"][0]["prediction"]["step_time_s"],
        expected["prediction"]["step_time_s"]
    );
    let time = |point: &Value| point["prediction"]["step_time_s"].as_f64().expect("a time");
    assert!(time(&sweep["points"][0]) > time(&sweep["points"][1]), "a faster link is faster");

    let sweep = json(&format!("{SMALL} --sweep rank=64,128 --sweep model.blocks.count=4,8 --zip"));
    assert_eq!(sweep["points"][1]["settings"], json!({"rank": 128, "model.blocks.count": 8}));
    let expected = json("plan --model cola-60m --devices 2 --sequence-length 512");
    assert_eq!(sweep["points"][1]["prediction"], expected["prediction"]);
    assert!(time(&sweep["points"][0]) < time(&sweep["points"][1]), "half the model is faster");

    // A repeated value repeats no point of a product.
    let sweep = json(&format!("{SMALL} --sweep rank=64,128,64"));
    assert_eq!(sweep["points"].as_array().map(Vec::len), Some(2));
}

/// Optional fields that the file does not set can be swept too.
#[test]
fn absent_fields_are_set() {
    let sweep = json(&format!("{SMALL} --sweep model.kv_heads=8,2"));
    let expected = json("plan --model cola-60m --devices 2 --sequence-length 512");
    assert_eq!(sweep["points"][0]["prediction"], expected["prediction"]);
    assert_ne!(sweep["points"][1]["prediction"], expected["prediction"]);
    let sweep = json(&format!("{SMALL} --sweep model.blocks.default.d_ff=1376,688"));
    let time = |index: usize| sweep["points"][index]["prediction"]["step_time_s"].as_f64();
    assert_eq!(time(0), expected["prediction"]["step_time_s"].as_f64());
    assert!(time(1) < time(0), "a narrower MLP is faster");
}

/// Longer sequences than the model was made for are a question, not an error.
#[test]
fn sequences_may_exceed_the_length_of_the_model() {
    let answer = json("whatif --model cola-60m --sweep sequence_length=4096,8192");
    assert!(answer["points"][1]["prediction"]["step_time_s"].is_f64());
}

#[test]
fn a_point_without_a_plan_says_why() {
    let answer = json(&format!("{SMALL} --sweep tensor=1,3 --sweep memory_limit=1MiB,auto"));
    let error = |index: usize| answer["points"][index]["error"]["message"].as_str();
    assert!(error(0).expect("too little memory").contains("no plan"));
    assert_eq!(answer["points"][1]["error"], Value::Null);
    assert!(error(2).expect("three of two devices").contains("not a multiple of 3"));
    let text = stdout(&format!("{SMALL} --sweep tensor=1,3"));
    assert!(text.contains("2 points, 1 of them with a plan"), "{text}");
    assert!(text.contains("not a multiple"), "{text}");
    // Long reasons stand under the table, each once.
    let text =
        stdout(&format!("{SMALL} --sweep memory_limit=1MiB,auto --sweep executor=eager,captured"));
    assert_eq!(text.matches("  no plan (1)\n").count(), 2, "{text}");
    assert!(text.contains("  (1) No plan exists because "), "{text}");
    assert!(!text.contains("(2)"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");

    let output = narrows(&format!("{SMALL} --sweep tensor=3")).assert().code(1);
    let message = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(message.contains("no point of the sweep has a plan"), "{message}");
}

#[test]
fn values_that_satisfy_a_condition_are_found() {
    let sweep = json(&format!("{SMALL} --sweep rank=32..256*2"));
    let time = |index: usize| sweep["points"][index]["prediction"]["step_time_s"].as_f64().unwrap();
    let bound = (time(1) + time(2)) / 2.0;
    let command = |condition: &str, vary: &str| {
        let mut command = narrows("whatif --model cola-60m --devices 2 --sequence-length 512");
        command.args(["--until", condition, "--vary", vary]);
        command
    };
    let condition = format!("step_time_s < {bound}");
    let answer = |command: &mut assert_cmd::Command| -> Value {
        let output = command.args(["--format", "json"]).assert().success();
        serde_json::from_slice(&output.get_output().stdout).expect("JSON")
    };
    // Unsorted values are sorted.
    let found = answer(command(&condition, "rank=256,32,64,128").arg("--largest"));
    assert_eq!(found["solution"]["value"], 64);
    assert_eq!(found["solution"]["method"], "all");
    let schema: Value = serde_json::from_str(&stdout("schema whatif")).expect("JSON");
    jsonschema::validate(&schema, &found).expect("an answer that follows its schema");
    let found = answer(command(&condition, "rank=8..256+8").arg("--largest"));
    let largest = found["solution"]["value"].as_u64().expect("a rank");
    assert!((64..128).contains(&largest), "{largest}");
    assert_eq!(found["solution"]["method"], "bisection");
    assert_eq!(found["solution"]["values_total"], 32);
    let points = found["points"].as_array().expect("points");
    assert_eq!(found["solution"]["values_planned"], points.len());
    assert!(points.len() < 10, "{}", points.len());
    let fits = answer(command("fits", "memory_limit=100000000..2000000000+100000000").arg("--yes"));
    assert!(fits["solution"]["value"].as_u64() > Some(100_000_000), "{fits}");

    // A value beyond the range may satisfy the condition too.
    assert_eq!(found["solution"]["is_range_end"], false);
    let found = answer(&mut command(&condition, "rank=32,64,128"));
    assert_eq!(
        (&found["solution"]["value"], &found["solution"]["is_range_end"]),
        (&32.into(), &true.into())
    );
    let output = command(&condition, "rank=32,64").arg("--largest").assert().success();
    let text = String::from_utf8_lossy(&output.get_output().stdout).replace("\n  ", " ");
    assert!(text.contains(": 64, the end of the range; a larger one may do too."), "{text}");

    let output = command("fits", "rank=1,2").assert().success();
    let text = String::from_utf8_lossy(&output.get_output().stdout).replace("\n  ", " ");
    assert!(text.contains("Smallest rank with a plan that fits: 1. All 2 values"), "{text}");

    let output = command("fits", "tensor=1,2,3").assert().success();
    let text = String::from_utf8_lossy(&output.get_output().stdout).replace("\n  ", " ");
    assert!(text.contains("1. All 2 values that fit the request were planned."), "{text}");

    let output = command("step_time_s < 1e-9", "rank=32,64").assert().code(1);
    let message = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(message.contains("no planned value of `rank`"), "{message}");
    for (condition, vary, part) in [
        ("soon", "rank=8", "not a condition"),
        ("dollars < 5", "rank=8", "needs --tokens"),
        ("fits", "strategy=btp,auto", "is not a number"),
        ("fits", "ranks=8", "--vary: no field is called"),
        ("fits", "devices", "--vary: `devices` has no `=`"),
        ("fits", "memory_limit=auto,1GiB", "`\"auto\"` is not a number"),
        ("mfu >= 40", "rank=8", "--until: mfu is a share, at most 1, not 40\n  hint: mfu >= 0.4"),
    ] {
        let output = command(condition, vary).assert().code(2);
        let message = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert!(message.contains(part), "{message}");
    }
    failure("whatif --model cola-60m --until fits", 2);
    failure("whatif --model cola-60m --vary rank=8", 2);
}

/// Without a difference, the first point is the answer, since later ones cost more.
#[test]
fn the_first_of_equal_points_is_named() {
    let text = stdout(&format!("{SMALL} --sweep price_per_device_hour=2,3 --tokens 1e9"));
    assert!(text.replace("\n  ", " ").contains("tokens/s, at price_per_device_hour 2."), "{text}");
}

#[test]
fn rows_are_written_as_csv() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("sweep.csv");
    let path = path.to_str().expect("a path");
    stdout(&format!("{SMALL} --sweep tensor=1,2,3 --csv {path}"));
    let text = fs::read_to_string(path).expect("the file");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4);
    assert!(lines[0].starts_with("tensor,step_time_s,step_time_low_s,"), "{}", lines[0]);
    assert!(lines[3].starts_with("3,,,"), "{}", lines[3]);
    let mut columns: Vec<&str> = lines[0].split(',').collect();
    assert!(columns.contains(&"plan_tensor"), "{}", lines[0]);
    let number = columns.len();
    columns.sort_unstable();
    columns.dedup();
    assert_eq!(columns.len(), number, "two columns have one name: {}", lines[0]);
    let columns = number;
    assert_eq!(lines[1].split(',').count(), columns);
    let json = json(&format!("{SMALL} --sweep tensor=1"));
    let time = json["points"][0]["prediction"]["step_time_s"].to_string();
    assert_eq!(lines[1].split(',').nth(1), Some(time.as_str()));
    let rows = stdout(&format!("{SMALL} --sweep tensor=1,2,3 --csv -"));
    assert_eq!(rows, text);
    let grouped = "--devices 4 --data-parallel 4 --zero 2 --shard-size 2";
    let request = SMALL.replace("--devices 2", grouped);
    let rows = stdout(&format!("{request} --sweep memory_limit=auto,1MiB --csv -"));
    let lines: Vec<&str> = rows.lines().collect();
    assert!(lines[0].ends_with(",context_attention,shard_size,error"), "{rows}");
    assert!(lines[1].ends_with(",exchange,2,"), "{rows}");
    assert!(lines[2].contains(",\"no plan exists for cola-60m on 4 devices"), "{rows}");
    assert!(lines[2].ends_with(", and because a device may use 1.0 MiB\""), "{rows}");
}

#[test]
fn step_times_are_drawn() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("sweep.svg");
    let path = path.to_str().expect("a path");
    stdout(&format!("{SMALL} --sweep rank=32,64,128 --sweep zero=off,1 --plot {path}"));
    let svg = fs::read_to_string(path).expect("the picture");
    for part in ["step time in seconds", "rank", "zero off", "zero 1", "128"] {
        assert!(svg.contains(part), "{part}");
    }
}

#[test]
fn fields_are_listed() {
    let text = stdout("whatif --model cola-7b --list");
    for field in
        ["global_batch", "rank", "model.blocks.count", "hardware.links.inter_node.nics_per_node"]
    {
        assert!(text.contains(field), "{field} in {text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let schema: Value = serde_json::from_str(&stdout("schema whatif-list")).expect("JSON");
    jsonschema::meta::validate(&schema).expect("a JSON Schema");
    let answer = json("whatif --model cola-7b --list");
    jsonschema::validate(&schema, &answer).expect("an answer that follows its schema");
}

#[test]
fn cells_without_a_plan_are_explained() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("sweep.svg");
    let path = path.to_str().expect("a path");
    for (tensor, is_explained) in [("1,2", false), ("1,3", true)] {
        let sweep = format!("--sweep rank=64,128 --sweep tensor={tensor}");
        stdout(&format!("{SMALL} {sweep} --plot {path} --plot-kind heat-map"));
        let svg = fs::read_to_string(path).expect("the picture");
        assert_eq!(svg.contains("grey: no plan"), is_explained, "{sweep}");
    }
}

#[test]
fn bad_sweeps_are_located() {
    for (arguments, part) in [
        ("", "--sweep: names no field to sweep"),
        ("--sweep devices", "has no `=`"),
        ("--sweep devices=", "a value is missing"),
        ("--sweep devices=8..4+1", "ends before it begins\n  hint: ranges have the forms"),
        ("--sweep device=4", "did you mean devices"),
        ("--sweep global_batch=0", "--sweep global_batch: 0 is not between 1 and 16777216"),
        ("--sweep devices=1,2 --sweep micro_batch=1,0", "--sweep micro_batch: 0 is not between 1"),
        (
            "--until fits --vary global_batch=0,1,2",
            "--vary global_batch: 0 is not between 1 and 16777216",
        ),
        (
            "--break-even devices=1,9999999 --between btp,auto",
            "--break-even devices: 9999999 is not between 1 and 1048576",
        ),
        (
            "--break-even devices=1,2 --between auto,global_batch=0",
            "--between global_batch: 0 is not between 1 and 16777216",
        ),
        ("--sweep rnak=4", "did you mean rank"),
        ("--sweep dev=4", "did you mean devices"),
        ("--sweep seq_len=4", "did you mean sequence_length"),
        ("--sweep batch=4", "did you mean global_batch or micro_batch?"),
        (
            "--sweep hardware.links.inter_node.bandwith_gbps=4",
            "did you mean hardware.links.inter_node.bandwidth_gbps",
        ),
        ("--sweep bandwidth_gbps=4", "hardware.links"),
        ("--sweep model.hiden=4", "did you mean model.hidden"),
        ("--sweep hardware.provenance=4", "no field is called"),
        ("--sweep colour=red", "--list"),
        (
            "--hardware a100-80gb --sweep hardware.gemm.relative_error.half_width_90=0.1,0.2",
            "`hardware.gemm.relative_error.half_width_90` has no effect: errors are drawn from the 34 residuals",
        ),
        (
            "--sweep devices=many",
            "invalid value 'many' for '--devices <N>': expected a whole number",
        ),
        // Tables have names without units.
        (
            "--sweep hardware.links.inter_node.bandwidth=4",
            "did you mean hardware.links.inter_node.bandwidth_bytes_per_s?\n  hint: a name ends with the unit of its values; \
             other endings: _gb_per_s, _gbps",
        ),
        ("--sweep device.peak_flops.bf16=4", "did you mean hardware.device.peak_flops_per_s.bf16?"),
        ("--sweep strategy=megatron", "possible values"),
        ("--sweep model.heads=7", "heads"),
        ("--sweep rank=0", "must be at least 1\n  hint: rank=0 was set; `narrows whatif --list`"),
        (
            "--sweep rank=abc",
            "--sweep: \"abc\" is not a whole number from 1, as ranks are\n  hint: rank=32..256*2",
        ),
        ("--sweep hardware.device.memory_bytes=-1", "expected a whole number from 0, found -1\n"),
        ("--sweep hardware.device.memory_gib=-4", "hint: hardware.device.memory_gib=-4 was set"),
        ("--sweep devices=1..20000+1", "the sweep has 20,000 points"),
        (
            "--yes --sweep devices=1..2000+1 --sweep global_batch=1..2000+1",
            "the sweep has more than 1,000,000 points",
        ),
        (
            "--sweep rank=1..600000+1,1..600000+1",
            "with `1..600000+1`, the field has more than a million values",
        ),
        (
            "--sweep hardware.gemm.start_us=1,2 --sweep hardware.gemm.start_s=1e-6",
            "`hardware.gemm.start_s` replaces every value of `hardware.gemm.start_us`",
        ),
        (
            "--sweep rank=64,128 --sweep model.blocks.default.all.rank=64",
            "`model.blocks.default.all.rank` replaces every value of `rank`",
        ),
        ("--sweep devices=1,1 --sweep tensor=1 --zip", "`devices` has 2 values and `tensor` has 1"),
        ("--sweep devices=1,2 --sweep tensor=1 --zip", "`devices` has 2 values and `tensor` has 1"),
        ("--sweep devices=1 --sweep devices=2", "swept twice"),
        (
            "--sweep memory_limit=40GiB,60GiB --sweep hardware.device.memory_gib=40,80",
            "`hardware.device.memory_gib` has no effect, because --memory-limit is set\n  hint: one of the two",
        ),
        (
            "--memory-limit 40GiB --sweep hardware.device.memory_gib=40,80",
            "`hardware.device.memory_gib` has no effect, because --memory-limit is set",
        ),
        (
            "--tokens 1e9 --sweep hardware.price_per_device_hour=1,2 --sweep price_per_device_hour=1",
            "`hardware.price_per_device_hour` has no effect, because --price-per-device-hour is set",
        ),
        (
            "--memory-limit 40GiB --break-even hardware.device.memory_gib=40..80 --between btp,data-parallel",
            "--break-even: `hardware.device.memory_gib` has no effect, because --memory-limit is set",
        ),
        ("--sweep devices=1 --csv no/such/folder.csv", "cannot be written"),
        ("--sweep zero=off,1 --plot x.svg", "no swept field has two or more numbers"),
        (
            "--sweep rank=1..5+1 --sweep zero=off,1 --sweep devices=1..9+1 --plot x.svg",
            "10 lines, and a chart at most 8",
        ),
        ("--sweep devices=1,2 --plot no/such/folder.svg", "cannot be written"),
        ("--sweep devices=1 --csv - --format json", "standard output"),
    ] {
        let message = failure(&format!("whatif --model cola-60m {arguments}"), 2);
        assert!(message.contains(part), "{arguments}: {message}");
    }
    let models = "--sweep model=cola-60m,llama-60m --sweep model.blocks.default.all.rank=64";
    let message = failure(&format!("whatif {models}"), 2);
    assert!(message.contains("`llama-60m` has no such field"), "{message}");
    let message = failure("whatif --model llama-7b --sweep rank=64", 2);
    assert!(message.contains("has no factor pairs"), "{message}");
}

/// Sizes in bytes are numbers wherever numbers are needed.
#[test]
fn memory_limits_with_units_are_numbers() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("sweep.svg");
    let path = path.to_str().expect("a path");
    let fits = json(&format!("{SMALL} --until fits --vary memory_limit=2GiB,1MiB,512MiB"));
    assert_eq!(fits["solution"]["value"], "512MiB");
    let sweep = json(&format!(
        "{SMALL} --sweep memory_limit=0.5GiB..2GiB*2 --plot {path} --plot-kind lines"
    ));
    let settings: Vec<_> = sweep["points"].as_array().expect("points").iter().collect();
    let settings: Vec<_> =
        settings.iter().map(|point| &point["settings"]["memory_limit"]).collect();
    assert_eq!(settings, ["0.5GiB", "1GiB", "2GiB"]);
    let svg = fs::read_to_string(path).expect("the picture");
    for part in ["memory limit in GiB", ">\n0.5\n<", ">\n2\n<"] {
        assert!(svg.contains(part), "{part} in {svg}");
    }
    let between = "--between tensor=2,data-parallel --break-even memory_limit";
    let answer = json(&format!("{SMALL} {between}=4MiB..2GiB"));
    let [low, high] = [0, 1].map(|end| answer["break_even"]["break_even"][0][end].as_f64());
    let (low, high) = (low.expect("a value"), high.expect("a value"));
    assert!((f64::from(4 << 20)..high).contains(&low) && high <= 1.01 * low, "{low} to {high}");
    let text = stdout(&format!("{SMALL} {between}=4MiB,2GiB")).replace("\n  ", " ");
    assert!(text.contains("a value between 0.00390625 and 2 GiB of memory_limit"), "{text}");
    assert!(text.contains(" 2.0 GiB  "), "{text}");
}

#[test]
fn pictures_need_points_with_a_plan() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("sweep.svg");
    let plot = format!("--plot {} --plot-kind", path.to_str().expect("a path"));
    for (sweep, kind, reason) in [
        (
            "--sweep memory_limit=1MiB,none",
            "memory",
            "only one point has a plan, and two are needed",
        ),
        ("--sweep memory_limit=1MiB,2MiB", "memory", "no point has a plan"),
        (
            "--tensor 2 --sweep devices=2,3",
            "scaling",
            "only one point has a plan, and two are needed",
        ),
    ] {
        let request = "whatif --model cola-60m --sequence-length 512 --global-batch 2";
        let output = narrows(&format!("{request} {sweep} {plot} {kind}")).assert().code(1);
        let message = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        let expected = format!("error: --plot-kind: this answer has no picture `{kind}`");
        assert!(message.contains(&expected), "{message}");
        assert!(message.contains(reason) && !message.contains("hint: \n"), "{message}");
    }
}

/// Many swept fields leave no room for all results. Numbers are never broken.
#[test]
fn tables_of_many_fields_keep_their_numbers_whole() {
    let text = stdout(&format!(
        "{SMALL} --sweep devices=2 --sweep rank=64,128 --sweep global_batch=64 \
         --sweep hardware.links.inter_node.bandwidth_gbps=12.5 --sweep memory_limit=20GiB"
    ));
    assert!(text.contains("Left out, and in --csv: MFU"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let rows = text.lines().filter(|line| line.contains(" ms ") || line.contains(" s "));
    let rows: Vec<&str> = rows.filter(|line| line.contains("20GiB")).collect();
    assert_eq!(rows.len(), 2, "{text}");
    assert!(rows.iter().all(|row| row.contains(',')), "tokens per second are whole: {text}");
}

/// A plan that is within 1 % of the bound, but not proven the fastest, counts as one with a gap.
#[test]
fn unproven_points_are_counted_with_their_gap() {
    let sweep = "whatif --model llama-7b --hardware h100-sxm --devices 2 --sweep memory_limit=";
    let answer = json(&format!("{sweep}64GiB,80GiB"));
    let searches = answer["points"].as_array().expect("points").iter().map(|p| &p["search"]);
    let gaps: Vec<f64> = searches
        .map(|search| {
            assert_eq!(search["status"], "optimal");
            search["gap"].as_f64().expect("a gap")
        })
        .collect();
    // Plans within 1 % of the bound count as optimal.
    assert!(gaps[0] > 0.0 && gaps[0] < 0.01 && gaps[1] == 0.0, "{gaps:?}");
    let gap = gaps[0];
    let text = stdout(&format!("{sweep}64GiB,80GiB")).replace("\n  ", " ");
    let phrase = "1 of 2 plans is proven the fastest; at the other points, no plan takes more than";
    let rounded_up = (1e3 * gap).ceil() / 10.0;
    assert!(text.contains(&format!("{phrase} {rounded_up:.1} % less time.")), "{text}");
    let text = stdout(&format!("{sweep}64GiB")).replace("\n  ", " ");
    assert!(text.contains("The plan is not proven the fastest: no plan takes more"), "{text}");
    assert!(!stdout(&format!("{sweep}80GiB")).contains("proven the fastest"));
}
