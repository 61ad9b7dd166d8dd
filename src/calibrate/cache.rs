//! Where the profile of this machine is kept between runs.
//!
//! `$XDG_CACHE_HOME/narrows`, or `~/.cache/narrows`: one file for each machine, number of threads,
//! version and kind of build, so that a home that several machines share does not mix them up. The
//! file may be deleted at any time.

use std::env;
use std::fs;
use std::io;
use std::path::PathBuf;

use narrows_cost_model::{Profile, profile};
use narrows_runtime::parameters::fnv1a;

use super::machine;
use crate::output;

/// The folder of what may be made anew at any time, where there is a place for it.
pub fn folder() -> Option<PathBuf> {
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let folder = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(folder.join("narrows"))
}

/// The file of this machine's profile, where there is a place for it.
pub fn path(threads: u64) -> Option<PathBuf> {
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    let version = env!("CARGO_PKG_VERSION");
    let hash = fnv1a(format!("{} {version} {build}", machine::title(threads)).bytes());
    Some(folder()?.join(format!("cpu-{hash:016x}.json")))
}

/// The profile that is kept; `None` where there is none, or none that can be read.
pub fn load(threads: u64) -> Option<Profile> {
    let path = path(threads)?;
    let text = fs::read_to_string(&path).ok()?;
    profile::read(&path.display().to_string(), &text).ok()
}

/// Keeps a profile. Says where.
///
/// # Errors
/// When there is no place for it, or it cannot be written there.
pub fn store(threads: u64, profile: &Profile) -> io::Result<PathBuf> {
    let path = path(threads).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "there is neither a home nor a cache folder")
    })?;
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    output::write_whole(&path, &text(profile)?)?;
    Ok(path)
}

/// A profile as its file has it: a measurement a line.
pub fn text(profile: &Profile) -> io::Result<String> {
    let mut file = profile.file().clone();
    let points = file.measured.as_mut().map(|measured| std::mem::take(&mut measured.points));
    let mut text = serde_json::to_string_pretty(&file)?;
    let lines: Vec<String> = points
        .unwrap_or_default()
        .iter()
        .map(|point| Ok(format!("      {}", serde_json::to_string(point)?)))
        .collect::<io::Result<_>>()?;
    let empty = "\"points\": []";
    if let Some(at) = text.rfind(empty).filter(|_| !lines.is_empty()) {
        let full = format!("\"points\": [\n{}\n    ]", lines.join(",\n"));
        text.replace_range(at..at + empty.len(), &full);
    }
    text.push('\n');
    Ok(text)
}
