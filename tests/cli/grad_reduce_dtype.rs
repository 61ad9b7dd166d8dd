//! `--grad-reduce-dtype`: the format in which gradients are reduced over the replicas.

use serde_json::Value;

use super::{failure, json, stdout};

/// Reductions that nothing hides.
const EXPOSED: &str = "--model cola-1b --devices 16 --global-batch 16 --sequence-length 1024 --tensor 1 --pipeline 1 \
                       --micro-batch 1 --overlap off";

fn step_time(answer: &Value) -> f64 {
    answer["prediction"]["step_time_s"].as_f64().expect("a time")
}

/// Reductions in bf16 take less time, a plan file names the format, and whatever reads the file keeps it unless a flag
/// changes it.
#[test]
fn gradients_are_reduced_in_the_format_of_the_flag() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("plan.json").display().to_string();
    for zero in ["0", "1", "3"] {
        let plan = |flags: &str| json(&format!("plan {EXPOSED} --zero {zero} {flags}"));
        let fp32 = plan("");
        let bf16 = plan(&format!("--grad-reduce-dtype bf16 --output {file}"));
        assert_eq!(fp32["decisions"].get("grad_reduce_dtype"), None);
        assert_eq!(bf16["decisions"]["grad_reduce_dtype"], "bf16");
        assert!(step_time(&bf16) < 0.97 * step_time(&fp32), "ZeRO-{zero}: {bf16:#}\n{fp32:#}");
        assert_eq!(plan("--grad-reduce-dtype fp32")["decisions"], fp32["decisions"]);
        let cost = |flags: &str| json(&format!("cost {file} {flags}"));
        assert_eq!(step_time(&cost("")), step_time(&bf16));
        assert!(step_time(&cost("--grad-reduce-dtype fp32")) >= step_time(&fp32));
    }
    assert!(stdout(&format!("check {file}")).contains("is proven correct"));
    assert!(stdout(&format!("cost {file}")).contains("gradients     reduced in bf16"));
    let compared = json(&format!("compare {file} --with-search"));
    assert_eq!(compared["plans"][1]["decisions"]["grad_reduce_dtype"], "bf16");
    let explained = stdout(&format!("explain {EXPOSED} --grad-reduce-dtype bf16"));
    assert!(explained.contains("gradients reduced in bf16"), "{explained}");
    let swept = json(&format!("whatif {EXPOSED} --zero 1 --sweep grad-reduce-dtype=fp32,bf16"));
    let [fp32, bf16] = [0, 1].map(|point| step_time(&swept["points"][point]));
    assert!(bf16 < fp32, "{swept:#}");
}

#[test]
fn bf16_reductions_need_mixed_precision() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("plan.json").display().to_string();
    let request = "plan --model cola-tiny --devices 2 --data-parallel 2 --hardware cpu-local";
    let message = failure(&format!("{request} --grad-reduce-dtype bf16"), 2);
    assert!(message.contains("--grad-reduce-dtype: `bf16` needs mixed precision"), "{message}");
    assert!(message.contains("hint: fp32"), "{message}");
    stdout(&format!("{request} --output {file}"));
    let message = failure(&format!("cost {file} --grad-reduce-dtype bf16"), 2);
    assert!(message.contains("grad_reduce_dtype: `bf16` needs mixed precision"), "{message}");
    let text = std::fs::read_to_string(&file).expect("a plan");
    for (value, expected) in
        [("bf16", "`bf16` needs mixed precision"), ("fp16", "expected `fp32` or `bf16`")]
    {
        let field = format!("\"grad_reduce_dtype\": \"{value}\",\n  \"mesh\"");
        std::fs::write(&file, text.replacen("\"mesh\"", &field, 1)).expect("it is written");
        let message = failure(&format!("cost {file}"), 2);
        assert!(message.contains(expected) && message.contains("grad_reduce_dtype"), "{message}");
    }
}
