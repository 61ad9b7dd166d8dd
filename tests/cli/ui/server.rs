//! The answers of the server.

use std::fs;
use std::io::Write;
use std::net::TcpStream;

use serde_json::{Value, json};

use super::Server;
use crate::{failure, json};

/// A plan of the page is what `plan` finds for the same request.
#[test]
fn the_plan_follows_the_settings() {
    let server = Server::start("");
    for (settings, flags) in [
        (json!({"devices": 2}), "--devices 2"),
        (json!({"devices": 4, "global_batch": 8}), "--devices 4 --global-batch 8"),
        (
            json!({"devices": "2", "tensor": 2.0, "zero": "off"}),
            "--devices 2 --tensor 2 --zero off",
        ),
    ] {
        let mut settings = settings;
        settings["model"] = json!("cola-60m");
        settings["sequence_length"] = json!(512);
        let body = json!({"settings": settings});
        let (status, answer) = server.post("/api/plan", &body);
        assert_eq!(status, 200, "{answer}");
        let plan = json(&format!("plan --model cola-60m --sequence-length 512 {flags}"));
        assert_eq!(answer["decisions"], plan["decisions"], "{flags}");
        assert_eq!(answer["prediction"], plan["prediction"], "{flags}");
        assert_eq!(answer["search"]["status"], plan["search"]["status"], "{flags}");
        let figure = answer["figures"][0]["svg"].as_str().expect("a picture");
        assert!(figure.starts_with("<svg"), "{figure}");
        let details = answer["details"].as_str().expect("a report");
        assert!(details.contains("<h2>Where the time goes</h2>"), "{details}");
    }
}

/// Numbers of the model and of the hardware are set as `whatif` sets them.
#[test]
fn any_field_of_a_sweep_can_be_set() {
    let server = Server::start("--model cola-60m --sequence-length 512 --devices 2 --tensor 2");
    let step_time = |settings: Value| {
        let settings = server.settings(settings);
        let (status, answer) = server.post("/api/plan", &json!({"settings": settings}));
        assert_eq!(status, 200, "{answer}");
        answer["prediction"]["step_time_s"].as_f64().expect("a time")
    };
    let base = step_time(json!({}));
    assert!(step_time(json!({"rank": 64})) < base);
    assert!(step_time(json!({"hardware.links.intra_node.bandwidth_gbps": 10})) > base);
    assert!(step_time(json!({"model.blocks.count": 12})) > base);
    let (_, answer) = server.post("/api/fields", &json!({"settings": {"model": "llama-60m"}}));
    let fields = answer["fields"].as_array().expect("fields");
    let names: Vec<&str> = fields.iter().filter_map(|field| field["name"].as_str()).collect();
    for name in ["devices", "strategy", "model.blocks.count", "hardware.gemm.start_s"] {
        assert!(names.contains(&name), "{names:?}");
    }
    assert!(!names.contains(&"model.blocks.default.all.rank"), "llama has no ranks");
}

/// A search is remembered, but not beyond an edit of the files that it read.
#[test]
fn edited_files_are_planned_anew() {
    let folder = tempfile::tempdir().expect("a folder");
    let copy = |from: &str, edit: [&str; 2]| {
        let to = folder.path().join(from.rsplit('/').next().unwrap());
        let text = fs::read_to_string(from).unwrap();
        fs::write(&to, &text).unwrap();
        let edited = text.replace(edit[0], edit[1]);
        assert_ne!(text, edited, "{from} contains {}", edit[0]);
        (to, edited)
    };
    let (model, short_model) = copy("models/lax-1b.json", ["\"count\": 24", "\"count\": 4"]);
    let slow_memory =
        ["\"memory_bandwidth_bytes_per_s\": 2039", "\"memory_bandwidth_bytes_per_s\": 939"];
    let (hardware, slow_hardware) = copy("profiles/a100-80gb.json", slow_memory);
    let flags = format!(
        "--model {} --hardware {} --devices 2 --sequence-length 512",
        model.display(),
        hardware.display()
    );
    let server = Server::start(&flags);
    let check = |edit: &str| {
        let settings = server.settings(json!({}));
        let (status, answer) = server.post("/api/plan", &json!({"settings": settings}));
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["prediction"], json(&format!("plan {flags}"))["prediction"], "{edit}");
    };
    check("no edit");
    fs::write(&model, short_model).unwrap();
    check("another model");
    fs::write(&hardware, slow_hardware).unwrap();
    check("another hardware");
}

