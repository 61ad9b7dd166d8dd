//! `--schedule`: pipelines are searched, checked and priced with each schedule.

use serde_json::{Value, json};

use super::{failure, json, narrows, stdout};

/// The zero-bubble schedule shortens a pipeline with few microbatches. `cost` prices a plan with either schedule, and the
/// program of a plan runs weight-gradient passes.
#[test]
fn schedules_are_searched_fixed_and_priced() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("plan.json").display().to_string();
    let request = "--model cola-1b --hardware a100-80gb --devices 4 --global-batch 8 \
                   --sequence-length 1024 --tensor 1 --pipeline 4";
    let plan = |flags: &str| json(&format!("plan {request} {flags}"));
    let step = |answer: &Value| answer["prediction"]["step_time_s"].as_f64().expect("a time");
    let auto = plan(&format!("--output {file}"));
    let (zero_bubble, one_f_one_b) = (plan("--schedule zero-bubble"), plan("--schedule 1f1b"));
    assert_eq!(auto["decisions"]["schedule"], "zero-bubble");
    assert_eq!(one_f_one_b["decisions"].get("schedule"), None);
    assert_eq!(step(&auto), step(&zero_bubble));
    assert!(step(&auto) < 0.95 * step(&one_f_one_b), "{auto:#}\n{one_f_one_b:#}");
    let cost = |flags: &str| step(&json(&format!("cost {file} {flags}")));
    assert_eq!(cost(""), step(&auto));
    assert!(cost("--schedule 1f1b") >= step(&one_f_one_b));
    let page = stdout(&format!("plan {request}"));
    assert!(page.contains("zero-bubble"), "{page}");
}

/// Stages whose blocks keep little for their backward passes have more slots than microbatches in flight, and copies for fewer
/// microbatches; they train alike.
#[test]
fn zero_bubble_stages_that_recompute_blocks_train_as_others_in_less_memory() {
    let run = |flags: &str| {
        json(&format!(
            "run --model cola-tiny --hardware cpu-local --devices 4 --pipeline 4 --micro-batch 1 \
             --global-batch 16 --sequence-length 64 --recompute block --steps 3 {flags}"
        ))
    };
    let (zero_bubble, one_f_one_b) = (run("--schedule zero-bubble"), run("--schedule 1f1b"));
    let loss = |answer: &Value| answer["loss_last"].as_f64().expect("a loss");
    let (loss, expected) = (loss(&zero_bubble), loss(&one_f_one_b));
    assert!((loss / expected - 1.0).abs() < 1e-5, "{loss} and {expected}");
    // With 4 slots, the third stage would need 10,583,296 bytes: 4 copies of what 3 microbatches need.
    let third = zero_bubble["allocated_bytes"][2].as_u64().expect("bytes");
    assert!(third < 9_600_000, "{third}");
}

/// An interleaved pipeline lists the blocks of every chunk, is proven correct and priced alike, and its stages are idle for
/// less time than with 1F1B.
#[test]
fn interleaved_pipelines_are_searched_checked_and_priced() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("plan.json").display().to_string();
    let request = "--model llama-7b --hardware a100-80gb --devices 4 --global-batch 8 \
                   --sequence-length 2048 --tensor 1 --pipeline 4 --micro-batch 1";
    let plan = |flags: &str| json(&format!("plan {request} {flags}"));
    let interleaved = plan(&format!("--schedule interleaved --output {file}"));
    let stages = interleaved["decisions"]["stages"].as_array().expect("stages").len();
    assert!(stages > 4 && stages.is_multiple_of(4), "{stages} virtual stages");
    let part = |answer: &Value, name: &str| answer["prediction"]["breakdown_s"][name].as_f64();
    let one_f_one_b = plan("--schedule 1f1b");
    assert!(part(&interleaved, "bubble") < part(&one_f_one_b, "bubble"), "{interleaved:#}");
    let cost = json(&format!("cost {file}"));
    assert_eq!(cost["prediction"]["step_time_s"], interleaved["prediction"]["step_time_s"]);
    assert!(stdout(&format!("check {file}")).contains("is proven correct"));
    let page = stdout(&format!("plan {request} --schedule interleaved"));
    assert!(page.contains(&format!("interleaved ({} chunks)", stages / 4)), "{page}");
}

#[test]
fn schedules_that_no_mesh_allows_say_what_they_need() {
    for (flags, needs) in [
        (
            "--pipeline 1 --global-batch 4 --schedule zero-bubble",
            "zero-bubble schedule needs several pipeline stages",
        ),
        // Three microbatches for two stages.
        (
            "--pipeline 2 --global-batch 3 --micro-batch 1 --schedule interleaved",
            "needs several stages that divide the number of microbatches",
        ),
    ] {
        let request = "plan --model cola-1b --devices 2 --tensor 1";
        let message = failure(&format!("{request} {flags}"), 1);
        assert!(message.contains(needs), "{message}");
    }
}

