//! Brings the libraries of CUDA within the loader's reach.
//!
//! A loader looks where it was told to when the program began. So where libraries are that it does not
//! find by the names they are asked for, a folder of links is made, and the program begins again with
//! it on the loader's path: same process, same arguments, same streams.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use narrows_cuda::{
    CudaLibrary, FoundLibrary, find_libraries, library_loads, library_search_folders,
    link_libraries,
};
use narrows_runtime::fnv1a;

use crate::calibrate::cache;

/// Set where the program has begun again.
const BEGUN_AGAIN: &str = "NARROWS_BEGUN_AGAIN";

const LOADER_PATH: &str = "LD_LIBRARY_PATH";

/// How many queues of a GPU a process has. With the eight of who does not say, streams that wait for other
/// devices could stand before those that these wait for: there are six of ours, and two for each of NCCL's
/// communicators.
const CONNECTIONS: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");

/// Where each library is, in the folders that are looked in.
pub fn found() -> BTreeMap<CudaLibrary, FoundLibrary> {
    find_libraries(&library_search_folders(|name| env::var_os(name)))
}

/// Begins the program again, unless all that is there loads already or nothing can be done for it.
///
/// Must be called while this process has one thread.
pub fn bring_within_reach() {
    if env::var_os(CONNECTIONS.0).is_none() {
        // SAFETY: nobody else reads or writes the environment, as nobody else is there.
        unsafe { env::set_var(CONNECTIONS.0, CONNECTIONS.1) };
    }
    if env::var_os(BEGUN_AGAIN).is_some() {
        return;
    }
    let found = found();
    let of_cuda = |library: &&CudaLibrary| **library != CudaLibrary::Driver;
    if found.keys().filter(of_cuda).all(|library| library_loads(*library)) {
        return;
    }
    let Some(folder) = cache::folder().map(|folder| folder.join(folder_name(&found))) else {
        return;
    };
    if link_libraries(&found, &folder).is_ok() {
        begin_again(&folder);
    }
}

/// One folder for one set of libraries: another environment has others.
fn folder_name(found: &BTreeMap<CudaLibrary, FoundLibrary>) -> String {
    let paths: String = found.values().map(|file| format!("{}\n", file.path.display())).collect();
    format!("cuda-{:016x}", fnv1a(paths.bytes()))
}

#[cfg(unix)]
fn begin_again(folder: &Path) {
    use std::os::unix::process::CommandExt;
    let Ok(program) = env::current_exe() else { return };
    let path = with_folder(folder, &env::var_os(LOADER_PATH).unwrap_or_default());
    // It comes back only when the program could not be begun.
    let error = Command::new(program)
        .args(env::args_os().skip(1))
        .env(LOADER_PATH, path)
        .env(BEGUN_AGAIN, "1")
        .exec();
    crate::output::warn(&format!("libraries of CUDA stay out of reach: {error}"));
}

#[cfg(not(unix))]
fn begin_again(_: &Path) {}

/// A loader's path that begins with a folder. None of its places is empty: to a loader that would be the folder
/// the program was called in, whose files are anybody's.
fn with_folder(folder: &Path, before: &OsStr) -> OsString {
    let before: Vec<PathBuf> =
        env::split_paths(before).filter(|place| !place.as_os_str().is_empty()).collect();
    let places = std::iter::once(folder).chain(before.iter().map(PathBuf::as_path));
    // A folder with a colon in its name can be no place of a path.
    env::join_paths(places).or_else(|_| env::join_paths(&before)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn no_place_of_a_loader_is_empty() {
        for (before, wanted) in [("", "/links"), ("/a", "/links:/a"), (":/a::/b:", "/links:/a:/b")]
        {
            assert_eq!(with_folder(Path::new("/links"), OsStr::new(before)), wanted, "{before}");
        }
        assert_eq!(with_folder(Path::new("/my:links"), OsStr::new("/a::/b")), "/a:/b");
    }
}
