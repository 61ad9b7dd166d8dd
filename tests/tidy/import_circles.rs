//! The files of a crate import each other in one direction.
//!
//! An import counts towards the file that defines the item, wherever the item is re-exported. Re-exports and unit tests are
//! no imports.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::{files, packages, shown, text};

/// Names of a module and of those above it; empty for the root of a crate.
type ModulePath = Vec<String>;

/// A file of a crate.
struct Module {
    file: String,
    imports: Vec<Vec<String>>,
    /// Paths of re-exported items by their new names.
    exports: BTreeMap<String, Vec<String>>,
}

#[test]
fn files_import_each_other_in_one_direction() {
    let (mut circles, mut imports_total) = (vec![], 0);
    for package in packages() {
        let manifest = Path::new(package["manifest_path"].as_str().expect("a path"));
        let imports = imports_by_file(&modules(&manifest.parent().expect("a folder").join("src")));
        imports_total += imports.values().map(BTreeSet::len).sum::<usize>();
        circles.extend(on_circles(imports));
    }
    assert!(circles.is_empty(), "files on circles, with the files they import: {circles:#?}");
    assert!(imports_total > 1000, "only {imports_total} imports were found");
}

/// The modules of the crate with this folder of sources.
fn modules(folder: &Path) -> BTreeMap<ModulePath, Module> {
    let is_source = |path: &PathBuf| {
        path.starts_with(folder) && path.extension().is_some_and(|extension| extension == "rs")
    };
    let module = |path: PathBuf| {
        let relative = path.strip_prefix(folder).expect("a source").with_extension("");
        let mut names: ModulePath =
            relative.iter().map(|name| name.to_string_lossy().into_owned()).collect();
        if names.last().is_some_and(|last| ["mod", "lib", "main"].contains(&last.as_str())) {
            names.pop();
        }
        (names, Module::parse(shown(&path), &text(&path)))
    };
    files().into_iter().filter(is_source).map(module).collect()
}

impl Module {
    fn parse(file: String, source: &str) -> Module {
        let production = source.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        let lines = production.lines().map(|line| line.split("//").next().unwrap_or_default());
        let code: String = lines.flat_map(|line| [line, "\n"]).collect();
        let mut module = Module { file, imports: vec![], exports: BTreeMap::new() };
        let mut rest = String::new();
        for statement in code.split_inclusive(';') {
            let begin = statement.rfind("use ").filter(|at| {
                let before = &statement[..*at];
                before.trim().is_empty() || before.trim_end().ends_with([')', 'b', ']', '}', '{'])
            });
            let Some(begin) = begin else {
                rest.push_str(statement);
                continue;
            };
            let (before, tree) = statement.split_at(begin);
            let visibility = before.lines().last().unwrap_or_default().trim();
            let mut paths = vec![];
            expand(&[], tree["use ".len()..].trim_end_matches(';'), &mut paths);
            match visibility.starts_with("pub") {
                true => module.exports.extend(paths),
                false => module.imports.extend(paths.into_iter().map(|(_, path)| path)),
            }
            rest.push_str(before);
        }
        module.imports.extend(paths_in_code(&rest));
        module
    }
}

/// The items of a `use` tree, with their new names.
fn expand(prefix: &[String], tree: &str, paths: &mut Vec<(String, Vec<String>)>) {
    let tree = tree.trim();
    if let Some((head, group)) = tree.split_once('{') {
        let head = head.split("::").map(str::trim).filter(|name| !name.is_empty());
        let prefix: Vec<String> = prefix.iter().cloned().chain(head.map(str::to_owned)).collect();
        let group = group.strip_suffix('}').unwrap_or(group);
        let mut depth = 0;
        let parts = group.split(|letter: char| {
            depth += i32::from(letter == '{') - i32::from(letter == '}');
            letter == ',' && depth == 0
        });
        parts.for_each(|part| expand(&prefix, part, paths));
        return;
    }
    let (path, name) = tree.split_once(" as ").unwrap_or((tree, ""));
    let names = path.split("::").map(|name| name.trim().to_owned());
    let path: Vec<String> = prefix
        .iter()
        .cloned()
        .chain(names)
        .filter(|name| !name.is_empty() && name != "self")
        .collect();
    let Some(last) = path.last() else { return };
    let name = if name.is_empty() { last.as_str() } else { name.trim() };
    paths.push((name.to_owned(), path.clone()));
}

/// Paths in code that begin with `crate` or `super`.
fn paths_in_code(code: &str) -> Vec<Vec<String>> {
    let words = code.split(|letter: char| !letter.is_alphanumeric() && !"_:".contains(letter));
    let paths = words.filter(|word| word.starts_with("crate::") || word.starts_with("super::"));
    paths.map(|path| path.split("::").map(str::to_owned).collect()).collect()
}

/// For each file, the other files of the crate that define what it imports.
fn imports_by_file(modules: &BTreeMap<ModulePath, Module>) -> BTreeMap<String, BTreeSet<String>> {
    let imports = modules.iter().map(|(at, module)| {
        let imported = module.imports.iter().filter_map(|path| defining_file(modules, at, path));
        let others = imported.filter(|file| *file != module.file);
        (module.file.clone(), others.map(str::to_owned).collect())
    });
    imports.collect()
}

/// The file of the crate that defines the item of a path in a module; `None` for items of other crates.
fn defining_file<'m>(
    modules: &'m BTreeMap<ModulePath, Module>,
    at: &[String],
    path: &[String],
) -> Option<&'m str> {
    let mut place = at.to_vec();
    for (index, name) in path.iter().enumerate() {
        match name.as_str() {
            "crate" => place.clear(),
            "super" => drop(place.pop()),
            _ => {
                place.push(name.clone());
                if modules.contains_key(&place) {
                    continue;
                }
                place.pop();
                let module = modules.get(&place)?;
                // The first name of a path without `crate` or `super` is that of a crate, if no module has it.
                return match module.exports.get(name) {
                    Some(export) => defining_file(modules, &place, export),
                    None if index == 0 => None,
                    None => Some(module.file.as_str()),
                };
            }
        }
    }
    modules.get(&place).map(|module| module.file.as_str())
}

/// The files that are left after those without imports and those that no file imports are removed, again and again.
fn on_circles(
    mut imports: BTreeMap<String, BTreeSet<String>>,
) -> BTreeMap<String, BTreeSet<String>> {
    loop {
        let imported: BTreeSet<String> = imports.values().flatten().cloned().collect();
        let left =
            imports.keys().filter(|file| imported.contains(*file) && !imports[*file].is_empty());
        let left: BTreeSet<String> = left.cloned().collect();
        if left.len() == imports.len() {
            return imports;
        }
        imports.retain(|file, _| left.contains(file));
        imports.values_mut().for_each(|files| files.retain(|file| left.contains(file)));
    }
}
