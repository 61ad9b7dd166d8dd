//! Plans, models and profiles as files and on standard streams.

use std::fs;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::run::SMALL;
use super::{failure, json as answer, narrows, small_plan, stdout};

#[test]
fn a_written_plan_is_checked_and_costs_what_was_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.json");
    let path = path.to_str().unwrap();
    let model = "--model cola-1b --devices 4 --global-batch 8 --tensor 2";
    let planned = answer(&format!("plan {model} --output {path}"));
    let cost = answer(&format!("cost {path}"));
    assert_eq!(cost["decisions"], planned["decisions"]);
    assert_eq!(cost["prediction"], planned["prediction"]);
    assert!(cost.get("search").is_none());
    let proof = answer(&format!("check {path}"));
    assert_eq!(proof["proven"], true);
    assert_eq!(
        proof["stages"][0]["peak_memory_bytes"],
        planned["prediction"]["peak_memory_bytes"][0]
    );
    let explained = answer(&format!("explain {path}"));
    assert!(explained["given"]["ratio"].as_f64().is_some_and(|ratio| ratio >= 1.0 - 1e-9));
}

/// No command replaces a file that it reads, whatever the file is called.
#[test]
fn outputs_that_are_inputs_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (plan, model) = (at("p.json"), at("m.json"));
    let contents = [small_plan(), fs::read_to_string("models/mixed-ranks.json").unwrap()];
    fs::write(&plan, &contents[0]).unwrap();
    fs::write(&model, &contents[1]).unwrap();
    let dotted = at("./p.json");
    for (command, flag) in [
        (format!("export {plan} --to megatron --output {plan}"), "--output"),
        (format!("export {plan} --to nanotron --output {dotted}"), "--output"),
        (format!("export {plan} --to megatron --model {model} --output {model}"), "--output"),
        (format!("plan --model {model} --output {model}"), "--output"),
        (format!("plan --model {model} --trace {model}"), "--trace"),
        (format!("cost {plan} --report {dotted}"), "--report"),
        (format!("cost {plan} --trace {plan}"), "--trace"),
        (format!("explain {plan} --plot {plan}"), "--plot"),
        (format!("compare {model} {plan} --report {plan}"), "--report"),
        (format!("whatif --model {model} --sweep devices=2,4 --csv {model}"), "--csv"),
    ] {
        let message = failure(&command, 2);
        let expected = format!("{flag}: `");
        assert!(message.contains(&expected) && message.contains("is an input too"), "{message}");
    }
    assert_eq!([plan, model].map(|file| fs::read_to_string(file).unwrap()), contents);
    for flag in ["--output", "--trace"] {
        let narrows = narrows(&format!("plan --model cola-tiny {flag}")).arg("").assert();
        let message = String::from_utf8(narrows.code(2).get_output().stderr.clone()).unwrap();
        assert!(message.contains(&format!("{flag}: the file name is empty")), "{message}");
    }
    // A preset is no file.
    for _ in 0..2 {
        let mut command = narrows("plan --model cola-tiny --output cola-tiny");
        command.current_dir(folder.path()).assert().success();
    }
}

#[test]
fn parents_are_created_for_folders_and_not_for_files() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (plan, metrics) = (at("p.json"), at("m.jsonl"));
    fs::write(&plan, small_plan()).unwrap();
    let run = format!("{SMALL} --steps 1");
    let kept = at("a/b/kept");
    for command in [
        format!("{run} --checkpoint-dir {kept} --tensorboard {} --metrics {metrics}", at("c/d")),
        format!("export-weights {kept} --to cola --output {}", at("e/f/weights")),
        format!("man {}", at("g/h")),
    ] {
        stdout(&command);
    }
    for created in ["a/b/kept", "c/d", "e/f/weights", "g/h"] {
        assert!(folder.path().join(created).is_dir(), "{created}");
    }
    let file = at("x/y/file.svg");
    for command in [
        format!("{run} --metrics {file}"),
        format!("{run} --trace {file}"),
        format!("plot {metrics} --output {file}"),
        format!("plan --model cola-tiny --output {file}"),
        format!("export {plan} --to megatron --allow-loss --output {file}"),
        format!("cost {plan} --report {file}"),
        format!("data README.md --output {file}"),
    ] {
        let message = failure(&command, 2);
        assert!(message.contains("file.svg: cannot be written"), "{command}: {message}");
        assert!(!folder.path().join("x").exists(), "{command}");
    }
}

