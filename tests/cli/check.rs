//! `narrows check --numeric`.

use super::{json, narrows, stdout};

/// Plans of the published sizes have twins that compute their models.
#[test]
fn plans_of_large_models_are_run_small() {
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
        assert!(text.contains("It computes its model"), "{text}");
        let plain = json(&format!("check {file} --memory-limit none"));
        assert!(plain.get("numeric").is_none());
    }
    narrows("check no-such-file --numeric").assert().code(2);
}
