//! The fastest cuBLASLt algorithm of each matmul, kept between runs.
//!
//! An algorithm is an opaque blob of 64 bytes, valid for one version of cuBLASLt on one GPU model; each such
//! platform has a file in the folder, whose name contains the version of the format. A file that does not parse or
//! belongs to another platform is ignored, at the cost of selecting the algorithms again; cuBLASLt checks every
//! algorithm before it runs. Files are written atomically. Of several processes that write a file concurrently, one may overwrite the additions of another. The
//! first algorithm stored for a matmul stays, so that later runs compute the same bits.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{fs, io};

use serde::{Deserialize, Serialize};

use super::key::MatmulKey;
use narrows_runtime::AtomicFile;

/// Version of the format and of the selection. A new one has new files.
const VERSION: u32 = 2;

/// GPU and library version, on which an algorithm depends besides the matmul.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Platform {
    /// Name of the GPU, as the driver reports it.
    pub gpu: String,
    /// Version of cuBLASLt.
    pub cublaslt: String,
}

/// An algorithm of cuBLASLt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MatmulAlgorithm {
    /// `cublasLtMatmulAlgo_t`.
    pub data: [u64; 8],
    /// Workspace that it needs.
    pub workspace_bytes: u64,
}

/// The algorithms for one platform.
#[derive(Clone, Debug)]
pub(crate) struct AlgorithmStore {
    path: PathBuf,
    platform: Platform,
    algorithms: BTreeMap<MatmulKey, MatmulAlgorithm>,
    /// Whether there are entries that the file may lack.
    changed: bool,
    /// Matmuls whose algorithm in the file does not work.
    replaced: BTreeSet<MatmulKey>,
}

/// A file of algorithms that is ignored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {reason}; the algorithms of matmuls are selected again, and the file is replaced")]
pub(crate) struct UnusableAlgorithmFile {
    /// The file.
    pub path: String,
    /// Reason why the file cannot be used.
    pub reason: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredAlgorithm {
    #[serde(rename = "matmul")]
    key: MatmulKey,
    algorithm: MatmulAlgorithm,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoreFile {
    platform: Platform,
    algorithms: Vec<StoredAlgorithm>,
}

impl AlgorithmStore {
    /// Loads the algorithms for a platform from a folder; none where there is no file. Also returns why an
    /// existing file is ignored.
    pub fn load(
        folder: &Path,
        platform: Platform,
    ) -> (AlgorithmStore, Option<UnusableAlgorithmFile>) {
        let path = folder.join(file_name(&platform));
        let (algorithms, unusable) = match read_file(&path, &platform) {
            Ok(algorithms) => (algorithms, None),
            Err(why) => (
                BTreeMap::new(),
                Some(UnusableAlgorithmFile { path: path.display().to_string(), reason: why }),
            ),
        };
        let (changed, replaced) = (false, BTreeSet::new());
        (AlgorithmStore { path, platform, algorithms, changed, replaced }, unusable)
    }

    /// Path of the file, whether it exists or not.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The algorithm of a matmul.
    pub fn get(&self, key: &MatmulKey) -> Option<&MatmulAlgorithm> {
        self.algorithms.get(key)
    }

    /// Stores an algorithm.
    pub fn insert(&mut self, key: MatmulKey, algorithm: MatmulAlgorithm) {
        self.changed |= self.algorithms.insert(key, algorithm) != Some(algorithm);
    }

    /// Stores an algorithm that also replaces the one in the file.
    pub fn replace(&mut self, key: MatmulKey, algorithm: MatmulAlgorithm) {
        self.insert(key, algorithm);
        self.replaced.insert(key);
    }

    /// Writes the file, merged with what other processes have added to it. Does nothing if nothing changed since
    /// it was loaded or saved.
    ///
    /// # Errors
    /// When the folder or the file cannot be written. The previous file is then intact.
    pub fn save(&mut self) -> io::Result<()> {
        if !self.changed {
            return Ok(());
        }
        let mut all = self.algorithms.clone();
        let stored = read_file(&self.path, &self.platform).unwrap_or_default();
        all.extend(stored.into_iter().filter(|(key, _)| !self.replaced.contains(key)));
        let algorithms: Vec<StoredAlgorithm> =
            all.into_iter().map(|(key, algorithm)| StoredAlgorithm { key, algorithm }).collect();
        let contents = StoreFile { platform: self.platform.clone(), algorithms };
        let text = serde_json::to_vec_pretty(&contents)?;
        if let Some(folder) = self.path.parent() {
            fs::create_dir_all(folder)?;
        }
        let mut file = AtomicFile::create(&self.path)?;
        file.write(&text)?;
        file.finish(&[])?;
        self.changed = false;
        Ok(())
    }
}

/// File name of a platform.
fn file_name(platform: &Platform) -> String {
    let named = format!("{}-cublaslt-{}", platform.gpu, platform.cublaslt);
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
    let named: String = named.to_ascii_lowercase().chars().map(plain).take(80).collect();
    format!("{named}-v{VERSION}.json")
}

fn read_file(
    path: &Path,
    platform: &Platform,
) -> Result<BTreeMap<MatmulKey, MatmulAlgorithm>, String> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        read => read.map_err(|error| format!("it cannot be read: {error}"))?,
    };
    let contents: StoreFile =
        serde_json::from_slice(&bytes).map_err(|error| format!("it is damaged: {error}"))?;
    if contents.platform != *platform {
        let Platform { gpu, cublaslt } = &contents.platform;
        return Err(format!("it belongs to cuBLASLt {cublaslt} on {gpu}"));
    }
    Ok(contents.algorithms.into_iter().map(|entry| (entry.key, entry.algorithm)).collect())
}