#[test]
fn standard_streams_replace_files() {
    let plan = small_plan();
    serde_json::from_str::<Value>(&plan).expect("only the plan is on standard output");
    narrows("check -").write_stdin(plan.clone()).assert().success();
    // The answer of `plan --format json` contains a plan.
    let printed = stdout("plan --model cola-tiny --format json");
    narrows("cost -").write_stdin(printed).assert().success();
    let model = fs::read_to_string("models/mixed-ranks.json").unwrap();
    narrows("plan --model - --devices 2").write_stdin(model).assert().success();
    let profile = fs::read_to_string("profiles/h100-sxm.json").unwrap();
    narrows("plan --model cola-tiny --hardware -").write_stdin(profile).assert().success();
    let message = failure("check - --model -", 2);
    assert!(message.contains("one standard input"), "{message}");
    failure("plan --model cola-tiny --format json --output -", 2);
}

#[test]
fn model_files_equal_presets() {
    let prediction = |model: &str| {
        answer(&format!("plan --model {model} --memory-limit none"))["prediction"].clone()
    };
    let config = fs::read_to_string("models/llama-7b.config.json").unwrap();
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config).unwrap();
    let by_folder = prediction(folder.path().to_str().unwrap());
    assert_eq!(by_folder, prediction("models/llama-7b.config.json"));
}

#[test]
fn pricing_with_another_profile_warns() {
    let command = narrows("cost - --hardware h100-sxm").write_stdin(small_plan()).assert();
    let output = command.success().get_output().clone();
    let warning = String::from_utf8(output.stderr).unwrap();
    assert!(warning.contains("made for `a100-80gb`; re-priced on `h100-sxm`"), "{warning}");
}

#[test]
fn another_model_is_rejected() {
    let command = narrows("cost - --model cola-60m").write_stdin(small_plan()).assert();
    let message = String::from_utf8(command.code(2).get_output().stderr.clone()).unwrap();
    assert!(message.contains("<stdin>: model.fingerprint: "), "{message}");
}

#[test]
fn size_flags_replace_the_sizes_of_the_plan() {
    let cost = |flags: &str| narrows(&format!("cost - {flags}")).write_stdin(small_plan()).assert();
    let output = cost("--global-batch 8 --format json").success().get_output().stdout.clone();
    let cost_of_8: Value = serde_json::from_slice(&output).unwrap();
    assert_eq!(cost_of_8["decisions"]["workload"]["global_batch"], 8);
    cost("--devices 4").code(2);
    cost("--strategy btp").code(2);
}

#[test]
fn a_failed_check_exits_with_1() {
    let check =
        narrows("check - --memory-limit 1MiB --format json").write_stdin(small_plan()).assert();
    let output = check.code(1).get_output().clone();
    let proof: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(proof["proven"], false);
    assert_eq!(proof["errors"][0]["stage"], 0);
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("<stdin>: stage 0: a device needs"), "{message}");
}

#[test]
fn invalid_edits_of_a_plan_are_located() {
    let plan: Value = serde_json::from_str(&small_plan()).unwrap();
    let edited = |edit: fn(&mut Value), field: &str| {
        let mut plan = plan.clone();
        edit(&mut plan);
        let command = narrows("check -").write_stdin(plan.to_string()).assert().code(2);
        let message = String::from_utf8(command.get_output().stderr.clone()).unwrap();
        assert!(message.contains(&format!("<stdin>: {field}")), "{field}: {message}");
    };
    edited(|plan| plan["mesh"]["tensor"] = json!(0), "mesh.tensor: ");
    edited(|plan| plan["mesh"]["data"] = json!(u64::MAX), "mesh: ");
    edited(
        |plan| plan["workload"]["sequence_length"] = json!(1 << 20),
        "workload.sequence_length: ",
    );
    edited(|plan| plan["mesh"]["tensor"] = json!("two"), "mesh.tensor: ");
    edited(|plan| plan["workload"]["global_batch"] = json!(3), "workload.global_batch: ");
    edited(|plan| plan["stages"][0]["runs"][0]["count"] = json!(2), "stages: ");
    edited(
        |plan| plan["blocks"]["block"]["ops"]["norm1"] = json!("column"),
        "blocks.block.ops.norm1: ",
    );
    edited(|plan| plan["blocks"]["block"]["keep"] = json!([]), "blocks.block");
    edited(|plan| plan["format"] = json!("narrows-plan/9"), "format: ");
    edited(|plan| plan["model"]["name"] = json!("../secret"), "model.name: ");
}

