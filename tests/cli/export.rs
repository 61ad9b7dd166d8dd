//! `narrows export`: configurations of other frameworks, and what survives in them.

use std::path::Path;

use narrows_plan::Plan;
use serde_json::{Value, json};
use yaml_rust2::{Yaml, YamlLoader};

use super::{failure, json as answer, narrows, stdout};

/// A plan file in a folder of its own.
struct PlanFile {
    folder: tempfile::TempDir,
}

impl PlanFile {
    fn new(request: &str) -> PlanFile {
        let folder = tempfile::tempdir().expect("a folder");
        let plan = PlanFile { folder };
        stdout(&format!("plan {request} --output {}", plan.path("plan.json")));
        plan
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn export(&self, flags: &str) -> String {
        format!("export {} {flags}", self.path("plan.json"))
    }

    /// The fate of every decision, by its name.
    fn fates(&self, framework: &str) -> Vec<(String, String)> {
        let answer = answer(&self.export(&format!("--to {framework} --allow-loss")));
        let rows = answer["decisions"].as_array().expect("decisions").clone();
        let word = |value: &Value| value.as_str().expect("a word").to_owned();
        rows.iter().map(|row| (word(&row["decision"]), word(&row["fate"]))).collect()
    }

    fn names_with_fate(&self, framework: &str, fate: &str) -> Vec<String> {
        let fates = self.fates(framework).into_iter();
        fates.filter(|(_, other)| other == fate).map(|(name, _)| name).collect()
    }
}

/// A dense model whose plan every framework expresses, apart from where weights start.
fn replicas() -> PlanFile {
    PlanFile::new(
        "--model llama-60m --devices 4 --tensor 1 --pipeline 1 --global-batch 16 --micro-batch 2 \
         --sequence-length 1024 --zero one",
    )
}

fn stages() -> PlanFile {
    PlanFile::new(
        "--model llama-60m --devices 4 --tensor 2 --pipeline 2 --data-parallel 1 --global-batch 8 --micro-batch 1 \
         --sequence-length 1024 --strategy megatron-sp --schedule interleaved",
    )
}

/// The frameworks that the help lists.
fn frameworks() -> Vec<String> {
    let help = stdout("export -h");
    let (_, values) = help.split_once("[possible values: ").expect("values of --to");
    let (values, _) = values.split_once(']').expect("the end of the values");
    values.split(',').map(|name| name.trim().to_owned()).collect()
}

fn bottleneck() -> PlanFile {
    PlanFile::new(
        "--model cola-1b --devices 4 --tensor 4 --pipeline 1 --global-batch 4 --micro-batch 2 \
         --sequence-length 1024 --strategy btp --norm online",
    )
}

/// A decision that no row names would be dropped without a word.
#[test]
fn every_field_of_a_plan_is_a_decision() {
    let plan = replicas();
    for framework in frameworks() {
        let names: Vec<String> = plan.fates(&framework).into_iter().map(|(name, _)| name).collect();
        let schema = Plan::schema();
        for field in schema["properties"].as_object().expect("fields").keys() {
            // The version of the format, the hardware that predictions are for, and a part of `mesh.context`.
            if ["format", "hardware", "context_attention"].contains(&field.as_str()) {
                continue;
            }
            let within = format!("{field}.");
            let is_named = names.iter().any(|name| name == field || name.starts_with(&within));
            assert!(is_named, "{framework} has no row for {field}");
        }
    }
}

#[test]
fn toml_is_read_back_with_the_sizes_of_the_plan() {
    let text = stdout(&stages().export("--to torchtitan --allow-loss --output -"));
    let config: toml::Table = toml::from_str(&text).expect("TOML");
    let parallelism = &config["parallelism"];
    let size = |key: &str| parallelism[key].as_integer();
    assert_eq!(size("tensor_parallel_degree"), Some(2));
    assert_eq!(size("pipeline_parallel_degree"), Some(2));
    assert_eq!(size("pipeline_parallel_microbatch_size"), Some(1));
    assert_eq!(parallelism["pipeline_parallel_schedule"].as_str(), Some("Interleaved1F1B"));
    let parts = parallelism["module_fqns_per_model_part"].as_array().expect("parts");
    let modules: Vec<&str> = parts
        .iter()
        .flat_map(|part| part.as_array().expect("modules"))
        .flat_map(|m| m.as_str())
        .collect();
    let layers: Vec<String> = (0..8).map(|layer| format!("layers.{layer}")).collect();
    let layers: Vec<&str> = layers.iter().map(String::as_str).collect();
    assert_eq!(modules, [&["tok_embeddings"], &layers[..], &["norm", "output"]].concat());
    assert_eq!(config["training"]["seq_len"].as_integer(), Some(1024));
    assert_eq!(config["training"]["global_batch_size"].as_integer(), Some(8));
}

/// Torchtitan's `llama3` scales RoPE by 8 where a flavor does not state a factor.
#[test]
fn torchtitan_gets_unscaled_frequencies() {
    let text = stdout(&replicas().export("--to torchtitan --output -"));
    for line in [
        "from torchtitan.models.llama3.model.args import RoPEScalingArgs",
        "rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
}

#[test]
fn yaml_is_read_back_with_the_sizes_of_the_plan() {
    let text = stdout(&replicas().export("--to nanotron --output -"));
    let config = &YamlLoader::load_from_str(&text).expect("YAML")[0];
    assert_eq!(config["parallelism"]["dp"], Yaml::Integer(4));
    assert_eq!(config["optimizer"]["zero_stage"], Yaml::Integer(1));
    assert_eq!(config["tokens"]["batch_accumulation_per_replica"], Yaml::Integer(2));
    assert_eq!(config["model"]["model_config"]["rms_norm_eps"].as_f64(), Some(1e-6));
    assert_eq!(config["model"]["model_config"]["pad_token_id"], Yaml::Null);

    let text = stdout(&bottleneck().export("--to nanotron --output -"));
    let config = &YamlLoader::load_from_str(&text).expect("YAML")[0];
    let model = &config["model"]["model_config"];
    assert_eq!(model["is_cola_llama_config"], Yaml::Boolean(true));
    assert_eq!(
        (&model["attn_rank"], &model["mlp_rank"]),
        (&Yaml::Integer(512), &Yaml::Integer(512))
    );
    assert_eq!(model["rmsnorm_type"].as_str(), Some("online"));
    assert!(text.contains("# Start 4 processes of examples/cola/train_cola.py,"), "{text}");
}

#[test]
fn nanotron_gets_the_special_tokens_of_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    let special = |(bos, eos): (Value, Value)| {
        let config = json!({
            "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
            "num_attention_heads": 4, "max_position_embeddings": 64, "vocab_size": 256,
            "bos_token_id": bos, "eos_token_id": eos
        });
        std::fs::write(&path, config.to_string()).unwrap();
        let model = format!("--model {}", path.display());
        let plan = PlanFile::new(&format!("{model} --devices 1"));
        let text = stdout(&plan.export(&format!("{model} --to nanotron --allow-loss --output -")));
        let config = &YamlLoader::load_from_str(&text).expect("YAML")[0];
        let model = &config["model"]["model_config"];
        [model["bos_token_id"].as_i64(), model["eos_token_id"].as_i64()]
    };
    assert_eq!(special((json!(5), json!([7, 8]))), [Some(5), Some(7)]);
    assert_eq!(special((json!(0), json!(1))), [Some(0), Some(1)]);
    // Nanotron's own tokens are left to it.
    assert_eq!(special((json!(null), json!(null))), [None, None]);
}

#[test]
fn bash_reads_the_arguments_of_megatron() {
    let plan = stages();
    let file = plan.path("arguments.sh");
    stdout(&plan.export(&format!("--to megatron --output {file}")));
    let script = format!("source {file} && printf '%s\\n' \"${{MEGATRON_ARGS[@]}}\"");
    let output = match std::process::Command::new("bash").args(["-euc", &script]).output() {
        Ok(output) => output,
        Err(error) => return println!("skipped: bash: {error}"),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let words = String::from_utf8(output.stdout).expect("UTF-8");
    let words: Vec<&str> = words.lines().collect();
    for pair in [
        ["--tensor-model-parallel-size", "2"],
        ["--pipeline-model-parallel-layout", "Et*2|t*2|t*2|t*2L"],
        ["--micro-batch-size", "1"],
    ] {
        assert!(words.windows(2).any(|words| words == pair), "{pair:?} in {words:?}");
    }
    assert!(words.contains(&"--sequence-parallel"), "{words:?}");
}

#[test]
fn a_lost_decision_is_refused_unless_losses_are_allowed() {
    let plan = bottleneck();
    let file = plan.path("arguments.sh");
    for framework in ["megatron", "torchtitan"] {
        let message = failure(&plan.export(&format!("--to {framework} --output {file}")), 1);
        for part in ["model.linears: `factor pairs` is lost", "blocks.ops: ", "--allow-loss"] {
            assert!(message.contains(part), "{part} in {message}");
        }
        assert!(!Path::new(&file).exists());
        let lost = plan.names_with_fate(framework, "not-expressible");
        assert!(lost.starts_with(&["model.linears".into()]), "{lost:?}");
    }
    let report = stdout(&plan.export(&format!("--to megatron --allow-loss --output {file}")));
    assert!(report.contains("Not expressible"), "{report}");
    let written = std::fs::read_to_string(&file).expect("a file");
    assert!(written.contains("# not expressible: model.linears: has no factor pairs"), "{written}");

    // Every layout of BTP is that of BOOST's classes.
    assert!(plan.names_with_fate("nanotron", "not-expressible").is_empty());
}

/// Biases of q, k and v and sliding windows are options of Megatron-LM; norms of heads also of torchtitan.
#[test]
fn biases_norms_of_heads_and_windows_are_options_or_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let block = r#"{"product": "swiglu", "all": "dense", FIELD}"#;
    for (field, megatron, lost) in [
        ("\"qkv_bias\": true", "--add-qkv-bias", &["torchtitan", "nanotron"][..]),
        ("\"qk_norm\": true", "--qk-layernorm", &["nanotron"]),
        (
            r#""attention": {"sliding_window": 64}"#,
            "--window-size 63,0",
            &["torchtitan", "nanotron"],
        ),
    ] {
        let model = format!(
            r#"{{"format": "narrows-model/1", "name": "m", "hidden": 256, "vocab": 512, "heads": 4, "d_ff": 688,
            "blocks": {{"count": 2, "default": {}}}}}"#,
            block.replace("FIELD", field)
        );
        std::fs::write(at("m.json"), model).expect("a model file");
        let request = "--devices 2 --tensor 2 --strategy megatron-sp --sequence-length 128";
        stdout(&format!("plan --model {} {request} --output {}", at("m.json"), at("plan.json")));
        let export = format!("export {} --model {} --to", at("plan.json"), at("m.json"));
        assert!(stdout(&format!("{export} megatron")).contains(megatron), "{megatron}");
        for framework in ["torchtitan", "nanotron"] {
            let answer = answer(&format!("{export} {framework} --allow-loss"));
            let rows = answer["decisions"].as_array().expect("decisions").iter();
            let shape = rows.clone().find(|row| row["decision"] == "model").expect("a model");
            let is_lost = shape["fate"] == "not-expressible";
            assert_eq!(is_lost, lost.contains(&framework), "{framework}: {shape}");
        }
    }
}

