//! Location of the CUDA libraries on a machine.
//!
//! `cudarc` loads libraries at run time by fixed names. For NCCL that is `libnccl.so`, while packages without
//! headers have `libnccl.so.2` only; CUDA 13 libraries match none of its names. So the libraries are searched
//! for wherever packages install them, and [`link_libraries`] makes a folder of symbolic links under the
//! expected names, for `LD_LIBRARY_PATH`.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// A library that the backend loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CudaLibrary {
    /// The driver; installed with the system, never by a Python package.
    Driver,
    /// The kernel compiler.
    Nvrtc,
    /// Matmuls.
    CublasLt,
    /// Attention; optional.
    Cudnn,
    /// Collectives.
    Nccl,
}

impl CudaLibrary {
    /// All libraries.
    pub const ALL: [CudaLibrary; 5] = [
        CudaLibrary::Driver,
        CudaLibrary::Nvrtc,
        CudaLibrary::CublasLt,
        CudaLibrary::Cudnn,
        CudaLibrary::Nccl,
    ];

    /// Stem of the file name `libSTEM.so.VERSION`.
    pub fn file_stem(self) -> &'static str {
        match self {
            CudaLibrary::Driver => "cuda",
            CudaLibrary::Nvrtc => "nvrtc",
            CudaLibrary::CublasLt => "cublasLt",
            CudaLibrary::Cudnn => "cudnn",
            CudaLibrary::Nccl => "nccl",
        }
    }

    /// Purpose of the library, for messages.
    pub fn purpose(self) -> &'static str {
        match self {
            CudaLibrary::Driver => "the driver",
            CudaLibrary::Nvrtc => "the kernel compiler",
            CudaLibrary::CublasLt => "matmuls",
            CudaLibrary::Cudnn => "attention",
            CudaLibrary::Nccl => "collectives",
        }
    }

    /// Advice on installing the library, for messages.
    pub fn install_hint(self) -> &'static str {
        match self {
            CudaLibrary::Driver => "NVIDIA's driver for this system, 525 or newer",
            CudaLibrary::Nvrtc => "`pip install nvidia-cuda-nvrtc-cu12`, or the CUDA toolkit",
            CudaLibrary::CublasLt => "`pip install nvidia-cublas-cu12`, or the CUDA toolkit",
            CudaLibrary::Cudnn => "`pip install nvidia-cudnn-cu12`, or cuDNN's own package",
            CudaLibrary::Nccl => "`pip install nvidia-nccl-cu12`, or NCCL's own package",
        }
    }
}

/// A library file that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Version suffix of the file name: `2`, `13.2`, or empty.
    pub version: String,
}

/// Environment variable with folders that are searched first.
const LIBRARIES_VARIABLE: &str = "NARROWS_CUDA_LIBRARIES";

/// Folders to search for libraries, in order of precedence: those named by environment variables, those of
/// packages in an active Python environment, those of the system, and those of packages of any other Python.
/// `variable` returns the value of an environment variable.
pub fn library_search_folders(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut folders = vec![];
    for name in [LIBRARIES_VARIABLE, "LD_LIBRARY_PATH"] {
        let named = variable(name).unwrap_or_default();
        folders.extend(std::env::split_paths(&named).filter(|path| !path.as_os_str().is_empty()));
    }
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        let toolkit = variable(name).map(PathBuf::from);
        folders.extend(toolkit.iter().flat_map(|root| [root.join("lib64"), root.join("lib")]));
    }
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let Some(root) = variable(name).map(PathBuf::from) else { continue };
        folders.extend(python_package_folders(&root));
        folders.push(root.join("lib"));
    }
    folders.push("/usr/local/cuda/lib64".into());
    folders.extend(
        subfolders(Path::new("/usr/local"), |name| name.starts_with("cuda-"))
            .map(|toolkit| toolkit.join("lib64")),
    );
    let systems = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/lib/wsl/lib",
        "/opt/cuda/lib64",
    ];
    folders.extend(systems.map(PathBuf::from));
    let paths = variable("PATH").unwrap_or_default();
    let pythons = std::env::split_paths(&paths).filter(|path| path.join("python3").is_file());
    let mut roots: Vec<PathBuf> =
        pythons.filter_map(|path| path.parent().map(Path::to_owned)).collect();
    // Destinations of `pip install --user` and of Debian's pip.
    roots.extend(variable("HOME").map(|home| Path::new(&home).join(".local")));
    roots.push("/usr/local".into());
    for folder in roots.iter().flat_map(|root| python_package_folders(root)) {
        if !folders.contains(&folder) {
            folders.push(folder);
        }
    }
    folders
}

/// Library folders of the NVIDIA packages of a Python installation.
fn python_package_folders(root: &Path) -> Vec<PathBuf> {
    let mut folders = vec![];
    for python in subfolders(&root.join("lib"), |name| name.starts_with("python3")) {
        for packages in ["site-packages/nvidia", "dist-packages/nvidia"] {
            for package in subfolders(&python.join(packages), |_| true) {
                folders.push(package.join("lib"));
            }
        }
    }
    folders
}