#[test]
fn settings_without_a_plan_are_refused_with_a_hint() {
    let server = Server::start("--model cola-60m");
    for (settings, field, message, hint) in [
        (json!({"model": "cola-7"}), "model", "no preset `cola-7`", "did you mean cola-7b?"),
        (json!({"model": "README.md"}), "model", "no preset", "--model FILE"),
        (json!({"hardware": "profiles/h100-sxm.json"}), "hardware", "no hardware profile", "FILE"),
        (json!({"devics": 4}), "", "no field is called `devics`", "devices"),
        (json!({"rank": "64,128"}), "rank", "more than one value", "whatif"),
        (json!({"rank": "abc"}), "rank", "not a whole number from 1", "a rank such as 256"),
        (json!({"rank": 0}), "rank", "not a whole number from 1", "a rank such as 256"),
        (json!({"global_batch": -1}), "global_batch", "expected a whole number", ""),
        (
            json!({"hardware.links.inter_node.bandwidth_gbps": 1e300}),
            "hardware.links.inter_node.bandwidth_gbps",
            "is too large",
            "",
        ),
        (json!({"global_batch": ""}), "global_batch", "has no value", "its default"),
        (json!({"devices": "1..999999+1"}), "devices", "more than one value", "whatif"),
        (json!({" model": "Cargo.toml"}), "model", "not the name of a field", "--list"),
        (
            json!({"model=Cargo.toml,x": "1"}),
            "model=Cargo.toml,x",
            "not the name of a field",
            "--list",
        ),
        (json!({"devices": 0}), "devices", "not between", ""),
        (json!({"devices": [1]}), "devices", "neither a number", ""),
        (json!({"devices": 6, "tensor": 4}), "devices", "not a multiple of 4", "divides"),
        (json!({"model": "llama-60m", "rank": 8}), "rank", "no factor pairs", "cola-7b"),
        (json!({"memory_limit": "1MiB"}), "", "no plan exists", "more devices"),
    ] {
        for path in ["/api/plan", "/api/baselines"] {
            let (status, answer) = server.post(path, &json!({"settings": settings}));
            assert_eq!(status, 200, "{settings}: {answer}");
            let problem = &answer["error"]["problems"][0];
            assert_eq!(problem["field"], field, "{settings}: {answer}");
            let text = |value: &Value| value.to_string();
            assert!(text(&problem["message"]).contains(message), "{settings}: {answer}");
            assert!(text(&problem["hints"]).contains(hint), "{settings}: {answer}");
        }
    }
    for (body, status) in [("{", 400), ("{}", 422), (r#"{"settings": {}, "file": 1}"#, 422)] {
        let headers = [&*server.host(), "Content-Type: application/json"];
        let answer = server.answer("POST /api/plan", &headers, body);
        assert_eq!(answer.status, status, "{body}: {}", answer.body);
        assert!(answer.body.contains("problems"), "{}", answer.body);
    }
}

/// The first answer may come before the proof, and says so.
#[test]
fn a_time_limit_ends_a_search_without_proof() {
    let server = Server::start("--model cola-1b --devices 8");
    let settings = server.settings(json!({}));
    let post = |body: Value| server.post("/api/plan", &body).1;
    let first = post(json!({"settings": settings, "time_limit_s": 0}));
    assert_eq!(first["search"]["status"], "time_limit", "{first}");
    let proven = post(json!({"settings": settings}));
    let plan = json("plan --model cola-1b --devices 8");
    assert_eq!(proven["decisions"], plan["decisions"]);
    assert_eq!(proven["search"]["status"], plan["search"]["status"]);
    // The proof is known now.
    let again = post(json!({"settings": settings, "time_limit_s": 0}));
    assert_eq!(again["search"]["status"], proven["search"]["status"]);
}

#[test]
fn baselines_stand_beside_the_plan() {
    let server = Server::start("--model cola-60m --devices 4 --sequence-length 512");
    let settings = server.settings(json!({}));
    let (status, answer) = server.post("/api/baselines", &json!({"settings": settings}));
    assert_eq!(status, 200, "{answer}");
    let baselines = answer["baselines"].as_array().expect("baselines");
    let step_time = |name: &str| {
        let baseline = baselines.iter().find(|baseline| baseline["name"] == name);
        let baseline = baseline.unwrap_or_else(|| panic!("no {name} in {baselines:#?}"));
        baseline["prediction"]["step_time_s"].as_f64().expect("a time")
    };
    let common = "--model cola-60m --devices 4 --sequence-length 512";
    // Baselines have the tensor axis of the plan, or that of a node.
    let prefix = "btp, tensor axis ";
    let names = baselines.iter().filter_map(|baseline| baseline["name"].as_str());
    let tensor = names.filter_map(|name| name.strip_prefix(prefix)).next().expect("a tensor axis");
    for (name, flags) in [
        ("pure data parallelism".to_owned(), "--tensor 1 --pipeline 1".to_owned()),
        (format!("{prefix}{tensor}"), format!("--strategy btp --tensor {tensor}")),
        (
            format!("vanilla-tp, tensor axis {tensor}"),
            format!("--strategy vanilla-tp --tensor {tensor}"),
        ),
    ] {
        let plan = json(&format!("plan {common} {flags}"));
        assert_eq!(step_time(&name), plan["prediction"]["step_time_s"].as_f64().expect("a time"));
    }
    let text = answer["details"].as_str().expect("a text");
    assert!(text.contains(&format!("{prefix}{tensor}")), "{text}");
}

/// Neither pages of other sites nor names that resolve to this machine reach the server.
#[test]
fn other_hosts_and_origins_are_refused() {
    let server = Server::start("");
    let port = server.port;
    let page = server.get("/");
    assert_eq!(page.status, 200);
    for header in ["content-security-policy: default-src 'none'", "nosniff", "same-origin"] {
        assert!(page.head.contains(header), "{}", page.head);
    }
    assert!(!page.head.contains("access-control"), "{}", page.head);
    let own = server.host();
    let local = format!("Host: localhost:{port}");
    let foreign = format!("Host: rebound.example:{port}");
    let own_origin = format!("Origin: http://127.0.0.1:{port}");
    let foreign_origin = format!("Origin: http://rebound.example:{port}");
    for (headers, status) in [
        (&[&*own][..], 200),
        (&[&local], 200),
        (&[&own, &own_origin], 200),
        (&[&foreign], 403),
        (&[], 403),
        (&[&own, &foreign_origin], 403),
        (&[&own, "Origin: null"], 403),
    ] {
        for path in ["/", "/api/options"] {
            let answer = server.answer(&format!("GET {path}"), headers, "");
            assert_eq!(answer.status, status, "{path} {headers:?}");
        }
    }
    // A form of another site sends no JSON without asking first.
    let answer = server.answer("POST /api/plan", &[&own, "Content-Type: text/plain"], "{}");
    assert_eq!(answer.status, 415, "{}", answer.body);
    let long = format!("{{\"settings\": {{\"model\": \"{}\"}}}}", "x".repeat(100 << 10));
    let headers = [&*own, "Content-Type: application/json"];
    assert_eq!(server.answer("POST /api/plan", &headers, &long).status, 413);
    assert_eq!(server.get("/../Cargo.toml").status, 404);
}

/// Files of the page load nothing from elsewhere.
#[test]
fn the_page_needs_no_network() {
    let server = Server::start("");
    for path in ["/", "/app.js", "/sort.js", "/style.css"] {
        let file = server.get(path).body;
        assert!(!file.is_empty());
        for reference in ["http:", "https:", "src=\"//", "@import", "url("] {
            assert!(!file.contains(reference), "{path}: {reference}");
        }
    }
}

#[test]
fn a_setting_that_is_left_out_has_its_default() {
    let flags = "--model cola-60m --devices 2 --global-batch 8 --sequence-length 512 --tensor 2";
    let server = Server::start(flags);
    let first = server.settings(json!({}));
    let expected = json!({"model": "cola-60m", "hardware": "a100-80gb", "devices": 2, "global_batch": 8,
        "sequence_length": 512, "tensor": 2});
    assert_eq!(first, expected);
    let decisions = |settings: Value| {
        let (status, answer) = server.post("/api/plan", &json!({"settings": settings}));
        assert_eq!(status, 200, "{answer}");
        answer["decisions"].clone()
    };
    assert_eq!(decisions(first), json(&format!("plan {flags}"))["decisions"]);
    let left = json!({"devices": 2, "sequence_length": 512});
    let plan = json("plan --model cola-60m --devices 2 --sequence-length 512");
    assert_eq!(decisions(left), plan["decisions"]);
}

#[test]
fn flags_are_what_the_page_begins_with() {
    let server = Server::start("--model models/mixed-ranks.json --devices 8 --hardware h100-sxm");
    let options: Value = serde_json::from_str(&server.get("/api/options").body).expect("JSON");
    let expected =
        json!({"model": "models/mixed-ranks.json", "hardware": "h100-sxm", "devices": 8});
    assert_eq!(options["settings"], expected);
    assert_eq!(options["models"][0]["name"], "models/mixed-ranks.json");
    let (status, answer) = server.post("/api/plan", &json!({"settings": options["settings"]}));
    assert_eq!(status, 200, "{answer}");
    let with_units = Server::start("--memory-limit 40GiB --tokens 1e9 --time-limit 60");
    let first = with_units.settings(json!({}));
    assert_eq!((&first["memory_limit"], &first["tokens"]), (&json!("40GiB"), &json!("1e9")));
    assert_eq!((&first["devices"], &first["time_limit"]), (&json!(16), &Value::Null));
    for (flags, message) in [
        ("--model cola-7", "did you mean cola-7b?"),
        ("--model -", "read only once"),
        ("--mtbf-hours 5", "--tokens"),
        ("--port 70000", "65535"),
    ] {
        let text = failure(&format!("ui {flags}"), 2);
        assert!(text.contains(message), "{text}");
    }
}

/// Ctrl-C ends the server at once, also in the middle of a search.
#[test]
fn ctrl_c_ends_the_server() {
    let mut server = Server::start("");
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).expect("a connection");
    let body = json!({"settings": {"model": "lax-40b", "devices": 512, "global_batch": 4096}});
    let body = body.to_string();
    let head = format!(
        "POST /api/plan HTTP/1.1\r\n{}\r\nContent-Type: application/json\r\nContent-Length: {}",
        server.host(),
        body.len()
    );
    write!(stream, "{head}\r\n\r\n{body}").expect("a request");
    assert_eq!(server.get("/api/options").status, 200, "a search does not block the page");
    server.interrupt();
    assert_eq!(server.child.wait().expect("an exit status").code(), Some(0));
}

#[test]
fn flags_that_cannot_be_planned_with_are_refused() {
    for (flags, part) in [
        ("--devices 0", "--devices: 0 is not between 1 and "),
        ("--devices 6 --tensor 4", "--devices: 6 devices are not a multiple of 4"),
        ("--model llama-60m --global-batch 0", "--global-batch: 0 is not between 1 and "),
    ] {
        let text = failure(&format!("ui {flags}"), 2);
        assert!(text.contains(part), "{text}");
    }
    // The page has other devices than 16 to offer.
    Server::start("--tensor 3");
}

#[test]
fn a_port_in_use_is_reported() {
    let server = Server::start("");
    let text = failure(&format!("ui --port {}", server.port), 2);
    assert!(
        text.contains(&format!("--port: 127.0.0.1:{} cannot be opened", server.port)),
        "{text}"
    );
    assert!(text.contains("--port 0"), "{text}");
}