/// A plan file whose entries, schedule and microbatches contradict each other is refused with what they need.
#[test]
fn edited_interleaved_plans_are_refused_with_a_hint() {
    let request = "plan --model cola-60m --hardware cpu-local --devices 2 --pipeline 2 --global-batch 4 \
                   --micro-batch 1 --sequence-length 64 --schedule interleaved --output -";
    let plan: Value = serde_json::from_str(&stdout(request)).expect("a plan");
    let chunks = plan["stages"].as_array().expect("stages").len() / 2;
    let one_f_one_b = |plan: &mut Value| plan["schedule"] = json!("1f1b");
    let one_entry_less = |plan: &mut Value| {
        plan["stages"].as_array_mut().expect("stages").pop();
    };
    let no_block = |plan: &mut Value| {
        let moved = plan["stages"][1]["runs"].as_array().expect("runs").clone();
        plan["stages"][1]["runs"] = json!([]);
        plan["stages"][0]["runs"].as_array_mut().expect("runs").extend(moved);
    };
    let odd_batch = |plan: &mut Value| plan["workload"]["global_batch"] = json!(3);
    let listed = format!("stages: {} stages are listed, but the mesh has 2", 2 * chunks);
    let less = format!("stages: {} entries are listed", 2 * chunks - 1);
    type Edit<'a> = &'a dyn Fn(&mut Value);
    let cases: [(Edit, &str, &str); 4] = [
        (&one_f_one_b, &listed, "hint: the schedule interleaved"),
        (&one_entry_less, &less, "hint: 4 entries for 2 chunks per stage"),
        (&no_block, "stages[1].runs: the model chunk has no block", "hint: at least one block"),
        (&odd_batch, "schedule: is interleaved, which needs a multiple of 2", "hint: 1f1b"),
    ];
    // The embedding may be a chunk of its own.
    let mut first_moved = plan.clone();
    let first = first_moved["stages"][0]["runs"].take();
    first_moved["stages"][0]["runs"] = json!([]);
    first_moved["stages"][1]["runs"]
        .as_array_mut()
        .expect("runs")
        .splice(0..0, first.as_array().expect("runs").clone());
    narrows("check -").write_stdin(first_moved.to_string()).assert().success();
    for (edit, problem, hint) in cases {
        let mut edited = plan.clone();
        edit(&mut edited);
        let output = narrows("check -").write_stdin(edited.to_string()).assert().code(2);
        let message = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert!(message.contains(problem) && message.contains(hint), "{message}");
    }
}

/// The reports that name a mesh name the schedule of its pipeline too, and none of a single stage.
#[test]
fn reports_name_the_schedule_of_a_pipeline() {
    let run = "run --hardware cpu-local --model cola-tiny --devices 2 --tensor 1 --micro-batch 1 \
               --global-batch 4 --sequence-length 16 --threads 1 --steps 1";
    for (flags, schedule) in [
        ("--pipeline 2 --schedule interleaved", ", interleaved (2 chunks)"),
        ("--pipeline 2 --schedule zero-bubble", ", zero-bubble"),
        ("--pipeline 2 --schedule 1f1b", ", 1F1B"),
        ("--pipeline 1 --zero off", ""),
    ] {
        for backend in ["cpu", "null"] {
            let steps = if backend == "null" { "--backend null" } else { "" };
            let line = match backend {
                "null" => run.replace(" --threads 1 --steps 1", ""),
                _ => run.to_owned(),
            };
            let text = stdout(&format!("{line} {flags} {steps}"));
            let mesh = text.lines().find(|line| line.contains("tensor 1 × ")).expect("a mesh");
            let (_, after) = mesh.split_once(" × data ").expect("an axis");
            assert_eq!(&after[1..], schedule, "{backend}: {text}");
        }
    }
    let sweep = "whatif --model cola-tiny --hardware a100-80gb --devices 2 --micro-batch 1 \
                 --global-batch 4 --sequence-length 128";
    let swept = format!("{sweep} --pipeline 2 --sweep schedule=1f1b,zero-bubble,interleaved");
    let text = stdout(&swept);
    for plan in ["P2 1F1B b1\n", "P2 ZB b1\n", "P2 v2 b1\n", "Schedule of a pipeline: 1F1B; ZB"] {
        assert!(text.contains(plan), "{plan}: {text}");
    }
    let csv = stdout(&format!("{swept} --csv -"));
    let mut rows = csv.lines().map(|row| row.split(',').collect::<Vec<_>>());
    let header = rows.next().expect("a header");
    let column = header.iter().rposition(|name| *name == "schedule").expect("a column");
    let schedules: Vec<&str> = rows.map(|row| row[column]).collect();
    assert_eq!(schedules, ["1f1b", "zero-bubble", "interleaved"], "{csv}");
    // Columns are left out before plans are wrapped.
    let large = "whatif --model cola-1b --hardware a100-80gb-8 --global-batch 256 --pipeline 4";
    let text = stdout(&format!("{large} --sweep devices=8 --sweep schedule=1f1b --micro-batch 2"));
    assert!(
        text.contains("P4 D2 1F1B b2 Z1\n") && text.contains("Left out, and in --csv: MFU"),
        "{text}"
    );
    let text = stdout(&format!("{sweep} --pipeline 1 --sweep zero=off,1"));
    assert!(text.contains("D2 b1\n") && !text.contains("1F1B"), "{text}");
}

