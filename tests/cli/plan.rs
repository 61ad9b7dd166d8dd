//! `narrows plan` and `explain`: published volumes, fixed decisions, limits and hints.

use std::fs;

use serde_json::{Value, json};

use super::{failure, json, narrows, stdout};

/// Four A100s, four sequences of 4096 tokens in one microbatch: the published measurement.
const PUBLISHED: &str = "--hardware a100-80gb --devices 4 --tensor 4 --global-batch 4 \
    --micro-batch 4 --sequence-length 4096";

const MIB: u64 = 1 << 20;

fn forward_all_reduce(answer: &Value) -> u64 {
    let volumes = &answer["prediction"]["block_collective_bytes"];
    volumes["forward"]["all_reduce"].as_u64().expect("an all-reduce")
}

#[test]
fn published_volumes() {
    for (model, strategy, mib) in [
        ("llama-7b", "fullrank-tp", 256),
        ("cola-7b", "vanilla-tp-published", 1328),
        ("cola-7b", "btp", 224),
    ] {
        let answer = json(&format!("plan --model {model} --strategy {strategy} {PUBLISHED}"));
        assert_eq!(forward_all_reduce(&answer), mib * MIB, "{model} {strategy}");
    }
}

/// Collective volumes for odd ranks that differ between linears and blocks, with fewer key and value heads than query
/// heads.
#[test]
fn volumes_follow_the_shapes_of_each_linear() {
    const LINEARS: [&str; 7] = ["q", "k", "v", "o", "gate", "up", "down"];
    let (hidden, heads, kv_heads, head_dim, d_ff) = (192, 12, 4, 32, 344);
    let model = |middle: [u64; 7], dense: bool| {
        let mut overrides = serde_json::Map::new();
        for (linear, rank) in LINEARS.iter().zip(middle) {
            overrides.insert(linear.to_string(), json!({ "rank": rank }));
        }
        let pair = json!({"rank": 16, "activation": "silu"});
        let blocks = match dense {
            true => json!({"count": 3, "default": {"product": "swiglu", "all": "dense"}}),
            false => json!({
                "count": 3, "default": {"product": "plain", "all": pair}, "overrides": {"1": overrides}
            }),
        };
        json!({
            "format": "narrows-model/1", "hidden": hidden, "vocab": 512, "heads": heads,
            "kv_heads": kv_heads, "head_dim": head_dim, "d_ff": d_ff, "blocks": blocks
        })
    };
    let (query, key_value) = (heads * head_dim, kv_heads * head_dim);
    let odd = [33, 7, 51, 77, 1, 63, 5];
    let even = [32, 8, 52, 76, 4, 64, 20];
    let sum = |ranks: [u64; 7]| ranks.iter().sum::<u64>();
    let whole_outputs = 2 * hidden + query + 2 * key_value + 2 * d_ff;
    let whole_inputs = 2 * hidden + query + d_ff;
    for (model, strategy, forward, backward) in [
        (model(odd, false), "btp", sum(odd), sum(odd)),
        (model(even, false), "btp", sum(even), sum(even)),
        (model(even, false), "vanilla-tp-published", whole_outputs, whole_inputs),
        (model(even, true), "fullrank-tp", 2 * hidden, 2 * hidden),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.json");
        std::fs::write(&path, model.to_string()).unwrap();
        let path = path.display();
        let flags = "--devices 4 --tensor 4 --global-batch 2 --micro-batch 2 --sequence-length 64";
        let answer = json(&format!("plan --model {path} --strategy {strategy} {flags}"));
        let volumes = &answer["prediction"]["block_collective_bytes"];
        let bytes = |columns: u64| columns * 2 * 64 * 2;
        for (pass, columns) in [("forward", forward), ("backward", backward)] {
            let kinds = volumes[pass].as_object().expect("kinds");
            assert_eq!(kinds["all_reduce"], bytes(columns), "{strategy} {pass}");
            let other =
                kinds.keys().find(|kind| !["all_reduce", "statistics"].contains(&kind.as_str()));
            assert_eq!(other, None, "{strategy} {pass}");
        }
    }
}

#[test]
fn a_baseline_without_a_tensor_axis_causes_a_warning() {
    let warning = |flags: &str| {
        let command = super::narrows(&format!("plan --model cola-tiny {flags}")).assert().success();
        String::from_utf8(command.get_output().stderr.clone()).expect("UTF-8")
    };
    let flags = "--devices 2 --global-batch 2 --strategy btp";
    assert!(
        warning(&format!("{flags} --data-parallel 2")).contains("`--strategy btp` has no effect")
    );
    assert_eq!(warning(&format!("{flags} --tensor 2")), "");
    assert_eq!(warning("--devices 2 --data-parallel 2"), "");
}