/// Subfolders with accepted names, in descending order of names, so that newer versions come first.
fn subfolders(within: &Path, accepts: impl Fn(&str) -> bool) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(within).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_str().is_some_and(&accepts))
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    folders.sort();
    folders.into_iter().rev()
}

/// For each library, its file in the first folder that contains one.
pub fn find_libraries(folders: &[PathBuf]) -> BTreeMap<CudaLibrary, LibraryFile> {
    let mut libraries = BTreeMap::new();
    for folder in folders {
        for library in CudaLibrary::ALL {
            if let Some(file) = newest_file(folder, library) {
                libraries.entry(library).or_insert(file);
            }
        }
    }
    libraries
}

/// The file of a library in a folder with the highest version.
fn newest_file(folder: &Path, library: CudaLibrary) -> Option<LibraryFile> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let files = entries.filter_map(|entry| {
        let name = entry.file_name();
        let version = file_version(name.to_str()?, library.file_stem())?.to_owned();
        // Excludes dangling links.
        let path = entry.path();
        path.is_file().then_some(LibraryFile { path, version })
    });
    files.max_by_key(|file| version_numbers(&file.version))
}

/// The part of a file name after `libSTEM.so.`; empty for `libSTEM.so` itself.
fn file_version<'n>(name: &'n str, stem: &str) -> Option<&'n str> {
    let rest = name.strip_prefix("lib")?.strip_prefix(stem)?.strip_prefix(".so")?;
    let version = if rest.is_empty() { rest } else { rest.strip_prefix('.')? };
    version.chars().all(|c| c.is_ascii_digit() || c == '.').then_some(version)
}

fn version_numbers(version: &str) -> Vec<u64> {
    version.split('.').filter_map(|part| part.parse().ok()).collect()
}

/// Prefixes of files that libraries load by their own names, and that are therefore linked too.
const DEPENDENCY_PREFIXES: [&str; 6] =
    ["libnvrtc", "libcublas", "libcudnn", "libnccl", "libnvJitLink", "libcudart"];

/// Creates a folder of symbolic links to these libraries under the names that `cudarc` uses, and to their
/// dependencies in the same folders. The driver is not linked: it must match the system's kernel module.
///
/// # Errors
/// When the folder or a link cannot be created.
pub fn link_libraries(
    libraries: &BTreeMap<CudaLibrary, LibraryFile>,
    folder: &Path,
) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for (library, file) in libraries.iter().filter(|(library, _)| **library != CudaLibrary::Driver)
    {
        let own = folder.join(format!("lib{}.so", library.file_stem()));
        replace_link(&file.path, &own)?;
        let beside = file.path.parent().and_then(|folder| fs::read_dir(folder).ok());
        for entry in beside.into_iter().flatten().flatten() {
            let name = entry.file_name();
            if is_dependency(&name) {
                replace_link(&entry.path(), &folder.join(name))?;
            }
        }
    }
    Ok(())
}

fn is_dependency(name: &OsStr) -> bool {
    let name = name.to_str().unwrap_or_default();
    name.contains(".so") && DEPENDENCY_PREFIXES.iter().any(|companion| name.starts_with(companion))
}

/// Creates a link atomically, replacing an existing one; concurrent processes may create the same link.
#[cfg(unix)]
fn replace_link(target: &Path, link: &Path) -> io::Result<()> {
    let target = fs::canonicalize(target)?;
    if fs::read_link(link).is_ok_and(|current| current == target) {
        return Ok(());
    }
    let name = link.file_name().unwrap_or_default().to_string_lossy();
    let temporary = link.with_file_name(format!(".{name}.{}", std::process::id()));
    let _ = fs::remove_file(&temporary);
    std::os::unix::fs::symlink(target, &temporary)?;
    fs::rename(temporary, link)
}

