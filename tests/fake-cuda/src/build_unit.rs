//! Compilation of one shared library.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

const FLAGS: [&str; 6] = ["-std=c++17", "-fPIC", "-shared", "-Wall", "-Wextra", "-pthread"];

/// A shared library to be compiled.
pub(crate) struct BuildUnit {
    /// File name of the library.
    pub name: String,
    /// Names and contents of its sources and headers.
    pub files: Vec<(String, String)>,
    /// Additional compiler flags.
    pub flags: Vec<String>,
    /// Further file names of the library.
    pub aliases: &'static [&'static str],
    /// Whether it calls functions of the fake driver.
    pub links_driver: bool,
}

/// Hash of a list of texts, in hexadecimal.
pub(crate) fn digest(texts: impl Iterator<Item = impl AsRef<[u8]>>) -> String {
    let mut hash = Sha256::new();
    for text in texts {
        hash.update((text.as_ref().len() as u64).to_le_bytes());
        hash.update(text);
    }
    hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

fn is_source(name: &str) -> bool {
    name.ends_with(".cpp") || name.ends_with(".cu")
}

impl BuildUnit {
    /// Hash of everything the library depends on.
    pub fn digest(&self, compiler: &str) -> String {
        let files = self.files.iter().flat_map(|(name, text)| [name.as_str(), text.as_str()]);
        let flags = FLAGS.into_iter().chain(self.flags.iter().map(String::as_str));
        digest(files.chain(flags).chain([compiler, self.name.as_str()]))
    }

    /// Size of its sources and headers, an estimate of the compile time.
    pub fn bytes(&self) -> usize {
        self.files.iter().map(|(_, text)| text.len()).sum()
    }

    /// Path of the library, which is compiled unless it is in the store. The sources are one translation unit, because
    /// most of the time goes to the standard headers that each of them includes.
    ///
    /// # Panics
    /// When it does not compile without warnings.
    pub fn compile(&self, compiler: &str, store: &Path, driver: Option<&Path>) -> PathBuf {
        let library = store.join(format!("{}-{}", self.digest(compiler), self.name));
        if library.exists() {
            return library;
        }
        // A separate folder per process and thread, so that concurrent builds do not interfere.
        let build = tempfile::Builder::new().prefix(&self.name).tempdir_in(store);
        let build = build.expect("a folder");
        for (name, text) in &self.files {
            fs::write(build.path().join(name), text).expect("a source");
        }
        let mut command = Command::new(compiler);
        command.current_dir(build.path()).args(FLAGS).args(&self.flags);
        let sources = self.files.iter().map(|(name, _)| name).filter(|name| is_source(name));
        let includes: String = sources.map(|name| format!("#include \"{name}\"\n")).collect();
        fs::write(build.path().join("library.cpp"), includes).expect("a source");
        command.args(["-o", "library.so", "library.cpp", "-ldl"]);
        if let Some(driver) = driver.filter(|_| self.links_driver) {
            command.arg(fs::canonicalize(driver).expect("the driver's library"));
        }
        let output = command.output().expect("the compiler runs");
        let messages = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{compiler} {}: {messages}", self.name);
        assert!(messages.is_empty(), "{compiler} warns about {}: {messages}", self.name);
        fs::rename(build.path().join("library.so"), &library).expect("a library");
        library
    }
}
