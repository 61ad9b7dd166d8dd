//! `narrows check`: stages of a proven plan, miniatures, edited plans.

use std::fs;

use serde_json::Value;

use super::{failure, json, narrows, stdout};

#[test]
fn miniatures_of_published_plans_agree_with_the_reference() {
    for (model, flags) in [
        ("cola-7b", "--devices 4 --tensor 4"),
        ("lax-1b", "--devices 4 --tensor 2 --pipeline 2"),
        ("llama-7b", "--devices 4 --tensor 4 --strategy fullrank-tp"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("plan.json");
        let plan = stdout(&format!("plan --model {model} {flags} --global-batch 4 --output -"));
        std::fs::write(&file, plan).expect("a file");
        let file = file.display();
        let answer = json(&format!("check {file} --memory-limit none --numeric"));
        assert_eq!(answer["proven"], true, "{model}");
        let numeric = &answer["numeric"];
        assert_eq!((&numeric["equal"], &numeric["devices"]), (&true.into(), &4.into()), "{model}");
        assert!(numeric["loss_relative_difference"].as_f64().expect("a number") < 1e-6);
        let text = stdout(&format!("check {file} --memory-limit none --numeric"));
        assert!(text.contains("The plan computes its model"), "{text}");
        let plain = json(&format!("check {file} --memory-limit none"));
        assert!(plain.get("numeric").is_none());
    }
    narrows("check no-such-file --numeric").assert().code(2);
}

/// Duplicate and unused entries of an edited plan are rejected by field; other hardware causes a warning.
#[test]
fn duplicate_and_unused_entries_of_a_plan_are_rejected() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("plan.json");
    let plan: serde_json::Value = serde_json::from_str(&super::small_plan()).expect("a plan");
    let check = |edited: &serde_json::Value| {
        std::fs::write(&file, edited.to_string()).expect("a file");
        format!("check {}", file.display())
    };
    let name = plan["blocks"].as_object().unwrap().keys().next().unwrap().clone();
    let entry = plan["blocks"][&name]["keep"][0].clone();
    let mut duplicate = plan.clone();
    let list = duplicate["blocks"][&name]["keep"].as_array_mut().unwrap();
    list.push(entry);
    let last = list.len() - 1;
    let message = super::failure(&check(&duplicate), 2);
    let place = format!("blocks.{name}.keep[{last}]");
    assert!(message.contains(&place) && message.contains("listed twice"), "{message}");

    let mut unused = plan.clone();
    unused["blocks"]["left-over"] = plan["blocks"][&name].clone();
    let message = super::failure(&check(&unused), 2);
    assert!(message.contains("blocks.left-over: no run of a stage uses"), "{message}");

    let mut other_hardware = plan.clone();
    other_hardware["hardware"]["name"] = "h100-sxm".into();
    let output = narrows(&check(&other_hardware)).assert().code(0).get_output().clone();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("h100-sxm"), "{message}");
    assert!(narrows(&check(&plan)).assert().code(0).get_output().stderr.is_empty());
}

/// Microbatches in flight are those of each model chunk, because one microbatch may be in several.
#[test]
fn microbatches_in_flight_are_those_of_a_chunk() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("plan.json").display().to_string();
    let request = "--model cola-tiny --hardware a100-80gb --devices 2 --pipeline 2 --micro-batch 1 \
                   --global-batch 4 --sequence-length 128";
    stdout(&format!("plan {request} --schedule interleaved --output {file}"));
    let stage = &json(&format!("check {file}"))["stages"][0];
    assert_eq!(stage["chunk_microbatches_in_flight"], serde_json::json!([4, 2]));
    assert_eq!(stage["microbatches_in_flight"], 6);
    let text = stdout(&format!("check {file}"));
    assert!(text.contains("× data 1, interleaved (2 chunks)\n"), "{text}");
    assert!(text.contains("  4+2  "), "{text}");
    assert!(text.contains("In flight: microbatches in each model chunk of a stage.\n"), "{text}");
    stdout(&format!("plan {request} --schedule 1f1b --output {file}"));
    let stage = &json(&format!("check {file}"))["stages"][0];
    assert_eq!(
        (stage.get("chunk_microbatches_in_flight"), &stage["microbatches_in_flight"]),
        (None, &2.into())
    );
    let text = stdout(&format!("check {file}"));
    assert!(text.contains("× data 1, 1F1B\n") && !text.contains("chunk"), "{text}");
}

#[test]
fn one_replica_is_singular() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json");
    let mut plan: Value =
        serde_json::from_str(&stdout("plan --model cola-tiny --devices 1 --output -")).unwrap();
    plan["workload"]["micro_batch"] = 2.into();
    plan["workload"]["global_batch"] = 33.into();
    fs::write(&file, plan.to_string()).unwrap();
    let message = failure(&format!("check {}", file.display()), 2);
    let expected = "workload.global_batch: 33 sequences cannot be divided into microbatches of 2 on 1 replica\n";
    assert!(message.contains(expected), "{message}");
}
