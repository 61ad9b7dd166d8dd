//! Rules that the compiler does not check: the direction of dependencies and imports, the contents of packages, the length of files,
//! unfinished work, local paths, the form of doc comments, and what documents name.

mod import_circles;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Workspace dependencies that each crate may have; tests may use any crate.
const GRAPH: &[(&str, &[&str])] = &[
    ("narrows-plan", &[]),
    ("narrows-profiles", &[]),
    ("narrows-cost-model", &["narrows-plan", "narrows-profiles"]),
    (
        "narrows-calibration",
        &["narrows-cost-model", "narrows-plan", "narrows-planner", "narrows-profiles"],
    ),
    ("narrows-planner", &["narrows-cost-model", "narrows-plan"]),
    ("narrows-python", &["narrows"]),
    ("narrows-runtime", &["narrows-plan"]),
    ("narrows-cluster", &["narrows-plan", "narrows-runtime"]),
    ("narrows-cpu", &["narrows-plan", "narrows-runtime"]),
    ("narrows-cuda", &["narrows-plan", "narrows-runtime"]),
    ("narrows-reference", &["narrows-plan", "narrows-runtime"]),
    ("narrows-fake-cuda", &["narrows-cuda", "narrows-runtime"]),
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

fn packages() -> Vec<serde_json::Value> {
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    metadata["packages"].as_array().expect("packages").clone()
}

fn name(value: &serde_json::Value) -> String {
    value["name"].as_str().expect("a name").to_string()
}

/// Dependencies of a package on crates of the workspace: those of tests, or all others.
fn workspace_dependencies<'p>(
    package: &'p serde_json::Value,
    crates: &BTreeSet<String>,
    of_tests: bool,
) -> Vec<&'p serde_json::Value> {
    let dependencies = package["dependencies"].as_array().expect("dependencies").iter();
    let dependencies = dependencies.filter(|value| (value["kind"] == "dev") == of_tests);
    dependencies.filter(|value| crates.contains(&name(value))).collect()
}