/// Megatron-LM alone has blocks without rotation, all of them or some.
#[test]
fn blocks_without_positions_are_options_of_megatron() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let none = r#""positions": "none""#;
    for (all, second, options) in [
        (none, none, &["  --position-embedding-type none\n"][..]),
        (
            r#""qk_norm": false"#,
            none,
            &["--position-embedding-type rope\n", "--no-rope-freq '[0,1]'\n"],
        ),
    ] {
        let model = format!(
            r#"{{"format": "narrows-model/1", "name": "m", "hidden": 256, "vocab": 512, "heads": 4, "d_ff": 688,
            "blocks": {{"count": 2, "default": {{"product": "swiglu", "all": "dense", {all}}}, "overrides": {{"1": {{{second}}}}}}}}}"#
        );
        std::fs::write(at("m.json"), model).expect("a model file");
        let request = "--devices 1 --sequence-length 128";
        stdout(&format!("plan --model {} {request} --output {}", at("m.json"), at("plan.json")));
        let export = format!("export {} --model {} --to", at("plan.json"), at("m.json"));
        let arguments = stdout(&format!("{export} megatron"));
        for option in options {
            assert!(arguments.contains(option), "{option} in {arguments}");
        }
        for framework in ["torchtitan", "nanotron"] {
            let message = failure(&format!("{export} {framework}"), 1);
            assert!(message.contains("would rotate queries and keys in all blocks"), "{message}");
        }
    }
}

