//! Where the libraries of CUDA are on a machine.
//!
//! They are loaded when the program runs, by names that `cudarc` knows: of NCCL that is `libnccl.so` and not
//! the `libnccl.so.2` that is all a package without headers has; of libraries of CUDA 13, no name at
//! all. So they are looked for here, wherever packages put them, and [`link`]ed under the names that are
//! asked for, in a folder that a loader can be told of.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A library that the backend loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CudaLibrary {
    /// The driver; it comes with the system, never with a package of Python.
    Driver,
    /// Compiles kernels.
    Nvrtc,
    /// Products, as libraries ask for them.
    Cublas,
    /// Products.
    CublasLt,
    /// Collectives.
    Nccl,
}

impl CudaLibrary {
    /// All of them.
    pub const ALL: [CudaLibrary; 5] = [
        CudaLibrary::Driver,
        CudaLibrary::Nvrtc,
        CudaLibrary::Cublas,
        CudaLibrary::CublasLt,
        CudaLibrary::Nccl,
    ];

    /// What its files are called: `lib`, this, `.so`, and a version.
    pub fn stem(self) -> &'static str {
        match self {
            CudaLibrary::Driver => "cuda",
            CudaLibrary::Nvrtc => "nvrtc",
            CudaLibrary::Cublas => "cublas",
            CudaLibrary::CublasLt => "cublasLt",
            CudaLibrary::Nccl => "nccl",
        }
    }

    /// What it is for.
    pub fn purpose(self) -> &'static str {
        match self {
            CudaLibrary::Driver => "the driver",
            CudaLibrary::Nvrtc => "compiles kernels",
            CudaLibrary::Cublas | CudaLibrary::CublasLt => "products",
            CudaLibrary::Nccl => "collectives",
        }
    }

    /// Where to have it from.
    pub fn hint(self) -> &'static str {
        match self {
            CudaLibrary::Driver => "NVIDIA's driver for this system, 525 or newer",
            CudaLibrary::Nvrtc => "`pip install nvidia-cuda-nvrtc-cu12`, or the CUDA toolkit",
            CudaLibrary::Cublas | CudaLibrary::CublasLt => {
                "`pip install nvidia-cublas-cu12`, or the CUDA toolkit"
            }
            CudaLibrary::Nccl => "`pip install nvidia-nccl-cu12`, or NCCL's own package",
        }
    }
}

/// A file of a library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundLibrary {
    /// The file.
    pub path: PathBuf,
    /// What its name ends in: `2`, `13.2`, or nothing.
    pub version: String,
}

/// The variable that names a folder before all others.
pub const VARIABLE: &str = "NARROWS_CUDA_LIBRARIES";

/// The folders in which libraries are looked for, the first that has one before others: those that
/// variables name, those of packages of Python in an environment that is active, those of systems, and those of
/// packages of any other Python that is there. `variable` gives the value of a variable that is set.
pub fn places(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut places = vec![];
    for name in [VARIABLE, "LD_LIBRARY_PATH"] {
        let named = variable(name).unwrap_or_default();
        places.extend(std::env::split_paths(&named).filter(|path| !path.as_os_str().is_empty()));
    }
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        let toolkit = variable(name).map(PathBuf::from);
        places.extend(toolkit.iter().flat_map(|root| [root.join("lib64"), root.join("lib")]));
    }
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let Some(root) = variable(name).map(PathBuf::from) else { continue };
        places.extend(of_python(&root));
        places.push(root.join("lib"));
    }
    places.push("/usr/local/cuda/lib64".into());
    places.extend(
        folders(Path::new("/usr/local"), |name| name.starts_with("cuda-"))
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
    places.extend(systems.map(PathBuf::from));
    let paths = variable("PATH").unwrap_or_default();
    let pythons = std::env::split_paths(&paths).filter(|path| path.join("python3").is_file());
    let mut roots: Vec<PathBuf> =
        pythons.filter_map(|path| path.parent().map(Path::to_owned)).collect();
    // Where `pip install --user` puts packages, and where Debian's pip does.
    roots.extend(variable("HOME").map(|home| Path::new(&home).join(".local")));
    roots.push("/usr/local".into());
    for place in roots.iter().flat_map(|root| of_python(root)) {
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

/// Where packages of Python that are installed under a root have libraries.
fn of_python(root: &Path) -> Vec<PathBuf> {
    let mut found = vec![];
    for python in folders(&root.join("lib"), |name| name.starts_with("python3")) {
        for packages in ["site-packages/nvidia", "dist-packages/nvidia"] {
            for package in folders(&python.join(packages), |_| true) {
                found.push(package.join("lib"));
            }
        }
    }
    found
}

/// Folders in a folder, the last in the order of their names first: newer versions before older.
fn folders(within: &Path, wanted: impl Fn(&str) -> bool) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(within).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_str().is_some_and(&wanted))
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    found.sort();
    found.into_iter().rev()
}