#[test]
fn crates_depend_in_one_direction() {
    let packages = packages();
    let crates: BTreeSet<String> = packages.iter().map(name).collect();
    let dependencies = |package| {
        let dependencies = workspace_dependencies(package, &crates, false);
        dependencies.into_iter().map(name).collect()
    };
    let actual: BTreeMap<String, BTreeSet<String>> =
        packages.iter().map(|package| (name(package), dependencies(package))).collect();
    let expected: BTreeMap<String, BTreeSet<String>> = GRAPH
        .iter()
        .map(|(name, allowed)| (name.to_string(), allowed.iter().map(|n| n.to_string()).collect()))
        .collect();
    assert_eq!(actual.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (package, dependencies) in &actual {
        let extra: Vec<_> = dependencies.difference(&expected[package]).collect();
        assert!(extra.is_empty(), "{package} may not depend on {extra:?}: see ARCHITECTURE.md");
    }
}

/// `cargo package` omits test dependencies without a version. With versions, crates whose tests use each other could not
/// be published.
#[test]
fn tests_depend_on_crates_of_the_workspace_without_a_version() {
    let packages = packages();
    let crates: BTreeSet<String> = packages.iter().map(name).collect();
    for package in &packages {
        for dependency in workspace_dependencies(package, &crates, true) {
            let (package, dependency_name) = (name(package), name(dependency));
            assert_eq!(
                dependency["req"], "*",
                "{package}: write {dependency_name} = {{ path = … }} under [dev-dependencies]"
            );
        }
    }
}

/// Tests need crates that are not published, and files of the whole repository.
#[test]
fn published_packages_leave_out_their_tests() {
    for package in packages().iter().filter(|package| package["publish"].is_null()) {
        let manifest = PathBuf::from(package["manifest_path"].as_str().expect("a path"));
        if !manifest.with_file_name("tests").exists() {
            continue;
        }
        let text = text(&manifest);
        let excluded = text.lines().find(|line| line.starts_with("exclude = ")).unwrap_or_default();
        assert!(
            excluded.contains("\"/tests\""),
            "{}: write exclude = [\"/tests\"] under [package]",
            shown(&manifest)
        );
    }
}

/// A manifest turns off the test program or the examples of a library without any, since even an empty program is compiled.
#[test]
fn no_test_of_a_library_is_turned_off() {
    for package in packages() {
        let targets = package["targets"].as_array().expect("targets");
        let Some(library) = targets.iter().find(|target| target["kind"][0] == "lib") else {
            continue;
        };
        let folder = Path::new(library["src_path"].as_str().expect("a path")).parent();
        let folder = folder.expect("a folder");
        let sources = files().into_iter().filter(|path| path.starts_with(folder));
        for path in sources.filter(|path| path.extension().is_some_and(|e| e == "rs")) {
            let source = text(&path);
            let has_tests = source.lines().any(|line| line.trim_start() == "#[test]");
            let has_examples = source.lines().any(|line| {
                let line = line.trim_start();
                line.starts_with("/// use narrows_") || line.starts_with("//! use narrows_")
            });
            for (is_run, has_any, key) in [
                (&library["test"], has_tests, "test"),
                (&library["doctest"], has_examples, "doctest"),
            ] {
                let remedy = format!("remove `{key} = false` from its Cargo.toml");
                assert!(*is_run == true || !has_any, "{} is not run: {remedy}", shown(&path));
            }
        }
    }
}

/// Tests are exempt: packages leave them out.
#[test]
fn sources_include_files_of_their_own_package_only() {
    let mut included = 0;
    for path in files() {
        let name = shown(&path).replace('\\', "/");
        if path.extension().is_none_or(|extension| extension != "rs") || !name.contains("src/") {
            continue;
        }
        let folder = path.parent().expect("a folder");
        for target in included_paths(&text(&path)) {
            let target = normalized(&folder.join(&target));
            assert_eq!(
                package_folder(&target),
                package_folder(&path),
                "{name} includes {}, which is in another package",
                shown(&target)
            );
            included += 1;
        }
    }
    assert!(included > 20, "only {included} included files");
}

/// Paths in `include_str!` and `include_bytes!`; of `concat!` its first literal.
fn included_paths(source: &str) -> Vec<String> {
    let calls = source.split("include_str!(").skip(1);
    let calls = calls.chain(source.split("include_bytes!(").skip(1));
    let arguments = calls.map(|rest| rest.trim_start().trim_start_matches("concat!("));
    let literals = arguments.filter_map(|rest| rest.trim_start().strip_prefix('"'));
    literals.filter_map(|rest| rest.split('"').next()).map(str::to_owned).collect()
}

/// A path without `..`.
fn normalized(path: &Path) -> PathBuf {
    let mut normalized = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(normalized.pop()),
            other => normalized.push(other),
        }
    }
    normalized
}