/// Blocks that differ in their attention have no common shape.
#[test]
fn windows_biases_and_norms_of_some_blocks_are_lost() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    for field in
        [r#""attention": {"sliding_window": 8}"#, r#""qkv_bias": true"#, r#""qk_norm": true"#]
    {
        let model = format!(
            r#"{{"format": "narrows-model/1", "name": "m", "hidden": 256, "vocab": 512, "heads": 4, "d_ff": 688,
            "blocks": {{"count": 2, "default": {{"product": "swiglu", "all": "dense"}}, "overrides": {{"1": {{{field}}}}}}}}}"#
        );
        std::fs::write(at("m.json"), model).expect("a model file");
        let request = "--devices 1 --sequence-length 128";
        stdout(&format!("plan --model {} {request} --output {}", at("m.json"), at("plan.json")));
        let export = format!("export {} --model {} --to", at("plan.json"), at("m.json"));
        for framework in ["megatron", "torchtitan", "nanotron"] {
            let answer = answer(&format!("{export} {framework} --allow-loss"));
            let rows = answer["decisions"].as_array().expect("decisions");
            let lost = rows.iter().any(|row| row["fate"] == "not-expressible");
            assert!(lost, "{framework}, {field}: {answer}");
        }
    }
}

/// Every schedule but plain 1F1B, and every stage of ZeRO but the first, is missing somewhere.
#[test]
fn schedules_and_stages_of_zero_that_are_missing_are_named() {
    let pipeline = "--model llama-60m --devices 2 --tensor 1 --pipeline 2 --global-batch 8 --micro-batch 1 \
                    --sequence-length 1024";
    let zero_bubble = PlanFile::new(&format!("{pipeline} --schedule zero-bubble"));
    for framework in ["megatron", "nanotron", "torchtitan"] {
        let lost = zero_bubble.names_with_fate(framework, "not-expressible");
        assert!(lost.contains(&"schedule".into()), "{framework}: {lost:?}");
    }
    let zero3 = PlanFile::new(
        "--model llama-60m --devices 4 --tensor 1 --pipeline 1 --global-batch 16 --micro-batch 2 \
         --sequence-length 1024 --zero three",
    );
    assert_eq!(zero3.names_with_fate("nanotron", "not-expressible"), ["zero"]);
    assert!(zero3.names_with_fate("megatron", "not-expressible").is_empty());
    assert!(zero3.names_with_fate("torchtitan", "not-expressible").is_empty());
}