#[test]
fn every_strategy_is_planned_and_auto_is_no_slower() {
    let time = |model: &str, strategy: &str| {
        let answer = json(&format!("plan --model {model} --strategy {strategy} {PUBLISHED}"));
        let status = answer["search"]["status"].as_str().expect("a status");
        assert!(["optimal", "gap_limit"].contains(&status), "{model} {strategy}: {status}");
        answer["prediction"]["step_time_s"].as_f64().expect("a time")
    };
    let baselines = ["vanilla-tp", "vanilla-tp-published", "btp"];
    for (model, more) in [("cola-7b", &[][..]), ("llama-7b", &["fullrank-tp", "megatron-sp"][..])] {
        let best = time(model, "auto");
        for strategy in baselines.iter().chain(more) {
            assert!(best <= time(model, strategy) * (1.0 + 1e-9), "{model} {strategy}");
        }
    }
}

#[test]
fn a_dense_baseline_of_a_low_rank_model_hints_at_the_dense_counterpart() {
    let message = failure("plan --model cola-7b --strategy fullrank-tp", 2);
    assert!(message.contains("--model llama-7b"), "{message}");
    let message = failure("plan --model models/mixed-ranks.json --strategy megatron-sp", 2);
    assert!(message.contains("mixed-ranks-dense"), "{message}");
}

#[test]
fn json_has_every_key_that_scripts_rely_on() {
    let answer = json("plan --model cola-1b --devices 8 --global-batch 16 --pipeline 2");
    let prediction = &answer["prediction"];
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{value} in {answer}"));
    let step_time = number(&prediction["step_time_s"]);
    let interval = prediction["step_time_interval_s"].as_array().expect("two times");
    assert_eq!(interval.len(), 2);
    assert!(number(&interval[0]) <= step_time && step_time <= number(&interval[1]));
    assert_eq!(prediction["shapes_measured"], true);
    for entry in prediction["unmeasured"].as_array().expect("a list") {
        assert!(entry["kernel"].is_object() && (0.0..1.0).contains(&number(&entry["share"])));
        let distance = &entry["distance_octaves"];
        assert!(distance.is_null() || number(distance) > 1.0, "{entry}");
    }
    let tokens = 16.0 * 4096.0;
    assert!((number(&prediction["tokens_per_s"]) * step_time - tokens).abs() < 1e-3);
    assert!((0.0..1.0).contains(&number(&prediction["mfu"])));
    let peaks = prediction["peak_memory_bytes"].as_array().expect("one a stage");
    assert_eq!(peaks.len(), 2);
    assert!(peaks.iter().all(|peak| peak.as_u64().is_some_and(|bytes| bytes > 0)));

    let parts = prediction["breakdown_s"].as_object().expect("parts");
    let names = ["gemm", "attention", "elementwise", "collective_exposed"];
    let names: Vec<&str> = names.into_iter().chain(["bubble", "optimizer", "other"]).collect();
    assert_eq!(parts.keys().collect::<Vec<_>>(), names);
    let sum: f64 = parts.values().map(number).sum();
    assert!((sum - step_time).abs() < 1e-9 * step_time, "{sum} of {step_time}");
    for pass in ["forward", "backward", "redo"] {
        let volumes = prediction["block_collective_bytes"][pass].as_object().expect("kinds");
        assert!(volumes.values().all(Value::is_u64));
    }

    let search = &answer["search"];
    let statuses = ["optimal", "gap_limit", "time_limit"];
    assert!(statuses.contains(&search["status"].as_str().expect("a status")));
    for key in ["gap", "candidates_priced", "candidates_pruned", "wall_time_s"] {
        number(&search[key]);
    }
}

#[test]
fn a_summary_lists_the_unmeasured_kernels_with_the_largest_share() {
    let text = stdout("plan --model cola-1b --devices 4");
    let (_, rest) = text.split_once("nearest measured\n").expect("a table");
    let table: Vec<&str> = rest.lines().skip(1).take_while(|line| !line.is_empty()).collect();
    assert_eq!(table.len(), 6, "{rest}");
    assert!(table[0].contains(" %  ") && table[5].contains("more: --details lists them"), "{rest}");
    let verbose = stdout("plan --model cola-1b --devices 4 --verbose");
    assert!(verbose.lines().count() > text.lines().count() + 5, "{verbose}");
    let assumed = stdout("plan --model cola-1b --devices 4 --hardware h100-sxm");
    assert!(assumed.contains("No kernel of this plan was measured"), "{assumed}");
}