/// The first and the last stage may have the embedding and the head alone; a stage between them needs a block.
#[test]
fn stages_between_others_need_a_block() {
    let flags =
        "--hardware cpu-local --devices 3 --pipeline 3 --global-batch 6 --sequence-length 512";
    let plan = stdout(&format!("plan --model cola-60m {flags} --output -"));
    let plan: Value = serde_json::from_str(&plan).unwrap();
    for stage in 0..3 {
        let mut plan = plan.clone();
        let other = if stage == 0 { 1 } else { stage - 1 };
        let moved = plan["stages"][stage]["runs"].take();
        plan["stages"][stage]["runs"] = json!([]);
        let mut runs = plan["stages"][other]["runs"].as_array().unwrap().clone();
        let at = if stage == 0 { 0 } else { runs.len() };
        runs.splice(at..at, moved.as_array().unwrap().clone());
        plan["stages"][other]["runs"] = json!(runs);
        if stage != 1 {
            for command in ["cost -", "check - --numeric", "run - --backend null"] {
                narrows(command).write_stdin(plan.to_string()).assert().success();
            }
            continue;
        }
        for command in ["cost -", "check -", "run -"] {
            let output = narrows(command).write_stdin(plan.to_string()).assert().code(2);
            let message = String::from_utf8(output.get_output().stderr.clone()).unwrap();
            let expected = format!("<stdin>: stages[{stage}].runs: the stage has no block");
            assert!(message.contains(&expected), "{command}: {message}");
            assert!(message.contains("hint: at least one block"), "{command}: {message}");
        }
    }
}

#[test]
fn repeated_keys_of_a_plan_are_rejected() {
    let plan = small_plan();
    for (first, repeated, field) in [
        ("\"ops\": {", "\"head\": \"row\",", "head.ops: key `head` is repeated"),
        ("\"blocks\": {", "", "blocks: key `block` is repeated"),
    ] {
        let repeated = match repeated {
            // The first decisions of blocks, once more.
            "" => {
                let plan: Value = serde_json::from_str(&plan).unwrap();
                format!("\"block\": {},", plan["blocks"]["block"])
            }
            repeated => repeated.to_owned(),
        };
        let at = plan.rfind(first).unwrap() + first.len();
        let text = format!("{}{repeated}{}", &plan[..at], &plan[at..]);
        let output = narrows("cost -").write_stdin(text).assert().code(2);
        let message = String::from_utf8(output.get_output().stderr.clone()).unwrap();
        assert!(message.contains(&format!("<stdin>: {field}")), "{message}");
    }
}

/// However many entries of a list are wrong, the message stays short.
#[test]
fn very_many_defects_are_counted() {
    let mut plan: Value = serde_json::from_str(&small_plan()).unwrap();
    let keep = plan["blocks"]["block"]["keep"].as_array_mut().unwrap();
    let first = keep[0].clone();
    let known = keep.len();
    keep.extend(std::iter::repeat_n(first, 100_000));
    let message = |plan: &Value| {
        let output = narrows("cost -").write_stdin(plan.to_string()).assert().code(2);
        String::from_utf8(output.get_output().stderr.clone()).unwrap()
    };
    let repeated = message(&plan);
    assert!(repeated.contains(&format!("blocks.block.keep[{known}]: ")), "{repeated}");
    assert_eq!(repeated.matches("error:").count(), 1, "{repeated}");
    let names: Vec<String> = (0..100_000).map(|number| format!("x{number}@feature")).collect();
    plan["blocks"]["block"]["keep"]
        .as_array_mut()
        .unwrap()
        .extend(names.into_iter().map(Value::from));
    let unknown = message(&plan);
    assert_eq!(unknown.matches("error:").count(), 101, "{unknown}");
    assert!(unknown.contains("error: 99,901 more errors are not shown"), "{unknown}");
}

