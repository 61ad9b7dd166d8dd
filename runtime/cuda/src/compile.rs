//! Compilation of kernels by NVRTC, and the on-disk cache of cubins.
//!
//! NVRTC compiles to a cubin for one compute capability, since an older driver would reject a newer PTX. The
//! name of a cache entry is the SHA-256 of everything the machine code depends on: source, headers, options,
//! version of NVRTC and capability. The entry contains a SHA-256 over that key and the machine code, so that
//! truncated, corrupted or renamed files are detected and compiled again. Files are written atomically;
//! processes that compile the same source concurrently write identical entries.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::{fs, io, ptr};

use cudarc::nvrtc::sys;

use super::discovery::{self, COMPUTE_CAPABILITY_MIN};
use super::kernel_source::{KERNEL_HEADERS, KernelFamily, KernelHeader, NVRTC_OPTIONS};
use super::libraries::CudaLibrary;
use narrows_runtime::{AtomicFile, sha256};

/// First bytes of a cache entry.
const MAGIC: &[u8] = b"narrows cubin 1\n";
/// Earlier versions lack functions that are called here.
const NVRTC_MAJOR_MIN: u32 = 12;

/// A source file to be compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompileUnit<'a> {
    /// File name without `.cu`, for the compiler's log.
    pub name: &'a str,
    /// Contents, CUDA C++.
    pub source: &'a str,
    /// Headers that it may include.
    pub headers: &'a [KernelHeader],
}

impl From<KernelFamily> for CompileUnit<'static> {
    fn from(family: KernelFamily) -> Self {
        CompileUnit { name: family.name(), source: family.source(), headers: &KERNEL_HEADERS }
    }
}

/// Origin of a cubin: compiled or cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CubinOrigin {
    /// Read from the cache.
    Cached,
    /// Compiled: the cache had no entry.
    Compiled,
    /// Compiled: the entry of the cache was corrupted, and is replaced.
    Replaced,
}

/// Machine code of a source file for one compute capability.
#[derive(Debug)]
pub struct Cubin {
    /// ELF image for `cuModuleLoadData`.
    pub bytes: Vec<u8>,
    /// Whether the cubin was compiled or cached.
    pub origin: CubinOrigin,
    /// Error of writing the cache entry, if there was one: the next process compiles again.
    pub cache_error: Option<io::Error>,
}

/// Error of producing a cubin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// NVRTC does not load.
    #[error("CUDA kernels cannot be compiled: NVRTC does not load")]
    NvrtcMissing,
    /// NVRTC is too old.
    #[error(
        "CUDA kernels cannot be compiled by NVRTC {0}: version {NVRTC_MAJOR_MIN}.0 or newer is needed"
    )]
    NvrtcTooOld(String),
    /// The GPU is too old.
    #[error(
        "the CUDA kernels need compute capability {minimum} or newer (an A100 or a later GPU), and this GPU \
         has {0}.{1}",
        minimum = format_args!("{}.{}", COMPUTE_CAPABILITY_MIN.0, COMPUTE_CAPABILITY_MIN.1)
    )]
    UnsupportedCapability(u32, u32),
    /// A source, name or option contains a zero byte.
    #[error("{0} contains a zero byte")]
    ZeroByte(String),
    /// The compiler rejects the source or the options.
    #[error("`{name}.cu` does not compile with {options:?} by NVRTC {version}: {message}\n{log}")]
    Rejected {
        /// Name of the source file.
        name: String,
        /// Options of the compilation.
        options: Vec<String>,
        /// Version of the compiler.
        version: String,
        /// Message of the result code.
        message: String,
        /// Log of the compiler.
        log: String,
    },
    /// Another NVRTC function fails, for example because memory is exhausted.
    #[error("{call} fails for `{name}.cu`: {message}")]
    NvrtcCall {
        /// The function.
        call: &'static str,
        /// Name of the source file.
        name: String,
        /// Message of the result code.
        message: String,
    },
}

impl CompileError {
    /// Advice for the user.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            CompileError::NvrtcMissing
            | CompileError::NvrtcTooOld(_)
            // A GPU that is newer than the compiler needs a newer compiler.
            | CompileError::Rejected { .. } => Some(CudaLibrary::Nvrtc.install_hint()),
            CompileError::UnsupportedCapability(..) => Some("another GPU, or `--backend cpu`"),
            CompileError::ZeroByte(_) | CompileError::NvrtcCall { .. } => None,
        }
    }
}

/// The NVRTC compiler with a cache of cubins in a folder.
#[derive(Debug)]
pub struct CubinCache {
    folder: PathBuf,
    nvrtc_version: String,
    compilations: u64,
}