#[test]
fn decisions_follow_the_schema() {
    let schema: Value = serde_json::from_str(&super::stdout("schema plan")).expect("a schema");
    let answer = json("plan --model cola-tiny --devices 4 --global-batch 4 --tensor 2");
    jsonschema::validate(&schema, &answer["decisions"]).expect("a plan");
    for kind in ["model", "profile"] {
        let schema: Value =
            serde_json::from_str(&super::stdout(&format!("schema {kind}"))).unwrap();
        jsonschema::meta::validate(&schema).expect("a JSON Schema");
    }
}

#[test]
fn fixed_decisions_are_kept() {
    let flags = "--tensor 2 --pipeline 2 --data-parallel 2 --micro-batch 1 --zero 1 --recompute none \
        --norm sync --grouping off --weights sharded --executor eager --objective step-time \
        --time-limit 60";
    let answer = json(&format!("plan --model cola-tiny --devices 8 --global-batch 8 {flags}"));
    let decisions = &answer["decisions"];
    assert_eq!(decisions["mesh"], serde_json::json!({"tensor": 2, "pipeline": 2, "data": 2}));
    assert_eq!(decisions["workload"]["micro_batch"], 1);
    assert_eq!(decisions["zero"], "one");
    for block in decisions["blocks"].as_object().expect("blocks").values() {
        assert_eq!(block["grouping"], serde_json::json!({"qkv": false, "gate_up": false}));
        assert_eq!(block["redo"], serde_json::json!([]));
    }
}

#[test]
fn an_infeasible_request_exits_with_1_and_its_causes() {
    let arguments = "plan --model llama-350m --devices 4 --memory-limit 128MiB";
    let message = failure(arguments, 1);
    for part in ["no plan exists for llama-350m", "because", "128.0 MiB", "hint: --memory-limit"] {
        assert!(message.contains(part), "{message}");
    }
    let output = super::narrows(&format!("{arguments} --format json")).assert().code(1);
    let answer: Value = serde_json::from_slice(&output.get_output().stdout).expect("JSON");
    assert_eq!(answer["search"]["status"], "infeasible");
    assert!(answer["decisions"].is_null() && answer["prediction"].is_null());
    assert!(answer["search"]["gap"].is_null() && answer["search"]["bound_s"].is_null());
    assert!(answer["causes"].as_array().is_some_and(|causes| !causes.is_empty()));
}

#[test]
fn a_memory_limit_is_kept() {
    let answer =
        json(&format!("plan --model cola-7b --strategy btp --memory-limit 20GiB {PUBLISHED}"));
    let peak = answer["prediction"]["peak_memory_bytes"][0].as_u64().expect("bytes");
    assert!(peak <= 20 << 30, "{peak}");
    assert_eq!(answer["prediction"]["memory_limit_bytes"], 20_u64 << 30);
    let answer = json("plan --model cola-tiny --memory-limit none");
    assert!(answer["prediction"]["memory_limit_bytes"].is_null());
}

/// A plan file is priced for the work and compared with the memory limit of the flags, as by `cost`.
#[test]
fn explain_prices_a_plan_file_as_cost_does() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (plan, page) = (at("plan.json"), at("page.html"));
    let request = "--devices 2 --global-batch 4 --sequence-length 512";
    stdout(&format!("plan --model cola-60m {request} --output {plan}"));
    for flags in [
        "",
        "--global-batch 16",
        "--sequence-length 1024",
        "--grad-reduce-dtype bf16",
        "--memory-limit 390MiB",
    ] {
        let explained = json(&format!("explain {plan} {flags}"));
        let cost = json(&format!("cost {plan} {flags}"));
        assert_eq!(explained["given"]["prediction"], cost["prediction"], "{flags}");
    }
    let message = failure(&format!("explain {plan} --devices 4"), 2);
    assert!(message.contains("--devices: the mesh of the plan is "), "{message}");
    assert!(message.contains("hint: omit --devices, or omit the plan file"), "{message}");
    let command = format!("explain {plan} --memory-limit 390MiB --report {page}");
    let output = narrows(&command).output().expect("an answer");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).replace("\n  ", " ");
    let clause = " per device, the limit is 390.0 MiB";
    for text in [text(&output.stdout), text(&output.stderr), fs::read_to_string(&page).unwrap()] {
        assert!(text.contains(clause), "{text}");
    }
}

