//! The cache of measured profiles, in `$XDG_CACHE_HOME/narrows` or `~/.cache/narrows`.
//!
//! There is one file per machine, number of threads or GPUs, version and kind of build, since machines may share a home
//! folder. Quick calibrations have separate files; full ones are preferred. The files may be deleted at any time.

use std::path::{Path, PathBuf};
use std::{fs, io};

use narrows_cost_model::{Profile, profile};
use narrows_runtime::fnv1a;

use super::benchmarks::BenchmarkExtent;
use super::machine;
use crate::cache_dir::cache_dir;
use crate::errors::CommandResult;
use crate::output;

/// Identifies the hardware of a cached profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedProfileKey(String);

impl CachedProfileKey {
    /// The CPU of this machine with a number of threads.
    pub fn cpu(threads: u64) -> CachedProfileKey {
        CachedProfileKey(format!("cpu-{}", hash(&machine::title(threads))))
    }

    /// GPUs measured together. `description` has their model and the versions of driver and libraries.
    pub fn gpus(description: &str, devices: u64) -> CachedProfileKey {
        CachedProfileKey(format!("gpu-{}-{devices}", hash(description)))
    }

    /// The path of the profile of a measurement of this extent; `None` without a cache folder.
    pub fn path(&self, extent: BenchmarkExtent) -> Option<PathBuf> {
        let CachedProfileKey(stem) = self;
        let suffix = match extent {
            BenchmarkExtent::Full => "",
            BenchmarkExtent::Quick => "-quick",
        };
        Some(cache_dir()?.join(format!("{stem}{suffix}.json")))
    }

    /// Paths of all extents, the preferred one first.
    fn paths(&self) -> impl Iterator<Item = PathBuf> {
        [BenchmarkExtent::Full, BenchmarkExtent::Quick]
            .into_iter()
            .filter_map(|extent| self.path(extent))
    }

    /// The path of the profile that `run` predicts with, if it exists.
    pub fn existing_path(&self) -> Option<PathBuf> {
        self.paths().find(|path| path.exists())
    }

    /// The profile that `run` predicts with; `None` if there is none that can be read.
    pub fn load(&self) -> Option<Profile> {
        self.paths().find_map(|path| read(&path))
    }

    /// Writes a profile to the cache and returns its path.
    ///
    /// # Errors
    /// No cache folder, or a file that cannot be written, with its name.
    pub fn store(&self, extent: BenchmarkExtent, profile: &Profile) -> io::Result<PathBuf> {
        let path = self.path(extent).ok_or_else(no_cache_folder)?;
        let text = text(profile)?;
        let written = fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))
            .and_then(|()| output::write_atomically(&path, text.as_bytes()));
        let named =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        written.map_err(named).map(|()| path)
    }

    /// Checks that a profile can be cached, before anything is measured.
    ///
    /// # Errors
    /// No cache folder, or one that cannot be written.
    pub fn check_writable(&self, extent: BenchmarkExtent) -> CommandResult<()> {
        let failure = |location: &str, error: &io::Error| {
            let mut failure = output::write_failure(location, error);
            let problems = failure.problems.iter_mut();
            let hint = "--output FILE, to write it elsewhere";
            problems.for_each(|problem| problem.hints.push(hint.into()));
            failure
        };
        let Some(path) = self.path(extent) else {
            return Err(failure("the cache folder", &no_cache_folder()));
        };
        let folder = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder)
            .map_err(|error| failure(&folder.display().to_string(), &error))?;
        output::check_writable(&path)
    }
}

fn no_cache_folder() -> io::Error {
    let message = "neither XDG_CACHE_HOME nor HOME is set";
    io::Error::new(io::ErrorKind::NotFound, message)
}

/// The cached GPU profile with this fingerprint, of any machine that shares the home folder.
pub fn gpu_profile_with_fingerprint(fingerprint: &str) -> Option<Profile> {
    let is_of_gpus = |profile: &Profile| {
        let measured = profile.file().measured.as_ref();
        measured.is_some_and(|measured| !measured.devices_share_machine())
    };
    let files = fs::read_dir(cache_dir()?).ok()?.flatten().map(|entry| entry.path());
    let json = files.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    json.filter_map(|path| read(&path))
        .find(|profile| is_of_gpus(profile) && profile.fingerprint() == fingerprint)
}

/// A hash of a machine, this version and the kind of build.
fn hash(description: &str) -> String {
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    let version = env!("CARGO_PKG_VERSION");
    let hash = fnv1a(format!("{description} {version} {build}").bytes());
    format!("{hash:016x}")
}

/// Reads a cached profile; `None` if it cannot be read.
pub fn read(path: &Path) -> Option<Profile> {
    let text = fs::read_to_string(path).ok()?;
    profile::read(&text).ok()
}

/// The text of a profile, with one line for each measurement.
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