impl CubinCache {
    /// Loads NVRTC. The folder is created with the first entry.
    ///
    /// # Errors
    /// [`CompileError::NvrtcMissing`] where it does not load, [`CompileError::NvrtcTooOld`] where it is older than
    /// CUDA 12's.
    pub fn open(folder: impl Into<PathBuf>) -> Result<CubinCache, CompileError> {
        let version =
            discovery::library_version(CudaLibrary::Nvrtc).ok_or(CompileError::NvrtcMissing)?;
        let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major.is_none_or(|major| major < NVRTC_MAJOR_MIN) {
            return Err(CompileError::NvrtcTooOld(version));
        }
        Ok(CubinCache { folder: folder.into(), nvrtc_version: version, compilations: 0 })
    }

    /// Version of NVRTC.
    pub fn nvrtc_version(&self) -> &str {
        &self.nvrtc_version
    }

    /// Number of compilations by this object.
    pub fn compiled(&self) -> u64 {
        self.compilations
    }

    /// Path of the cache entry of a source, whether it exists or not.
    pub fn entry_path(
        &self,
        unit: &CompileUnit,
        capability: (u32, u32),
        options: &[&str],
    ) -> PathBuf {
        let key = cache_key(unit, &self.nvrtc_version, &all_options(capability, options));
        let (major, minor) = capability;
        self.folder.join(format!("{}-sm_{major}{minor}-{}.cubin", unit.name, hex::encode(key)))
    }

    /// Returns the cubin of a source for a compute capability, such as (9, 0) for sm_90, compiling it if the
    /// cache has no valid entry. `options` are appended to [`NVRTC_OPTIONS`].
    ///
    /// # Errors
    /// A [`CompileError`], with the compiler's log where the source does not compile.
    pub fn load_or_compile<'u>(
        &mut self,
        unit: impl Into<CompileUnit<'u>>,
        capability: (u32, u32),
        options: &[&str],
    ) -> Result<Cubin, CompileError> {
        let unit = unit.into();
        if capability < COMPUTE_CAPABILITY_MIN {
            return Err(CompileError::UnsupportedCapability(capability.0, capability.1));
        }
        let path = self.entry_path(&unit, capability, options);
        let options = all_options(capability, options);
        let key = cache_key(&unit, &self.nvrtc_version, &options);
        let entry = fs::read(&path);
        if let Some(bytes) = entry.as_deref().ok().and_then(|entry| verified_cubin(entry, &key)) {
            return Ok(Cubin {
                bytes: bytes.to_vec(),
                origin: CubinOrigin::Cached,
                cache_error: None,
            });
        }
        let origin = if entry.is_ok() { CubinOrigin::Replaced } else { CubinOrigin::Compiled };
        self.compilations += 1;
        let bytes = compile(&unit, &self.nvrtc_version, &options)?;
        let cache_error = write_entry(&path, &key, &bytes).err();
        Ok(Cubin { bytes, origin, cache_error })
    }
}

fn all_options((major, minor): (u32, u32), options: &[&str]) -> Vec<String> {
    let architecture = format!("--gpu-architecture=sm_{major}{minor}");
    let options = NVRTC_OPTIONS.iter().chain(options).map(|option| option.to_string());
    [architecture].into_iter().chain(options).collect()
}

/// Hash of everything the machine code depends on. Lists and strings are length-prefixed, so that different
/// inputs have different encodings.
fn cache_key(unit: &CompileUnit, version: &str, options: &[String]) -> [u8; 32] {
    let headers = unit.headers.iter().flat_map(|header| [header.name, header.text]);
    let lists: [Vec<&str>; 3] = [
        vec![unit.name, unit.source, version],
        headers.collect(),
        options.iter().map(String::as_str).collect(),
    ];
    let mut bytes = vec![];
    for list in lists {
        bytes.extend((list.len() as u64).to_le_bytes());
        for text in list {
            bytes.extend((text.len() as u64).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
    }
    sha256(&bytes)
}

fn checksum(key: &[u8; 32], cubin: &[u8]) -> [u8; 32] {
    sha256(&[key, cubin].concat())
}

/// The machine code of a cache entry, if the entry is intact and has this key.
fn verified_cubin<'e>(entry: &'e [u8], key: &[u8; 32]) -> Option<&'e [u8]> {
    let (sum, cubin) = entry.strip_prefix(MAGIC)?.split_at_checked(32)?;
    (sum == checksum(key, cubin)).then_some(cubin)
}

fn write_entry(path: &Path, key: &[u8; 32], cubin: &[u8]) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut file = AtomicFile::create(path)?;
    for part in [MAGIC, &checksum(key, cubin), cubin] {
        file.write(part)?;
    }
    file.finish(&[])
}