#[test]
fn explain_compares_with_baselines_and_the_dense_counterpart() {
    let answer = json("explain --model cola-1b --devices 4 --global-batch 4");
    let names: Vec<&str> = answer["alternatives"]
        .as_array()
        .expect("alternatives")
        .iter()
        .filter_map(|alternative| alternative["name"].as_str())
        .collect();
    for expected in [
        "btp",
        "vanilla-tp",
        "vanilla-tp-published",
        "fullrank-tp of llama-1b",
        "megatron-sp of llama-1b",
    ] {
        assert!(names.iter().any(|name| name.starts_with(expected)), "{expected} in {names:?}");
    }
    assert!(answer["binds"].as_array().is_some_and(|binds| !binds.is_empty()));
    assert_eq!(answer["search"]["status"], "optimal");
}

/// A plan file is priced for its own executor unless a flag selects another.
#[test]
fn a_plan_is_priced_for_its_executor() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("plan.json");
    let file = file.display();
    let small = "plan --model cola-tiny --devices 2 --global-batch 4 --tensor 2";
    let planned = json(&format!("{small} --executor eager --output {file}"));
    assert_eq!(planned["decisions"]["executor"], "eager");
    let again = json(&format!("cost {file}"));
    assert_eq!(again["prediction"], planned["prediction"]);
    let text = super::stdout(&format!("cost {file}"));
    assert!(text.contains("executor      eager"), "{text}");
    let output = super::narrows(&format!("cost {file} --executor captured")).assert().code(0);
    let message = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(message.contains("was priced for executor `eager`"), "{message}");
    let time_s = |document: &Value| document["prediction"]["step_time_s"].as_f64().unwrap();
    let [captured, compiled] = ["captured", "compiled"]
        .map(|executor| time_s(&json(&format!("cost {file} --executor {executor}"))));
    assert!(captured < compiled && compiled < time_s(&again), "{captured} {compiled}");
    assert!(json(small)["decisions"].get("executor").is_none());
}

#[test]
fn flags_without_effect_are_rejected_or_cause_a_warning() {
    let small = "plan --model cola-tiny --devices 2 --global-batch 4";
    let output = super::narrows(small).args(["--output", ""]).assert().code(2);
    let message = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(message.contains("--output: the file name is empty"), "{message}");
    for limit in ["-5", "-5GiB"] {
        let message = failure(&format!("{small} --memory-limit {limit}"), 2);
        assert!(message.contains("number of bytes such as 64GiB"), "{message}");
    }
    let output = super::narrows(&format!("{small} --zero 1 --data-parallel 1")).assert().code(0);
    let message = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(message.contains("`--zero 1` has no effect"), "{message}");
}

#[test]
fn hints_name_the_flags_that_would_make_a_plan_feasible() {
    let tight = "plan --model llama-350m --devices 4 --memory-limit 128MiB";
    let message = failure(&format!("{tight} --micro-batch 1"), 1);
    assert!(message.contains("hint: more devices\n"), "{message}");
    let message = failure(&format!("{tight} --micro-batch 2 --global-batch 8 --recompute none"), 1);
    let hint = "hint: more devices, a smaller --micro-batch or --recompute auto";
    assert!(message.contains(hint), "{message}");
    let odd = "plan --model cola-7b --devices 3 --tensor 3 --global-batch 3 --strategy btp";
    let message = failure(odd, 1);
    assert!(message.contains("cannot be split over 3 devices under these rules"), "{message}");
    assert!(message.contains("`q.a") || message.contains("`attention"), "{message}");
}

#[test]
fn explain_compares_every_axis_and_counts_omitted_alternatives() {
    let answer = json("explain --model cola-tiny --devices 6 --global-batch 12");
    let names: Vec<&str> = answer["alternatives"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|alternative| {
            alternative["name"].as_str()?.strip_prefix("best plan with tensor axis ")
        })
        .collect();
    assert!(names.len() >= 2 && names.contains(&"3"), "{names:?}");
    assert_eq!(answer["meshes"].as_array().unwrap().len(), 12);
    let omitted = answer["meshes_not_listed"].as_u64().unwrap();
    let text = super::stdout("explain --model cola-tiny --devices 6 --global-batch 12");
    assert!(
        omitted > 0 && text.contains(&format!("{omitted} configurations not listed")),
        "{omitted}: {text}"
    );
}