/// The file of each library that is there, from the first folder that has one.
pub fn find(places: &[PathBuf]) -> BTreeMap<CudaLibrary, FoundLibrary> {
    let mut found = BTreeMap::new();
    for place in places {
        for library in CudaLibrary::ALL {
            if let Some(file) = newest(place, library) {
                found.entry(library).or_insert(file);
            }
        }
    }
    found
}

/// The file of a library with the highest version in a folder.
fn newest(place: &Path, library: CudaLibrary) -> Option<FoundLibrary> {
    let entries = fs::read_dir(place).ok()?.flatten();
    let files = entries.filter_map(|entry| {
        let name = entry.file_name();
        let version = version(name.to_str()?, library.stem())?.to_owned();
        // A link may lead nowhere.
        let path = entry.path();
        path.is_file().then_some(FoundLibrary { path, version })
    });
    files.max_by_key(|file| numbers(&file.version))
}

/// What comes after `libSTEM.so` in a file's name, without the dot.
fn version<'n>(name: &'n str, stem: &str) -> Option<&'n str> {
    let rest = name.strip_prefix("lib")?.strip_prefix(stem)?.strip_prefix(".so")?;
    let version = if rest.is_empty() { rest } else { rest.strip_prefix('.')? };
    version.chars().all(|c| c.is_ascii_digit() || c == '.').then_some(version)
}

fn numbers(version: &str) -> Vec<u64> {
    version.split('.').filter_map(|part| part.parse().ok()).collect()
}

/// What is linked with a library, because it loads them by their own names.
const COMPANIONS: [&str; 5] = ["libnvrtc", "libcublas", "libnccl", "libnvJitLink", "libcudart"];

/// Makes a folder of links to these libraries, under the names that they are asked for by, and to what
/// lies beside them that they load themselves. Of the driver no link is made: that of another system
/// would be worse than none.
///
/// # Errors
/// When the folder cannot be made.
pub fn link(found: &BTreeMap<CudaLibrary, FoundLibrary>, folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for (library, file) in found.iter().filter(|(library, _)| **library != CudaLibrary::Driver) {
        let own = folder.join(format!("lib{}.so", library.stem()));
        make_link(&file.path, &own)?;
        let beside = file.path.parent().and_then(|place| fs::read_dir(place).ok());
        for entry in beside.into_iter().flatten().flatten() {
            let name = entry.file_name();
            if is_companion(&name) {
                make_link(&entry.path(), &folder.join(name))?;
            }
        }
    }
    Ok(())
}

fn is_companion(name: &OsStr) -> bool {
    let name = name.to_str().unwrap_or_default();
    name.contains(".so") && COMPANIONS.iter().any(|companion| name.starts_with(companion))
}

/// A link, also where there was one, and where another process makes the same one.
#[cfg(unix)]
fn make_link(to: &Path, at: &Path) -> io::Result<()> {
    let to = fs::canonicalize(to)?;
    if fs::read_link(at).is_ok_and(|now| now == to) {
        return Ok(());
    }
    let name = at.file_name().unwrap_or_default().to_string_lossy();
    let made = at.with_file_name(format!(".{name}.{}", std::process::id()));
    let _ = fs::remove_file(&made);
    std::os::unix::fs::symlink(to, &made)?;
    fs::rename(made, at)
}