/// An `nvrtcProgram` that is destroyed on drop.
struct NvrtcProgram<'a> {
    raw: sys::nvrtcProgram,
    name: &'a str,
}

impl Drop for NvrtcProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: NVRTC created the program, and it is not used afterwards.
        let _ = unsafe { sys::nvrtcDestroyProgram(&raw mut self.raw) };
    }
}

impl NvrtcProgram<'_> {
    fn check(&self, call: &'static str, result: sys::nvrtcResult) -> Result<(), CompileError> {
        check_result(self.name, call, result)
    }

    /// Log of the compilation; empty where NVRTC does not return it.
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program is valid, and the buffer has the size that NVRTC reports.
        unsafe {
            if sys::nvrtcGetProgramLogSize(self.raw, &raw mut size) != SUCCESS {
                return String::new();
            }
            let mut log = vec![0u8; size.max(1)];
            if sys::nvrtcGetProgramLog(self.raw, log.as_mut_ptr().cast()) != SUCCESS {
                return String::new();
            }
            let log = CStr::from_bytes_until_nul(&log).unwrap_or_default();
            log.to_string_lossy().trim_end().to_owned()
        }
    }

    fn cubin(&self) -> Result<Vec<u8>, CompileError> {
        let mut size = 0;
        // SAFETY: the program was compiled, and the buffer has the size that NVRTC reports.
        unsafe {
            let result = sys::nvrtcGetCUBINSize(self.raw, &raw mut size);
            self.check("nvrtcGetCUBINSize", result)?;
            let mut cubin = vec![0u8; size];
            let result = sys::nvrtcGetCUBIN(self.raw, cubin.as_mut_ptr().cast::<c_char>());
            self.check("nvrtcGetCUBIN", result)?;
            Ok(cubin)
        }
    }
}

const SUCCESS: sys::nvrtcResult = sys::nvrtcResult::NVRTC_SUCCESS;

fn check_result(
    name: &str,
    call: &'static str,
    result: sys::nvrtcResult,
) -> Result<(), CompileError> {
    if result == SUCCESS {
        return Ok(());
    }
    Err(CompileError::NvrtcCall { call, name: name.into(), message: error_string(result) })
}

fn error_string(result: sys::nvrtcResult) -> String {
    // SAFETY: NVRTC returns a static string for every result.
    let text = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(result)) };
    text.to_string_lossy().into_owned()
}

fn compile(unit: &CompileUnit, version: &str, options: &[String]) -> Result<Vec<u8>, CompileError> {
    let c_string = |what: &str, text: &str| {
        CString::new(text).map_err(|_| CompileError::ZeroByte(format!("{what} of `{}`", unit.name)))
    };
    let c_strings = |what: &str, texts: &mut dyn Iterator<Item = &str>| {
        texts.map(|text| c_string(what, text)).collect::<Result<Vec<CString>, CompileError>>()
    };
    let names = c_strings("a header's name", &mut unit.headers.iter().map(|header| header.name))?;
    let texts = c_strings("a header", &mut unit.headers.iter().map(|header| header.text))?;
    let options_c = c_strings("an option", &mut options.iter().map(String::as_str))?;
    let (source, file) = (c_string("the source", unit.source)?, format!("{}.cu", unit.name));
    let file = c_string("the name", &file)?;
    let pointers =
        |strings: &[CString]| strings.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
    let (name_pointers, text_pointers) = (pointers(&names), pointers(&texts));
    let option_pointers = pointers(&options_c);

    let mut raw = ptr::null_mut();
    // SAFETY: NVRTC is loaded, since its version is known. All strings outlive the call, and the counts match.
    let created = unsafe {
        sys::nvrtcCreateProgram(
            &raw mut raw,
            source.as_ptr(),
            file.as_ptr(),
            texts.len() as c_int,
            text_pointers.as_ptr(),
            name_pointers.as_ptr(),
        )
    };
    check_result(unit.name, "nvrtcCreateProgram", created)?;
    let program = NvrtcProgram { raw, name: unit.name };
    // SAFETY: as above, and the program is valid.
    let result = unsafe {
        sys::nvrtcCompileProgram(program.raw, options_c.len() as c_int, option_pointers.as_ptr())
    };
    let rejected = |message: String| CompileError::Rejected {
        name: unit.name.into(),
        options: options.to_vec(),
        version: version.into(),
        message,
        log: program.log(),
    };
    if result != SUCCESS {
        return Err(rejected(error_string(result)));
    }
    let cubin = program.cubin()?;
    if cubin.is_empty() {
        return Err(rejected("it produced no machine code".into()));
    }
    Ok(cubin)
}