/// FSDP of torchtitan and of Megatron-LM overlap collectives that a plan does not overlap.
#[test]
fn overlap_that_is_always_on_is_approximated() {
    let plan = |flags: &str| {
        PlanFile::new(&format!(
            "--model llama-60m --devices 4 --tensor 1 --pipeline 1 --global-batch 16 --micro-batch 2 \
             --sequence-length 1024 {flags}",
        ))
    };
    let approximated = |plan: &PlanFile, framework: &str| {
        let names = plan.names_with_fate(framework, "approximated").into_iter();
        names.filter(|name| name.starts_with("overlap_")).collect::<Vec<_>>()
    };
    let [reduce, gather] = ["overlap_grad_reduce", "overlap_param_gather"];
    for (zero, torchtitan, megatron) in [
        ("one", &[reduce, gather][..], &[][..]),
        ("two", &[reduce, gather], &[reduce]),
        ("three", &[reduce], &[reduce]),
    ] {
        let off = plan(&format!("--zero {zero} --overlap off"));
        assert_eq!(approximated(&off, "torchtitan"), torchtitan, "ZeRO {zero}");
        assert_eq!(approximated(&off, "megatron"), megatron, "ZeRO {zero}");
        let on = plan(&format!("--zero {zero} --overlap on"));
        assert!(approximated(&on, "torchtitan").is_empty(), "ZeRO {zero}");
    }

    // Gathers of ZeRO-2 overlap in Megatron-LM where they do in the plan.
    let arguments = |flags: &str| stdout(&plan(flags).export("--to megatron"));
    assert!(arguments("--zero two --overlap on").contains("--overlap-param-gather\n"));
    assert!(!arguments("--zero two --overlap off").contains("--overlap-param-gather"));
}

#[test]
fn the_answer_has_the_configuration() {
    let plan = replicas();
    let file = plan.path("plan.yaml");
    let answer = answer(&plan.export(&format!("--to nanotron --output {file}")));
    assert_eq!(answer["framework"], "Nanotron at 2411b02");
    let written = std::fs::read_to_string(&file).expect("a file");
    assert_eq!(answer["configuration"], json!(written));
    let row = |name: &str| {
        let rows = answer["decisions"].as_array().expect("rows").iter();
        rows.clone().find(|row| row["decision"] == name).expect("a row").clone()
    };
    assert_eq!(row("mesh.data")["options"], json!({"parallelism.dp": 4}));
    assert_eq!(row("mesh.data")["difference"], Value::Null);
    assert_eq!(row("executor")["fate"], "approximated");

    // A refused plan has an answer too, and no file.
    let (plan, file) = (bottleneck(), plan.path("refused.sh"));
    let command = plan.export(&format!("--to megatron --format json --output {file}"));
    let output = narrows(&command).assert().code(1).get_output().clone();
    let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(answer["decisions"][1]["fate"], "not-expressible");
    assert_eq!(answer["configuration"], Value::Null);
    assert!(!Path::new(&file).exists());
    let lossy = super::json(&plan.export("--to megatron --allow-loss"));
    let text = lossy["configuration"].as_str().expect("a configuration");
    assert!(text.contains("# not expressible: model.linears"), "{text}");

    let message = failure(&plan.export("--to megatron --format json --output -"), 2);
    assert!(message.contains("would both go to standard output"), "{message}");
}