#[cfg(test)]
mod tests {
    use narrows_plan::DType;

    use super::*;
    use crate::matmul::key::{StoredMatrix, Transpose};

    fn matmul_key(m: u64) -> MatmulKey {
        let stored = |rows, columns, dtype| StoredMatrix {
            dtype,
            rows,
            columns,
            leading_dimension: rows,
            batch_stride: 0,
            alignment_bytes: 256,
        };
        MatmulKey {
            m,
            n: 16,
            k: 24,
            batch: 1,
            operation_a: Transpose::T,
            operation_b: Transpose::N,
            a: stored(24, m, DType::Bf16),
            b: stored(24, 16, DType::Bf16),
            c: stored(m, 16, DType::F32),
            accumulate: true,
            workspace_bytes: 32 << 20,
        }
    }

    fn algorithm(first: u64) -> MatmulAlgorithm {
        // JSON must preserve all 64 bits.
        MatmulAlgorithm {
            data: [first, u64::MAX, 0, 1 << 53, 3, 4, 5, 6],
            workspace_bytes: 1 << 20,
        }
    }

    fn platform(gpu: &str, cublaslt: &str) -> Platform {
        Platform { gpu: gpu.into(), cublaslt: cublaslt.into() }
    }

    /// Loads a store whose file is absent or usable.
    fn load(folder: &Path, platform: &Platform) -> AlgorithmStore {
        let (store, unusable) = AlgorithmStore::load(folder, platform.clone());
        assert_eq!(unusable, None);
        store
    }

    #[test]
    fn saved_algorithms_are_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let within = folder.path().join("created on demand");
        let h200 = platform("NVIDIA H200", "12.9.1");
        let mut store = load(&within, &h200);
        store.save().unwrap();
        assert!(store.algorithms.is_empty() && !within.exists());
        store.insert(matmul_key(8), algorithm(1));
        store.insert(matmul_key(16), algorithm(2));
        store.save().unwrap();
        let again = load(&within, &h200);
        assert_eq!((again.algorithms.len(), again.get(&matmul_key(16))), (2, Some(&algorithm(2))));
        assert_eq!(again.get(&matmul_key(24)), None);
        // Other platforms have separate files.
        for other in [platform("NVIDIA A100", "12.9.1"), platform("NVIDIA H200", "13.2.0")] {
            let mut store = load(&within, &other);
            assert!(store.algorithms.is_empty());
            store.insert(matmul_key(8), algorithm(3));
            store.save().unwrap();
        }
        assert_eq!(load(&within, &h200).get(&matmul_key(8)), Some(&algorithm(1)));
        let names: Vec<_> = fs::read_dir(&within).unwrap().map(|e| e.unwrap().path()).collect();
        assert_eq!(names.len(), 3, "temporary files remain: {names:?}");
    }

    /// Two stores loaded from the same file merge, and the first algorithm of a matmul stays.
    #[test]
    fn concurrent_saves_merge() {
        let folder = tempfile::tempdir().unwrap();
        let h200 = platform("NVIDIA H200", "12.9.1");
        let [mut one, mut two] = [(); 2].map(|()| load(folder.path(), &h200));
        one.insert(matmul_key(8), algorithm(1));
        one.insert(matmul_key(16), algorithm(2));
        two.insert(matmul_key(16), algorithm(3));
        two.insert(matmul_key(24), algorithm(4));
        one.save().unwrap();
        two.save().unwrap();
        let all = load(folder.path(), &h200);
        let ids = [8, 16, 24].map(|m| all.get(&matmul_key(m)).map(|algorithm| algorithm.data[0]));
        assert_eq!(ids, [Some(1), Some(2), Some(4)]);
        // Except one that was replaced because it does not work.
        let mut three = load(folder.path(), &h200);
        three.replace(matmul_key(16), algorithm(5));
        three.save().unwrap();
        assert_eq!(load(folder.path(), &h200).get(&matmul_key(16)), Some(&algorithm(5)));
    }

    #[test]
    fn a_damaged_file_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let h200 = platform("NVIDIA H200", "12.9.1");
        let mut store = load(folder.path(), &h200);
        store.insert(matmul_key(8), algorithm(1));
        store.save().unwrap();
        let whole = fs::read_to_string(store.path()).unwrap();
        let replaced = |from: &str, to: &str| {
            assert!(whole.contains(from), "{from}");
            whole.replacen(from, to, 1)
        };
        let cases = [
            (String::new(), "it is damaged"),
            (whole[..whole.len() / 2].to_string(), "it is damaged"),
            (replaced("H200", "A100"), "it belongs to cuBLASLt 12.9.1 on NVIDIA A100"),
            (replaced("\"n\": 16", "\"o\": 16"), "unknown field"),
        ];
        for (damaged, expected) in cases {
            fs::write(store.path(), damaged).unwrap();
            let (mut reloaded, unusable) = AlgorithmStore::load(folder.path(), h200.clone());
            let message = unusable.expect("a warning").to_string();
            assert!(message.contains(expected) && message.contains("selected again"), "{message}");
            assert!(reloaded.algorithms.is_empty());
            reloaded.insert(matmul_key(8), algorithm(1));
            reloaded.save().unwrap();
            assert_eq!(fs::read_to_string(store.path()).unwrap(), whole);
        }
        fs::remove_file(store.path()).unwrap();
        fs::create_dir(store.path()).unwrap();
        let (mut blocked, unusable) = AlgorithmStore::load(folder.path(), h200);
        assert!(unusable.expect("a warning").to_string().contains("it cannot be read"));
        blocked.insert(matmul_key(8), algorithm(1));
        assert!(blocked.save().is_err());
    }
}