#[test]
fn a_failure_leaves_the_previous_plan() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.json");
    fs::write(&path, "precious").unwrap();
    let name = path.to_str().unwrap();
    failure(&format!("plan --model llama-7b --memory-limit 1GiB --output {name}"), 1);
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    let missing = folder.path().join("no/plan.json");
    let message = failure(&format!("plan --model cola-tiny --output {}", missing.display()), 2);
    assert!(message.contains("cannot be written"), "{message}");
    failure(&format!("plan --model cola-tiny --output {}", folder.path().display()), 2);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_narrows"))
        .args(["schema", "profile"])
        .env("XDG_CACHE_HOME", crate::CACHE)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The YAML that BOOST and Nanotron train from, shortened to what their classes read.
const BOOST_YAML: &str = "\
model:
  init_method:
    std: 0.025
  make_vocab_size_divisible_by: 1
  model_config:
    bos_token_id: 1
    hidden_act: silu
    hidden_size: 64
    initializer_range: 0.02
    intermediate_size: 64
    is_cola_llama_config: true
    max_position_embeddings: 256
    num_attention_heads: 4
    num_hidden_layers: 2
    num_key_value_heads: 4
    pad_token_id: null
    pretraining_tp: 1
    attn_rank: 16
    mlp_rank: 16
    rmsnorm_type: sync
    rms_norm_eps: 1.0e-06
    rope_scaling: null
    tie_word_embeddings: true
    use_cache: true
    vocab_size: 256
parallelism:
  tp: 4
";

#[test]
fn the_yaml_of_boost_is_a_model_with_its_norms() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("tiny.yaml");
    let plan = |text: &str, flags: &str| {
        std::fs::write(&file, text).expect("a file");
        format!(
            "plan --model {} --devices 2 --tensor 2 --strategy btp --global-batch 4 --micro-batch 4 {flags}",
            file.display()
        )
    };
    let norms = |command: &str| {
        let plan = answer(command)["decisions"].clone();
        assert_eq!(plan["model"]["name"], "tiny");
        let block =
            plan["blocks"].as_object().expect("blocks").values().next().expect("one").clone();
        block["ops"]["norm1"].as_str().expect("a strategy").to_owned()
    };
    let online = BOOST_YAML.replace("rmsnorm_type: sync", "rmsnorm_type: online");
    assert_eq!(norms(&plan(BOOST_YAML, "")), "sync");
    assert_eq!(norms(&plan(&online, "")), "online");
    assert_eq!(norms(&plan(&online, "--norm sync")), "sync");
    // The ending of the name does not matter.
    let other = file.with_extension("config");
    std::fs::write(&other, &online).expect("a file");
    let name = |path: &std::path::Path| path.display().to_string();
    assert_eq!(norms(&plan(BOOST_YAML, "").replace(&name(&file), &name(&other))), "online");

    // A norm of each device's own features is another function, but on one device.
    let local = BOOST_YAML.replace("    rmsnorm_type: sync\n", "");
    let message = failure(&plan(&local, ""), 2);
    for part in
        ["tiny.yaml: model.model_config.rmsnorm_type: is missing", "4 devices", "sync, or online"]
    {
        assert!(message.contains(part), "{part} in {message}");
    }
    stdout(&plan(&local.replace("tp: 4", "tp: 1"), ""));
    let message = failure(&plan("model: [1\n", ""), 2);
    assert!(message.contains("is not YAML"), "{message}");
    let message = failure(&plan("hidden_size: 64\n", ""), 2);
    assert!(message.contains("model.model_config: is missing"), "{message}");

    // A dense one, whose initial weights are drawn by `init_method`.
    let dense = BOOST_YAML
        .replace("is_cola_llama_config", "is_llama_config")
        .replace("    attn_rank: 16\n    mlp_rank: 16\n    rmsnorm_type: sync\n", "");
    let planned = answer(&plan(&dense, "").replace("btp", "fullrank-tp"));
    assert_eq!(planned["search"]["status"], "optimal");
}