/// `--max-tensor` and `--within-node` bound the tensor axis of a search, and contradict a larger `--tensor`.
#[test]
fn the_tensor_axis_is_bounded() {
    const REQUEST: &str = "plan --model llama-1b --hardware a100-80gb-8 --global-batch 1 \
                           --sequence-length 1024";
    let tensor =
        |flags: &str| json(&format!("{REQUEST} {flags}"))["decisions"]["mesh"]["tensor"].clone();
    assert!(tensor("--devices 4").as_u64().expect("a size") > 2);
    assert_eq!(tensor("--devices 4 --max-tensor 2"), json!(2));
    assert!(
        tensor("--devices 16 --pipeline 1").as_u64().expect("a size") > 8,
        "one sequence, no more than one replica"
    );
    assert_eq!(tensor("--devices 16 --within-node tensor"), json!(8));
    let explained =
        super::stdout(&format!("{REQUEST} --devices 4 --max-tensor 2").replace("plan", "explain"));
    assert!(!explained.contains("tensor axis 4"), "{explained}");
    for (flags, problem) in [
        ("--devices 4 --tensor 4 --max-tensor 2", "4 exceeds the largest allowed, 2"),
        ("--devices 16 --tensor 16 --within-node tensor", "axes of 16 devices cross nodes of 8"),
        ("--devices 4 --max-tensor 0", "0 is not between 1 and"),
    ] {
        let output = super::narrows(&format!("{REQUEST} {flags}")).assert().code(2);
        let errors = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert!(errors.contains(problem), "{flags}: {errors}");
    }
}

/// The request of a plan that has one kind of overlap, with this tensor axis.
fn overlapped_request(tensor: u64) -> String {
    format!("--model cola-1b --devices 4 --tensor {tensor} --global-batch 4 --sequence-length 1024")
}

/// Checks that a kind of overlap, by its key in a plan, is chosen where the profile lets it; `--overlap off` and plans
/// without the key run in order, in a search and in a plan file.
fn check_overlap_follows_flag_and_profile(request: &str, key: &str) {
    let step = |answer: &Value| answer["prediction"]["step_time_s"].as_f64().expect("a step time");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("plan.json");
    let file = file.to_str().expect("a path");
    let auto = json(&format!("plan --hardware a100-80gb {request} --output {file}"));
    let off = json(&format!("plan --hardware a100-80gb {request} --overlap off"));
    assert_eq!(auto["decisions"][key], json!(true));
    assert_eq!(off["decisions"].get(key), None);
    assert!(step(&auto) < step(&off), "{auto:#}\n{off:#}");
    let priced_off = json(&format!("cost {file} --overlap off"));
    assert_eq!(step(&json(&format!("cost {file}"))), step(&auto));
    assert!(step(&priced_off) >= step(&off), "{priced_off:#}");
    let plan = std::fs::read_to_string(file).expect("the plan");
    std::fs::write(file, plan.replace(&format!("  \"{key}\": true,\n"), "")).expect("a file");
    assert_eq!(step(&json(&format!("cost {file}"))), step(&priced_off));
    assert_eq!(step(&json(&format!("cost {file} --overlap on"))), step(&auto));
    let on_cpus = json(&format!("plan --hardware cpu-local {request}"));
    assert_eq!(on_cpus["decisions"].get(key), None);
}

/// Reductions of gradients run during the last backward pass.
#[test]
fn gradient_reductions_overlap_where_the_hardware_lets_them() {
    let request = format!("{} --zero 0", overlapped_request(1));
    check_overlap_follows_flag_and_profile(&request, "overlap_grad_reduce");
}

/// Weights that ZeRO-1 has updated are gathered during the next forward pass where gradient reductions overlap, and the
/// report says so. A plan without the key gathers them at the end of the step.
#[test]
fn weights_are_gathered_during_the_next_forward_pass() {
    const KEY: &str = "overlap_param_gather";
    let step = |answer: &Value| answer["prediction"]["step_time_s"].as_f64().expect("a step time");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("plan.json");
    let file = file.to_str().expect("a path");
    let request = format!("plan --hardware a100-80gb {} --zero 1", overlapped_request(1));
    let auto = json(&format!("{request} --output {file}"));
    assert_eq!(auto["decisions"][KEY], json!(true));
    assert_eq!(json(&format!("{request} --overlap off"))["decisions"].get(KEY), None);
    assert_eq!(step(&json(&format!("cost {file}"))), step(&auto));
    let plan = std::fs::read_to_string(file).expect("the plan");
    std::fs::write(file, plan.replace(&format!("  \"{KEY}\": true,\n"), "")).expect("a file");
    assert!(step(&json(&format!("cost {file}"))) > step(&auto));
    assert_eq!(step(&json(&format!("cost {file} --overlap on"))), step(&auto));
    let text = super::stdout(&request);
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let overlap =
        "during the last backward pass; weights are gathered during the first forward pass";
    assert!(text.contains(overlap), "{text}");
}

