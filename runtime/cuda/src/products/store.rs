//! Which algorithm is the fastest for a product, kept between runs.
//!
//! An algorithm is 64 bytes of cuBLASLt's, which mean something to one version of it on one kind of GPU:
//! each such pair has a file of its own in the folder. A file carries the hash of what it says. One that
//! does not fit it, or is of something else, is as good as none: what is lost is the time of looking for
//! the algorithms again. Files are written whole, under another name first. Processes that write the same
//! file at once lose nothing but what the others found, and the first algorithm that a file has
//! for a product stays, so that later runs compute the same bits.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::MatmulKey;
use narrows_runtime::{AtomicFile, sha256};

const FORMAT: &str = "narrows-algorithms/1";

/// What an algorithm depends on besides the product.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Platform {
    /// The GPU's name, as its driver says it.
    pub gpu: String,
    /// The version of cuBLASLt.
    pub cublaslt: String,
}

/// An algorithm, as cuBLASLt gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulAlgorithm {
    /// `cublasLtMatmulAlgo_t`.
    pub data: [u64; 8],
    /// The memory it wants besides the operands.
    pub workspace_bytes: u64,
}

/// The algorithms of one version of cuBLASLt on one kind of GPU.
#[derive(Clone, Debug)]
pub struct AlgorithmStore {
    path: PathBuf,
    platform: Platform,
    algorithms: BTreeMap<MatmulKey, MatmulAlgorithm>,
    /// Whether there is something that the file may lack.
    changed: bool,
    /// Of which products what the file has does not work.
    replaced: BTreeSet<MatmulKey>,
}

