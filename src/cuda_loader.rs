//! Makes the CUDA libraries findable for the dynamic loader.
//!
//! The loader reads its search path when a program starts. Where libraries exist but are not on that path under the
//! names by which they are loaded, this module creates a folder of links and executes the program again with that folder
//! on `LD_LIBRARY_PATH`, in the same process with the same arguments and streams.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use narrows_cuda::{
    CudaLibrary, LibraryFile, library_loads, library_search_folders, link_libraries,
};
use narrows_runtime::fnv1a;

use crate::cache_dir::cache_dir;

/// Set in the environment once the program was executed again.
const RESTARTED: &str = "NARROWS_RESTARTED";

const LOADER_PATH: &str = "LD_LIBRARY_PATH";

/// Hardware work queues of a process. With the default of eight, streams that wait for other devices could block the
/// streams that those devices wait for: the backend has six streams, and NCCL two per communicator.
const MAX_CONNECTIONS: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");

/// Finds the file of each CUDA library in the search folders.
pub fn find_libraries() -> BTreeMap<CudaLibrary, LibraryFile> {
    narrows_cuda::find_libraries(&library_search_folders(|name| env::var_os(name)))
}

/// Executes the program again with links to the CUDA libraries on the loader's path, unless all found libraries load
/// already or the folder of links cannot be created.
///
/// Must be called while this process has one thread.
pub fn make_libraries_loadable() {
    if env::var_os(MAX_CONNECTIONS.0).is_none() {
        // SAFETY: the process has one thread, so no other reads or writes the environment.
        unsafe { env::set_var(MAX_CONNECTIONS.0, MAX_CONNECTIONS.1) };
    }
    if env::var_os(RESTARTED).is_some() {
        return;
    }
    let libraries = find_libraries();
    let toolkit = |library: &&CudaLibrary| **library != CudaLibrary::Driver;
    if libraries.keys().filter(toolkit).all(|library| library_loads(*library)) {
        return;
    }
    let Some(folder) = cache_dir().map(|cache| cache.join(links_folder_name(&libraries))) else {
        return;
    };
    if link_libraries(&libraries, &folder).is_ok() {
        restart_with(&folder);
    }
}

/// The name of the folder of links, which depends on the set of libraries.
fn links_folder_name(libraries: &BTreeMap<CudaLibrary, LibraryFile>) -> String {
    let paths: String =
        libraries.values().map(|file| format!("{}\n", file.path.display())).collect();
    format!("cuda-{:016x}", fnv1a(paths.bytes()))
}

#[cfg(unix)]
fn restart_with(folder: &Path) {
    use std::os::unix::process::CommandExt;
    let Ok(program) = env::current_exe() else { return };
    let path = prepend(folder, &env::var_os(LOADER_PATH).unwrap_or_default());
    // Returns only on failure.
    let error = Command::new(program)
        .args(env::args_os().skip(1))
        .env(LOADER_PATH, path)
        .env(RESTARTED, "1")
        .exec();
    crate::output::warn(&format!("the CUDA libraries cannot be put on {LOADER_PATH}: {error}"));
}

#[cfg(not(unix))]
fn restart_with(_: &Path) {}

/// A loader path that begins with `folder`. Empty entries are dropped, because the loader interprets them as the current
/// folder, whose files are not trusted.
fn prepend(folder: &Path, path: &OsStr) -> OsString {
    let entries: Vec<PathBuf> =
        env::split_paths(path).filter(|entry| !entry.as_os_str().is_empty()).collect();
    let all = std::iter::once(folder).chain(entries.iter().map(PathBuf::as_path));
    // A folder with a colon in its name cannot be an entry.
    env::join_paths(all).or_else(|_| env::join_paths(&entries)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn loader_paths_have_no_empty_entries() {
        for (path, expected) in [("", "/links"), ("/a", "/links:/a"), (":/a::/b:", "/links:/a:/b")]
        {
            assert_eq!(prepend(Path::new("/links"), OsStr::new(path)), expected, "{path}");
        }
        assert_eq!(prepend(Path::new("/my:links"), OsStr::new("/a::/b")), "/a:/b");
    }
}