/// Without a memory limit, the fastest microbatch would have more tokens than a kernel can index.
#[test]
fn microbatches_stay_within_what_kernels_index() {
    let flags = "--devices 1 --global-batch 8388608 --sequence-length 256 --memory-limit none";
    let answer = json(&format!("plan --model cola-60m --hardware a100-80gb {flags}"));
    let micro_batch = answer["decisions"]["workload"]["micro_batch"].as_u64().unwrap();
    assert!(micro_batch > 1 && micro_batch * 256 < 1 << 31, "{micro_batch}");
}

/// Tensor-axis collectives overlap with weight-gradient GEMMs, and the report says so.
#[test]
fn tensor_collectives_overlap_where_the_hardware_lets_them() {
    let request = format!("{} --micro-batch 4", overlapped_request(4));
    check_overlap_follows_flag_and_profile(&request, "overlap_tensor_collectives");
    let text = super::stdout(&format!("plan --hardware a100-80gb {request}"));
    assert!(
        text.contains("tensor-axis collectives overlapped with weight-gradient GEMMs"),
        "{text}"
    );
}

/// With several microbatches, tensor-axis collectives overlap with another one, and the report says so.
#[test]
fn pairs_of_microbatches_overlap_where_the_hardware_lets_them() {
    const KEY: &str = "overlap_microbatch_pairs";
    let step = |answer: &Value| answer["prediction"]["step_time_s"].as_f64().expect("a step time");
    let request = overlapped_request(4);
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("plan.json").display().to_string();
    let auto = json(&format!("plan --hardware a100-80gb {request} --output {file}"));
    let off = json(&format!("plan --hardware a100-80gb {request} --overlap off"));
    assert_eq!((&auto["decisions"][KEY], off["decisions"].get(KEY)), (&json!(true), None));
    assert!(step(&auto) < step(&off), "{auto:#}\n{off:#}");
    for flags in ["", "--overlap on"] {
        assert_eq!(step(&json(&format!("cost {file} {flags}"))), step(&auto), "{flags}");
    }
    let priced_off = json(&format!("cost {file} --overlap off"));
    assert!(step(&priced_off) >= step(&off), "{priced_off:#}");
    let text = super::stdout(&format!("plan --hardware a100-80gb {request}"));
    assert!(text.contains("tensor-axis collectives in pairs of microbatches"), "{text}");
    let on_cpus = json(&format!("plan --hardware cpu-local {request}"));
    assert_eq!(on_cpus["decisions"].get(KEY), None);
}

/// Frequencies of RoPE change no price. A sliding window changes that of attention where it hides keys.
#[test]
fn configs_with_scaled_rope_and_windows_are_planned() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    let plan = |model_type: &str, more: Value| {
        let mut config = json!({
            "model_type": model_type, "hidden_size": 256, "vocab_size": 512, "num_attention_heads": 4,
            "num_key_value_heads": 4, "intermediate_size": 512, "num_hidden_layers": 2,
            "max_position_embeddings": 4096
        });
        config.as_object_mut().unwrap().append(&mut more.as_object().unwrap().clone());
        std::fs::write(&path, config.to_string()).unwrap();
        json(&format!("plan --model {} --sequence-length 2048", path.display()))
    };
    let plain = plan("llama", json!({}));
    let yarn = json!({"rope_type": "yarn", "factor": 4.0});
    let scaled = plan("llama", json!({"rope_scaling": yarn, "partial_rotary_factor": 0.5}));
    assert_eq!(scaled["prediction"], plain["prediction"]);
    let windowed = |window: u64| plan("mistral", json!({"sliding_window": window}));
    assert_eq!(windowed(2048)["prediction"], plain["prediction"]);
    let step_s = |plan: &Value| plan["prediction"]["step_time_s"].as_f64().unwrap();
    let narrow = windowed(256);
    assert!(step_s(&narrow) < step_s(&plain), "{narrow}");
}