#[cfg(not(unix))]
fn make_link(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        folder
    }

    #[test]
    fn versions_are_read_from_names() {
        assert_eq!(version("libnccl.so.2", "nccl"), Some("2"));
        assert_eq!(version("libnvrtc.so", "nvrtc"), Some(""));
        assert_eq!(version("libcublasLt.so.12.9.1", "cublasLt"), Some("12.9.1"));
        for other in ["libcublasLt.so.12", "libcublas_static.a", "libcublas.so.alt", "cublas.so"] {
            assert_eq!(version(other, "cublas"), None, "{other}");
        }
    }

    #[test]
    fn packages_of_python_are_found() {
        let packages = "lib/python3.11/site-packages/nvidia";
        let root = folder(&[
            &format!("{packages}/nccl/lib/libnccl.so.2"),
            &format!("{packages}/cuda_nvrtc/lib/libnvrtc.so.12"),
            &format!("{packages}/cuda_nvrtc/lib/libnvrtc-builtins.so.12.9"),
            "toolkit/lib64/libnvrtc.so.11",
            "toolkit/lib64/libnvrtc.so.9.2",
        ]);
        let places = places(|name| match name {
            "VIRTUAL_ENV" => Some(root.path().into()),
            "CUDA_HOME" => Some(root.path().join("toolkit").into()),
            _ => None,
        });
        let found = find(&places);
        // The toolkit was named, and 11 is more than 9.
        let nvrtc = &found[&CudaLibrary::Nvrtc];
        assert!(nvrtc.path.ends_with("toolkit/lib64/libnvrtc.so.11"), "{nvrtc:?}");
        assert_eq!(
            (found[&CudaLibrary::Nccl].version.as_str(), nvrtc.version.as_str()),
            ("2", "11")
        );
    }

    /// A Python without an environment: the system's, a container's, or a user's packages.
    #[test]
    fn packages_of_a_python_that_would_be_started_are_found() {
        let root = folder(&[
            "opt/bin/python3",
            "opt/lib/python3.12/dist-packages/nvidia/nccl/lib/libnccl.so.2",
            "other/bin/perl",
            "other/lib/python3.12/site-packages/nvidia/cublas/lib/libcublas.so.12",
            "home/.local/lib/python3.12/site-packages/nvidia/cu13/lib/libcublasLt.so.13",
        ]);
        let at = |name: &str| root.path().join(name);
        let places = places(|name| match name {
            "PATH" => std::env::join_paths([at("other/bin"), at("opt/bin")]).ok(),
            "HOME" => Some(at("home").into()),
            _ => None,
        });
        let within: Vec<PathBuf> =
            places.into_iter().filter(|place| place.starts_with(root.path())).collect();
        let found = find(&within);
        let found: Vec<_> =
            found.iter().map(|(library, file)| (*library, &*file.version)).collect();
        assert_eq!(found, [(CudaLibrary::CublasLt, "13"), (CudaLibrary::Nccl, "2")]);
    }

    #[cfg(unix)]
    #[test]
    fn links_have_the_names_that_are_asked_for() {
        let packages = folder(&[
            "a/libnccl.so.2",
            "b/libnvrtc.so.13",
            "b/libnvrtc-builtins.so.13.2",
            "b/other.so",
        ]);
        let places = ["a", "b"].map(|name| packages.path().join(name));
        let links = packages.path().join("links");
        for _ in 0..2 {
            link(&find(&places), &links).unwrap();
            let mut names: Vec<String> = fs::read_dir(&links)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            let wanted = [
                "libnccl.so",
                "libnccl.so.2",
                "libnvrtc-builtins.so.13.2",
                "libnvrtc.so",
                "libnvrtc.so.13",
            ];
            assert_eq!(names, wanted);
        }
        assert_eq!(fs::read_to_string(links.join("libnvrtc.so")).unwrap(), "b/libnvrtc.so.13");
        // A newer package takes the place of an older one.
        fs::write(packages.path().join("b/libnvrtc.so.14"), "newer").unwrap();
        link(&find(&places), &links).unwrap();
        assert_eq!(fs::read_to_string(links.join("libnvrtc.so")).unwrap(), "newer");
    }
}