#[cfg(not(unix))]
fn replace_link(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder_with(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        folder
    }

    #[test]
    fn versions_are_parsed_from_file_names() {
        assert_eq!(file_version("libnccl.so.2", "nccl"), Some("2"));
        assert_eq!(file_version("libnvrtc.so", "nvrtc"), Some(""));
        assert_eq!(file_version("libcublasLt.so.12.9.1", "cublasLt"), Some("12.9.1"));
        for other in ["libcublasLt.so.12", "libcublas_static.a", "libcublas.so.alt", "cublas.so"] {
            assert_eq!(file_version(other, "cublas"), None, "{other}");
        }
    }

    #[test]
    fn python_packages_of_the_active_environment_are_found() {
        let packages = "lib/python3.11/site-packages/nvidia";
        let root = folder_with(&[
            &format!("{packages}/nccl/lib/libnccl.so.2"),
            &format!("{packages}/cuda_nvrtc/lib/libnvrtc.so.12"),
            &format!("{packages}/cuda_nvrtc/lib/libnvrtc-builtins.so.12.9"),
            "toolkit/lib64/libnvrtc.so.11",
            "toolkit/lib64/libnvrtc.so.9.2",
        ]);
        let folders = library_search_folders(|name| match name {
            "VIRTUAL_ENV" => Some(root.path().into()),
            "CUDA_HOME" => Some(root.path().join("toolkit").into()),
            _ => None,
        });
        let libraries = find_libraries(&folders);
        // CUDA_HOME precedes packages, and version 11 precedes 9.
        let nvrtc = &libraries[&CudaLibrary::Nvrtc];
        assert!(nvrtc.path.ends_with("toolkit/lib64/libnvrtc.so.11"), "{nvrtc:?}");
        assert_eq!(
            (libraries[&CudaLibrary::Nccl].version.as_str(), nvrtc.version.as_str()),
            ("2", "11")
        );
    }

    /// Python without a virtual environment: system, container or user packages.
    #[test]
    fn python_packages_outside_an_environment_are_found() {
        let root = folder_with(&[
            "opt/bin/python3",
            "opt/lib/python3.12/dist-packages/nvidia/nccl/lib/libnccl.so.2",
            "other/bin/perl",
            "other/lib/python3.12/site-packages/nvidia/cublas/lib/libcublas.so.12",
            "home/.local/lib/python3.12/site-packages/nvidia/cu13/lib/libcublasLt.so.13",
        ]);
        let at = |name: &str| root.path().join(name);
        let folders = library_search_folders(|name| match name {
            "PATH" => std::env::join_paths([at("other/bin"), at("opt/bin")]).ok(),
            "HOME" => Some(at("home").into()),
            _ => None,
        });
        let within: Vec<PathBuf> =
            folders.into_iter().filter(|folder| folder.starts_with(root.path())).collect();
        let libraries = find_libraries(&within);
        let libraries: Vec<_> =
            libraries.iter().map(|(library, file)| (*library, &*file.version)).collect();
        assert_eq!(libraries, [(CudaLibrary::CublasLt, "13"), (CudaLibrary::Nccl, "2")]);
    }

    /// The layout of CUDA 13's Python packages, in an environment that is on the PATH and not active.
    #[cfg(unix)]
    #[test]
    fn packages_of_cuda_13_are_found_and_linked() {
        let packages = "env/lib/python3.12/site-packages/nvidia";
        let files = [
            "cu13/lib/libcublas.so.13",
            "cu13/lib/libcublasLt.so.13",
            "cu13/lib/libnvrtc-builtins.so.13.0",
            "cu13/lib/libnvrtc.so.13",
            "cudnn/lib/libcudnn.so.9",
            "cudnn/lib/libcudnn_graph.so.9",
            "nccl/lib/libnccl.so.2",
        ];
        let inside = files.map(|file| format!("{packages}/{file}"));
        let mut all: Vec<&str> = inside.iter().map(String::as_str).collect();
        all.push("env/bin/python3");
        let root = folder_with(&all);
        let folders = library_search_folders(|name| match name {
            "PATH" => Some(root.path().join("env/bin").into()),
            _ => None,
        });
        let within: Vec<PathBuf> =
            folders.into_iter().filter(|folder| folder.starts_with(root.path())).collect();
        let libraries = find_libraries(&within);
        let found: Vec<CudaLibrary> = libraries.keys().copied().collect();
        use CudaLibrary::{CublasLt, Cudnn, Nccl, Nvrtc};
        assert_eq!(found, [Nvrtc, CublasLt, Cudnn, Nccl]);
        let links = root.path().join("links");
        link_libraries(&libraries, &links).unwrap();
        for file in files {
            let name = Path::new(file).file_name().unwrap();
            assert!(links.join(name).is_file(), "{file} is not linked under its own name");
        }
        for name in ["libcublasLt.so", "libcudnn.so", "libnccl.so", "libnvrtc.so"] {
            assert!(links.join(name).is_file(), "{name}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_have_the_names_that_are_loaded() {
        let packages = folder_with(&[
            "a/libnccl.so.2",
            "b/libnvrtc.so.13",
            "b/libnvrtc-builtins.so.13.2",
            "b/other.so",
        ]);
        let folders = ["a", "b"].map(|name| packages.path().join(name));
        let links = packages.path().join("links");
        for _ in 0..2 {
            link_libraries(&find_libraries(&folders), &links).unwrap();
            let mut names: Vec<String> = fs::read_dir(&links)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            let expected = [
                "libnccl.so",
                "libnccl.so.2",
                "libnvrtc-builtins.so.13.2",
                "libnvrtc.so",
                "libnvrtc.so.13",
            ];
            assert_eq!(names, expected);
        }
        assert_eq!(fs::read_to_string(links.join("libnvrtc.so")).unwrap(), "b/libnvrtc.so.13");
        // A newer package replaces an older one.
        fs::write(packages.path().join("b/libnvrtc.so.14"), "newer").unwrap();
        link_libraries(&find_libraries(&folders), &links).unwrap();
        assert_eq!(fs::read_to_string(links.join("libnvrtc.so")).unwrap(), "newer");
    }
}
