//! Where profiles of this machine are kept between runs.
//!
//! `$XDG_CACHE_HOME/narrows`, or `~/.cache/narrows`: one file for each machine, number of threads,
//! version and kind of build, so that a home that several machines share does not mix them up. What was
//! measured in a few seconds is kept beside what was measured wholly, which is preferred. The
//! files may be deleted at any time.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use narrows_cost_model::{Profile, profile};
use narrows_runtime::fnv1a;

use super::machine;
use super::works::BenchmarkExtent;
use crate::cache_dir::cache_dir;
use crate::errors::CommandResult;
use crate::output;

/// What a profile is one of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedProfileKey(String);

impl CachedProfileKey {
    /// This machine's processors, with so many threads.
    pub fn of_processors(threads: u64) -> CachedProfileKey {
        CachedProfileKey(format!("cpu-{}", hash(&machine::title(threads))))
    }

    /// GPUs of one kind, with one driver and its libraries, so many of which were measured together.
    pub fn of_gpus(title: &str, devices: u64) -> CachedProfileKey {
        CachedProfileKey(format!("gpu-{}-{devices}", hash(title)))
    }

    /// Where one that was measured so goes, where there is a place for it.
    pub fn path(&self, amount: BenchmarkExtent) -> Option<PathBuf> {
        let CachedProfileKey(stem) = self;
        let suffix = match amount {
            BenchmarkExtent::Whole => "",
            BenchmarkExtent::Quick => "-quick",
        };
        Some(cache_dir()?.join(format!("{stem}{suffix}.json")))
    }

    /// Where one may lie, the preferred one first.
    fn paths(&self) -> impl Iterator<Item = PathBuf> {
        [BenchmarkExtent::Whole, BenchmarkExtent::Quick]
            .into_iter()
            .filter_map(|amount| self.path(amount))
    }

    /// Where the one lies that `run` predicts with, if there is one.
    pub fn found(&self) -> Option<PathBuf> {
        self.paths().find(|path| path.exists())
    }

    /// The one that `run` predicts with; `None` where there is none, or none that can be read.
    pub fn load(&self) -> Option<Profile> {
        self.paths().find_map(|path| read(&path))
    }

    /// Keeps a profile. Says where.
    ///
    /// # Errors
    /// When there is no place for it, or it cannot be written there.
    pub fn store(&self, amount: BenchmarkExtent, profile: &Profile) -> io::Result<PathBuf> {
        let path = self.path(amount).ok_or_else(nowhere)?;
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        output::write_atomically(&path, &text(profile)?)?;
        Ok(path)
    }

    /// Finds out early whether a profile can be kept.
    ///
    /// # Errors
    /// When it cannot.
    pub fn writable(&self, amount: BenchmarkExtent) -> CommandResult<()> {
        let hinted = |place: &str, error: &io::Error| {
            let mut failure = output::write_failure(place, error);
            let problems = failure.problems.iter_mut();
            problems.for_each(|of| of.hints.push("--output FILE, to write it elsewhere".into()));
            failure
        };
        let Some(path) = self.path(amount) else {
            return Err(hinted("the cache folder", &nowhere()));
        };
        let folder = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder)
            .map_err(|error| hinted(&folder.display().to_string(), &error))?;
        output::check_writable(&path)
    }
}

fn nowhere() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "there is neither a home nor a cache folder")
}

/// A profile of GPUs that is kept under this fingerprint, on whichever of this home's machines it was measured.
pub fn of_gpus_with(fingerprint: &str) -> Option<Profile> {
    let is_gpus = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        name.is_some_and(|name| name.starts_with("gpu-") && name.ends_with(".json"))
    };
    let files = fs::read_dir(cache_dir()?).ok()?.flatten().map(|entry| entry.path());
    let profiles = files.filter(is_gpus).filter_map(|path| read(&path));
    profiles.into_iter().find(|profile| profile.fingerprint() == fingerprint)
}

/// Of a machine, this version and this kind of build.
fn hash(title: &str) -> String {
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    let version = env!("CARGO_PKG_VERSION");
    let hash = fnv1a(format!("{title} {version} {build}").bytes());
    format!("{hash:016x}")
}

/// A profile that is kept; `None` when it cannot be read.
pub fn read(path: &Path) -> Option<Profile> {
    let text = fs::read_to_string(path).ok()?;
    profile::read(&path.display().to_string(), &text).ok()
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
