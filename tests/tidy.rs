//! Rules that the compiler does not check: the direction of dependencies, the size of files, unfinished work, local
//! paths, and links in documents.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Workspace dependencies that each crate may have; tests may use any crate.
const GRAPH: &[(&str, &[&str])] = &[
    ("narrows-plan", &[]),
    ("narrows-profiles", &[]),
    ("narrows-cost-model", &["narrows-plan", "narrows-profiles"]),
    ("narrows-calibration", &["narrows-cost-model", "narrows-plan", "narrows-planner"]),
    ("narrows-planner", &["narrows-cost-model", "narrows-plan"]),
    ("narrows-runtime", &["narrows-plan"]),
    ("narrows-cluster", &["narrows-plan", "narrows-runtime"]),
    ("narrows-cpu", &["narrows-plan", "narrows-runtime"]),
    ("narrows-cuda", &["narrows-plan", "narrows-runtime"]),
    ("narrows-reference", &["narrows-plan", "narrows-runtime"]),
    ("narrows-fake-cuda", &["narrows-cuda"]),
    (
        "narrows-test-support",
        &["narrows-cost-model", "narrows-plan", "narrows-reference", "narrows-runtime"],
    ),
    (
        "narrows",
        &[
            "narrows-calibration",
            "narrows-cluster",
            "narrows-cost-model",
            "narrows-cpu",
            "narrows-cuda",
            "narrows-plan",
            "narrows-planner",
            "narrows-reference",
            "narrows-runtime",
        ],
    ),
];

/// Maximum lines of a Rust file; a longer one needs a reason.
const LINES_MAX: usize = 700;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn crates_depend_in_one_direction() {
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let name = |value: &serde_json::Value| value["name"].as_str().expect("a name").to_string();
    let ours: BTreeSet<String> = packages.iter().map(name).collect();
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in packages {
        let dependencies = package["dependencies"].as_array().expect("dependencies");
        let within = dependencies.iter().filter(|value| value["kind"] != "dev").map(name);
        let within = within.filter(|name| ours.contains(name)).collect();
        found.insert(name(package), within);
    }
    let expected: BTreeMap<String, BTreeSet<String>> = GRAPH
        .iter()
        .map(|(name, may)| (name.to_string(), may.iter().map(|n| n.to_string()).collect()))
        .collect();
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (package, dependencies) in &found {
        let extra: Vec<_> = dependencies.difference(&expected[package]).collect();
        assert!(extra.is_empty(), "{package} may not depend on {extra:?}: see ARCHITECTURE.md");
    }
}

#[test]
fn no_rust_file_is_too_long() {
    let long: Vec<String> = files()
        .into_iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .map(|path| (text(&path).lines().count(), path))
        .filter(|(lines, _)| *lines > LINES_MAX)
        .map(|(lines, path)| format!("{} has {lines} lines", shown(&path)))
        .collect();
    assert!(long.is_empty(), "more than {LINES_MAX} lines are usually two concerns: {long:#?}");
}

/// Files that may name a baseline: as a restriction, and in an explanation.
const NAME_BASELINES: [&str; 2] = ["plan/src/strategy/baseline.rs", "planner/src/explain.rs"];

#[test]
fn the_search_has_no_special_case_for_a_baseline() {
    let mut found = vec![];
    for path in files() {
        let name = shown(&path).replace('\\', "/");
        let source = name.contains("/src/");
        if !source || NAME_BASELINES.contains(&name.as_str()) {
            continue;
        }
        for (number, line) in text(&path).lines().enumerate() {
            let code = line.split("//").next().unwrap_or("").to_ascii_lowercase();
            if ["btp", "vanillatp", "vanilla-tp", "megatron"].iter().any(|word| code.contains(word))
            {
                found.push(format!("{name}:{}", number + 1));
            }
        }
    }
    assert!(found.is_empty(), "only {NAME_BASELINES:?} may name a baseline: {found:#?}");
}

/// Concatenated, so that this file passes its own test.
const UNFINISHED: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
const LOCAL: [&str; 4] =
    [concat!("/wo", "rk/"), concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/Us", "ers/")];

#[test]
fn no_file_has_unfinished_work_or_local_paths() {
    let mut found = vec![];
    for path in files() {
        for (number, line) in text(&path).lines().enumerate() {
            let words = UNFINISHED.iter().filter(|word| contains_word(line, word));
            let paths = LOCAL.iter().filter(|prefix| begins_a_path(line, prefix));
            for what in words.chain(paths) {
                found.push(format!("{}:{}: {what}", shown(&path), number + 1));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

fn contains_word(line: &str, word: &str) -> bool {
    line.split(|letter: char| !letter.is_alphanumeric()).any(|part| part == word)
}

fn begins_a_path(line: &str, prefix: &str) -> bool {
    line.match_indices(prefix).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        before.is_none_or(|letter| !letter.is_alphanumeric() && !"./-_~>".contains(letter))
    })
}

#[test]
fn paths_in_documents_exist() {
    let mut missing = vec![];
    for path in files().into_iter().filter(|path| path.extension().is_some_and(|e| e == "md")) {
        let folder = path.parent().unwrap_or(root());
        for name in linked(&text(&path)) {
            if !folder.join(&name).exists() && !root().join(&name).exists() {
                missing.push(format!("{}: {name}", shown(&path)));
            }
        }
    }
    assert!(missing.is_empty(), "documents name missing files: {missing:#?}");
}

/// Targets of links, and paths in backticks that begin with a folder of the repository.
fn linked(document: &str) -> Vec<String> {
    const FOLDERS: [&str; 13] = [
        "benches/",
        "calibration/",
        "cost-model/",
        "data/",
        "docs/",
        "examples/",
        "models/",
        "plan/",
        "planner/",
        "profiles/",
        "runtime/",
        "src/",
        "tests/",
    ];
    let links = document.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let local = links.filter(|link| !link.contains("://") && !link.starts_with('#'));
    let quoted = document.split('`').skip(1).step_by(2);
    let paths = quoted.filter(|path| FOLDERS.iter().any(|folder| path.starts_with(folder)));
    let exact =
        paths.filter(|path| !path.contains(|c: char| c.is_whitespace() || "*{<".contains(c)));
    local
        .chain(exact.filter(|path| !path.chars().any(|letter| letter.is_ascii_uppercase())))
        .map(|path| path.split('#').next().unwrap_or(path).to_string())
        .collect()
}

/// Every text file of the repository.
fn files() -> Vec<PathBuf> {
    const TEXT: [&str; 6] = ["rs", "md", "toml", "json", "yml", "snap"];
    let mut found = vec![];
    let mut folders = vec![root().to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder").flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if path.is_dir() && name != ".git" && !name.starts_with("target") {
                folders.push(path);
            } else if path.extension().is_some_and(|e| TEXT.iter().any(|text| e == *text)) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", shown(path)))
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}