/// A file of algorithms that is as good as none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{path}: {why}; the algorithms of products are looked for again, and the file is written anew"
)]
pub struct Unusable {
    /// The file.
    pub path: String,
    /// What is wrong with it.
    pub why: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredAlgorithm {
    product: MatmulKey,
    algorithm: MatmulAlgorithm,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoreFile {
    format: String,
    platform: Platform,
    algorithms: Vec<StoredAlgorithm>,
    /// Of the platform and the algorithms.
    sha256: String,
}

impl AlgorithmStore {
    /// What a folder has for this GPU and library: nothing where there is no file. A file that cannot
    /// be used is said to be so, once, and is as good as none.
    pub fn load(folder: &Path, platform: Platform) -> (AlgorithmStore, Option<Unusable>) {
        let path = folder.join(file_name(&platform));
        let (algorithms, unusable) = match read(&path, &platform) {
            Ok(algorithms) => (algorithms, None),
            Err(why) => (BTreeMap::new(), Some(Unusable { path: path.display().to_string(), why })),
        };
        let (changed, replaced) = (false, BTreeSet::new());
        (AlgorithmStore { path, platform, algorithms, changed, replaced }, unusable)
    }

    /// The file, whether it is there or not.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The algorithm of a product, if it was looked for.
    pub fn get(&self, product: &MatmulKey) -> Option<&MatmulAlgorithm> {
        self.algorithms.get(product)
    }

    /// How many products have one.
    pub fn len(&self) -> usize {
        self.algorithms.len()
    }

    /// Whether no product has one.
    pub fn is_empty(&self) -> bool {
        self.algorithms.is_empty()
    }

    /// Keeps an algorithm.
    pub fn insert(&mut self, product: MatmulKey, algorithm: MatmulAlgorithm) {
        self.changed |= self.algorithms.insert(product, algorithm) != Some(algorithm);
    }

    /// Keeps an algorithm in place of one that does not work, also in the file.
    pub fn replace(&mut self, product: MatmulKey, algorithm: MatmulAlgorithm) {
        self.insert(product, algorithm);
        self.replaced.insert(product);
    }

    /// Writes the file, with what another process has put there since. Does nothing where nothing
    /// was kept since it was loaded or saved.
    ///
    /// # Errors
    /// When the folder or the file cannot be written. What was there is still there.
    pub fn save(&mut self) -> io::Result<()> {
        if !self.changed {
            return Ok(());
        }
        let mut all = self.algorithms.clone();
        let kept = read(&self.path, &self.platform).unwrap_or_default();
        all.extend(kept.into_iter().filter(|(product, _)| !self.replaced.contains(product)));
        let algorithms: Vec<StoredAlgorithm> = all
            .into_iter()
            .map(|(product, algorithm)| StoredAlgorithm { product, algorithm })
            .collect();
        let sha256 = hash(&self.platform, &algorithms)?;
        let platform = self.platform.clone();
        let contents = StoreFile { format: FORMAT.into(), platform, algorithms, sha256 };
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

/// Names of GPUs have spaces, and may have anything.
fn file_name(platform: &Platform) -> String {
    let named = format!("{}-cublaslt-{}", platform.gpu, platform.cublaslt);
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
    let hash = hex::encode(sha256([&platform.gpu, "\n", &platform.cublaslt].concat().as_bytes()));
    let named: String = named.to_ascii_lowercase().chars().map(plain).take(80).collect();
    format!("{named}-{}.json", &hash[..8])
}

fn read(path: &Path, platform: &Platform) -> Result<BTreeMap<MatmulKey, MatmulAlgorithm>, String> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        read => read.map_err(|error| format!("it cannot be read: {error}"))?,
    };
    let contents: StoreFile =
        serde_json::from_slice(&bytes).map_err(|error| format!("it is damaged: {error}"))?;
    if contents.format != FORMAT {
        return Err(format!("it is of the form `{}`, not `{FORMAT}`", contents.format));
    }
    if contents.platform != *platform {
        let Platform { gpu, cublaslt } = &contents.platform;
        return Err(format!("it is of cuBLASLt {cublaslt} on {gpu}"));
    }
    let hashed = hash(platform, &contents.algorithms).map_err(|error| error.to_string())?;
    if hashed != contents.sha256 {
        return Err("it is damaged: its hash is of something else".into());
    }
    Ok(contents.algorithms.into_iter().map(|entry| (entry.product, entry.algorithm)).collect())
}

/// Of the form without spaces.
fn hash(platform: &Platform, algorithms: &[StoredAlgorithm]) -> io::Result<String> {
    let text = serde_json::to_vec(&(platform, algorithms))?;
    Ok(hex::encode(sha256(&text)))
}

#[cfg(test)]
mod tests {
    use narrows_plan::DType;

    use super::super::{StoredMatrix, Transpose};
    use super::*;

    fn product(m: u64) -> MatmulKey {
        let stored = |rows, columns, dtype| StoredMatrix {
            dtype,
            rows,
            columns,
            leading: rows,
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
        // All 64 bits of it must come back.
        MatmulAlgorithm {
            data: [first, u64::MAX, 0, 1 << 53, 3, 4, 5, 6],
            workspace_bytes: 1 << 20,
        }
    }

    fn platform(gpu: &str, cublaslt: &str) -> Platform {
        Platform { gpu: gpu.into(), cublaslt: cublaslt.into() }
    }

    /// What is there, of which nothing is wrong.
    fn load(folder: &Path, platform: &Platform) -> AlgorithmStore {
        let (store, unusable) = AlgorithmStore::load(folder, platform.clone());
        assert_eq!(unusable, None);
        store
    }

    #[test]
    fn what_is_saved_is_there_again() {
        let folder = tempfile::tempdir().unwrap();
        let within = folder.path().join("made when it is needed");
        let h200 = platform("NVIDIA H200", "12.9.1");
        let mut store = load(&within, &h200);
        store.save().unwrap();
        assert!(store.is_empty() && !within.exists());
        store.insert(product(8), algorithm(1));
        store.insert(product(16), algorithm(2));
        store.save().unwrap();
        let again = load(&within, &h200);
        assert_eq!((again.len(), again.get(&product(16))), (2, Some(&algorithm(2))));
        assert_eq!(again.get(&product(24)), None);
        // Other GPUs and libraries have files of their own.
        for other in [platform("NVIDIA A100", "12.9.1"), platform("NVIDIA H200", "13.2.0")] {
            let mut store = load(&within, &other);
            assert!(store.is_empty());
            store.insert(product(8), algorithm(3));
            store.save().unwrap();
        }
        assert_eq!(load(&within, &h200).get(&product(8)), Some(&algorithm(1)));
        let names: Vec<_> = fs::read_dir(&within).unwrap().map(|e| e.unwrap().path()).collect();
        assert_eq!(names.len(), 3, "nothing temporary is left: {names:?}");
    }

    /// Two that began with the same file lose nothing, and the first algorithm of a product stays.
    #[test]
    fn what_others_save_stays() {
        let folder = tempfile::tempdir().unwrap();
        let h200 = platform("NVIDIA H200", "12.9.1");
        let [mut one, mut two] = [(); 2].map(|()| load(folder.path(), &h200));
        one.insert(product(8), algorithm(1));
        one.insert(product(16), algorithm(2));
        two.insert(product(16), algorithm(3));
        two.insert(product(24), algorithm(4));
        one.save().unwrap();
        two.save().unwrap();
        let all = load(folder.path(), &h200);
        let found = [8, 16, 24].map(|m| all.get(&product(m)).map(|found| found.data[0]));
        assert_eq!(found, [Some(1), Some(2), Some(4)]);
        // Unless it does not work.
        let mut three = load(folder.path(), &h200);
        three.replace(product(16), algorithm(5));
        three.save().unwrap();
        assert_eq!(load(folder.path(), &h200).get(&product(16)), Some(&algorithm(5)));
    }

    #[test]
    fn a_damaged_file_is_as_good_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let h200 = platform("NVIDIA H200", "12.9.1");
        let mut store = load(folder.path(), &h200);
        store.insert(product(8), algorithm(1));
        store.save().unwrap();
        let whole = fs::read_to_string(store.path()).unwrap();
        let replaced = |from: &str, to: &str| {
            assert!(whole.contains(from), "{from}");
            whole.replacen(from, to, 1)
        };
        let cases = [
            (String::new(), "it is damaged"),
            (whole[..whole.len() / 2].to_string(), "it is damaged"),
            (replaced("\"m\": 8", "\"m\": 9"), "its hash is of something else"),
            (replaced("9007199254740992", "9007199254740993"), "its hash is of something else"),
            (replaced("algorithms/1", "algorithms/2"), "it is of the form"),
            (replaced("H200", "A100"), "it is of cuBLASLt 12.9.1 on NVIDIA A100"),
            (replaced("\"n\": 16", "\"o\": 16"), "unknown field"),
        ];
        for (damaged, wanted) in cases {
            fs::write(store.path(), damaged).unwrap();
            let (mut found, unusable) = AlgorithmStore::load(folder.path(), h200.clone());
            let said = unusable.expect("a warning").to_string();
            assert!(said.contains(wanted) && said.contains("looked for again"), "{said}");
            assert!(found.is_empty());
            found.insert(product(8), algorithm(1));
            found.save().unwrap();
            assert_eq!(fs::read_to_string(store.path()).unwrap(), whole);
        }
        fs::remove_file(store.path()).unwrap();
        fs::create_dir(store.path()).unwrap();
        let (mut blocked, unusable) = AlgorithmStore::load(folder.path(), h200);
        assert!(unusable.expect("a warning").to_string().contains("it cannot be read"));
        blocked.insert(product(8), algorithm(1));
        assert!(blocked.save().is_err());
    }
}