/// The nearest folder with a `Cargo.toml`, from the path upwards.
fn package_folder(path: &Path) -> &Path {
    let mut folders = path.ancestors();
    folders.find(|folder| folder.join("Cargo.toml").exists()).expect("a package")
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
const NAME_BASELINES: [&str; 2] = ["plan/src/strategy/baseline.rs", "planner/src/alternatives.rs"];

#[test]
fn the_search_has_no_special_case_for_a_baseline() {
    let mut violations = vec![];
    for path in files() {
        let name = shown(&path).replace('\\', "/");
        // The crates of tests lie under `tests/`, and may name baselines as tests do.
        let source = name.contains("/src/") && !name.starts_with("tests/");
        if !source || NAME_BASELINES.contains(&name.as_str()) {
            continue;
        }
        for (number, line) in text(&path).lines().enumerate() {
            let code = line.split("//").next().unwrap_or("").to_ascii_lowercase();
            let baselines = ["btp", "vanillatp", "vanilla-tp", "megatronsp", "megatron-sp"];
            if baselines.iter().any(|word| code.contains(word)) {
                violations.push(format!("{name}:{}", number + 1));
            }
        }
    }
    assert!(violations.is_empty(), "only {NAME_BASELINES:?} may name a baseline: {violations:#?}");
}

/// A file that the test program of its crate does not name would never run.
#[test]
fn every_file_of_tests_belongs_to_a_program() {
    let mut left_out = vec![];
    let mut found = 0;
    for package in packages() {
        let manifest = PathBuf::from(package["manifest_path"].as_str().expect("a path"));
        let folder = manifest.parent().expect("a folder").join("tests");
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        let targets = package["targets"].as_array().expect("targets").iter();
        let programs: Vec<PathBuf> =
            targets.filter_map(|target| target["src_path"].as_str()).map(PathBuf::from).collect();
        let main = fs::read_to_string(folder.join("main.rs")).unwrap_or_default();
        for path in entries.flatten().map(|entry| entry.path()) {
            let is_rust = path.extension().is_some_and(|extension| extension == "rs");
            let module = format!("mod {};", path.file_stem().expect("a name").to_string_lossy());
            if is_rust && !programs.contains(&path) && !main.lines().any(|line| line == module) {
                left_out.push(shown(&path));
            }
            found += usize::from(is_rust);
        }
    }
    assert!(left_out.is_empty(), "not in tests/main.rs: {left_out:#?}");
    assert!(found > 30, "only {found} files");
}

/// Words of unfinished work, concatenated so that this file passes the test.
const UNFINISHED: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
const LOCAL: [&str; 4] =
    [concat!("/wo", "rk/"), concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/Us", "ers/")];

#[test]
fn no_file_has_unfinished_work_or_local_paths() {
    let mut violations = vec![];
    for path in files() {
        for (number, line) in text(&path).lines().enumerate() {
            let words = UNFINISHED.iter().filter(|word| contains_word(line, word));
            let paths = LOCAL.iter().filter(|prefix| contains_path(line, prefix));
            for text in words.chain(paths) {
                violations.push(format!("{}:{}: {text}", shown(&path), number + 1));
            }
        }
    }
    assert!(violations.is_empty(), "{violations:#?}");
}

fn contains_word(line: &str, word: &str) -> bool {
    line.split(|letter: char| !letter.is_alphanumeric()).any(|part| part == word)
}

/// Whether a line contains an absolute path with this prefix.
fn contains_path(line: &str, prefix: &str) -> bool {
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

/// Names in backticks, such as `KernelCase` or `CollectiveKind::AllToAll`, occur in the sources.
#[test]
fn names_in_documents_exist() {
    let sources = files().into_iter().filter(|path| path.extension().is_some_and(|e| e != "md"));
    let sources: Vec<String> = sources.map(|path| text(&path)).collect();
    let words: BTreeSet<&str> =
        sources.iter().flat_map(|source| source.split(is_no_letter)).collect();
    let mut missing = vec![];
    for document in ["ARCHITECTURE.md", "CONTRIBUTING.md"] {
        let document_text = text(&root().join(document));
        // Every other part lies outside of a block of code, and every other part of those within backticks.
        let prose = document_text.split("```").step_by(2);
        for quoted in prose.flat_map(|prose| prose.split('`').skip(1).step_by(2)) {
            // Paths and commands have other tests.
            if quoted.contains(['/', '.', '-', ' ', '<', '$']) {
                continue;
            }
            let unknown = quoted.split(is_no_letter).filter(|word| !words.contains(word));
            missing.extend(unknown.map(|word| format!("{document}: `{quoted}`: {word}")));
        }
    }
    assert!(missing.is_empty(), "documents name what no source has: {missing:#?}");
}

fn is_no_letter(letter: char) -> bool {
    !letter.is_alphanumeric() && letter != '_'
}

/// Words that no doc comment begins with, because its subject is named: see STYLE.md.
const OPENINGS: [&str; 8] = ["What", "Who", "Whose", "Where", "How", "Why", "Its", "By"];

#[test]
fn doc_comments_begin_with_a_noun_phrase_or_a_verb() {
    let mut violations = vec![];
    for path in files().into_iter().filter(|path| path.extension().is_some_and(|e| e == "rs")) {
        let mut previous = "";
        let source = text(&path);
        for (number, line) in source.lines().map(str::trim_start).enumerate() {
            let first = line.strip_prefix("/// ").filter(|_| !previous.starts_with("///"));
            let word = first.and_then(|comment| comment.split(is_no_letter).next());
            if word.is_some_and(|word| OPENINGS.contains(&word)) {
                violations.push(format!("{}:{}: {line}", shown(&path), number + 1));
            }
            previous = line;
        }
    }
    assert!(violations.is_empty(), "doc comments begin with one of {OPENINGS:?}: {violations:#?}");
}

/// Every text file of the repository.
fn files() -> Vec<PathBuf> {
    const TEXT: [&str; 8] = ["rs", "cu", "cuh", "md", "toml", "json", "yml", "snap"];
    let mut files = vec![];
    let mut folders = vec![root().to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder").flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if path.is_dir() && name != ".git" && !name.starts_with("target") {
                folders.push(path);
            } else if path.extension().is_some_and(|e| TEXT.iter().any(|text| e == *text)) {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", shown(path)))
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}