/// Every mesh of the explanation is one line of the table, and reasons why one has no plan follow it.
#[test]
fn each_mesh_of_an_explanation_is_one_line() {
    let request = "explain --model cola-60m --hardware a100-80gb-8 --devices 4 --global-batch 8 \
                   --sequence-length 1024 --pipeline 2";
    for flags in ["", "--details", "--details --schedule interleaved"] {
        let text = stdout(&format!("{request} {flags}"));
        let (_, table) =
            text.split_once("\nConfigurations, by their lower bounds\n").expect("a table");
        let table: Vec<&str> = table.lines().collect();
        assert!(table[1].trim().starts_with('─'), "{text}");
        let rows = table[2..].iter().take_while(|line| !line.contains("Mesh: tensor"));
        let rows: Vec<&&str> = rows.collect();
        assert!(!rows.is_empty(), "{text}");
        for row in &rows {
            let mesh = row.trim().split("  ").next().expect("a mesh");
            let sizes: Vec<u64> = mesh.split(" × ").filter_map(|size| size.parse().ok()).collect();
            assert_eq!((sizes.len(), sizes.get(1)), (3, Some(&2)), "{row}\n{text}");
            assert!(row.chars().count() <= 80, "{row}");
        }
        if flags.contains("interleaved") {
            assert!(rows.iter().all(|row| row.contains("  interleaved (")), "{text}");
            assert!(text.contains("in parentheses: model chunks per stage"), "{text}");
        }
    }
}

/// Embedding and head of a small model with a large vocabulary take as long as several blocks, so that the head alone on
/// the last of four stages is faster than one block beside it. Of four blocks, six stages leave none for both ends.
#[test]
fn embedding_and_head_may_have_stages_of_their_own() {
    let request = "plan --model llama-60m --hardware a100-80gb --devices 4 --pipeline 4 --global-batch 16 \
                   --sequence-length 1024";
    let counts = |answer: &Value| -> Vec<u64> {
        let stages = answer["decisions"]["stages"].as_array().expect("stages").iter();
        let runs = stages.map(|stage| stage["runs"].as_array().expect("runs").iter());
        runs.map(|runs| runs.map(|run| run["count"].as_u64().expect("a count")).sum()).collect()
    };
    let step = |answer: &Value| answer["prediction"]["step_time_s"].as_f64().expect("a time");
    let answer = json(&format!("{request} --schedule 1f1b"));
    assert_eq!(counts(&answer), [3, 3, 2, 0]);
    assert!((step(&answer) - 0.0171343).abs() < 1e-7, "{}", step(&answer));
    let gap = answer["search"]["gap"].as_f64().expect("a gap");
    assert!((0.0..1e-6).contains(&gap), "{gap}");
    assert!(step(&json(request)) <= step(&answer));

    let request = "--model cola-tiny --hardware cpu-local --tensor 1 --data-parallel 1 --global-batch 4 \
                   --micro-batch 1 --sequence-length 16";
    let plan = json(&format!("plan {request} --devices 6 --pipeline 6"));
    assert_eq!(counts(&plan), [0, 1, 1, 1, 1, 0]);
    let plan = plan["decisions"].to_string();
    for command in ["cost -", "check - --numeric", "run - --threads 1 --steps 1"] {
        narrows(command).write_stdin(plan.clone()).assert().success();
    }
    let message = failure(&format!("plan {request} --devices 7 --pipeline 7"), 2);
    assert!(
        message.contains("7 stages exceed the model's 4 blocks, embedding and head"),
        "{message}"
    );
}
