//! Kernels as machine code, compiled when they are first asked for and kept on disk.
//!
//! NVRTC compiles to a cubin for one compute capability: a newer assembly text would be refused by an older
//! driver. An entry of the folder is named by the SHA-256 of all that the machine code depends on:
//! the text, the headers, the options, the version of NVRTC and the capability. It holds the SHA-256 of that
//! name and of the machine code, so that a file that is cut short, damaged or renamed is known to be,
//! and compiled again. Files are written whole, under another name first; processes that compile the same
//! text at once do the work twice and agree.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::ptr;

use cudarc::nvrtc::sys;

use super::libraries::CudaLibrary;
use super::machine::{self, CAPABILITY_MIN};
use super::source::{HEADERS, KernelFamily, KernelHeader, NVRTC_OPTIONS};
use narrows_runtime::{AtomicFile, sha256};

/// What an entry begins with.
const MAGIC: &[u8] = b"narrows cubin 1\n";
/// Older NVRTC lacks functions that are called here.
const VERSION_MIN: u32 = 12;

/// A text to be compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompileUnit<'a> {
    /// What it is called in the compiler's log, without an ending.
    pub name: &'a str,
    /// CUDA C++.
    pub text: &'a str,
    /// What it may include.
    pub headers: &'a [KernelHeader],
}

impl From<KernelFamily> for CompileUnit<'static> {
    fn from(family: KernelFamily) -> Self {
        CompileUnit { name: family.name(), text: family.text(), headers: &HEADERS }
    }
}

/// Where machine code came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CubinOrigin {
    /// From an entry of the folder.
    Kept,
    /// From the compiler: there was no entry.
    Compiled,
    /// From the compiler: there was an entry, and it was damaged.
    Repaired,
}

/// Machine code.
#[derive(Debug)]
pub struct Cubin {
    /// An ELF image, as `cuModuleLoadData` takes it.
    pub bytes: Vec<u8>,
    /// Where it came from.
    pub came: CubinOrigin,
    /// Why it could not be kept, where it could not: it will be compiled again.
    pub unkept: Option<io::Error>,
}

/// Why there is no machine code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// NVRTC does not load.
    #[error("no CUDA kernels can be compiled: NVRTC does not load; {hint}", hint = CudaLibrary::Nvrtc.hint())]
    Absent,
    /// NVRTC is too old.
    #[error(
        "no CUDA kernels can be compiled by NVRTC {0}: it takes {VERSION_MIN}.0 or newer; {hint}",
        hint = CudaLibrary::Nvrtc.hint()
    )]
    Old(String),
    /// A GPU is too old.
    #[error(
        "no CUDA kernels for compute capability {0}.{1}: they need {least} or newer, an A100 or a GPU \
         of a later generation",
        least = format_args!("{}.{}", CAPABILITY_MIN.0, CAPABILITY_MIN.1)
    )]
    Capability(u32, u32),
    /// A text that no C function can be given.
    #[error("{0} has a zero byte, which nothing that is compiled has")]
    ZeroByte(String),
    /// The compiler refuses the text or the options.
    #[error(
        "`{name}.cu` does not compile with {options:?} by NVRTC {version}: {said}\n{log}\n\
         A GPU that is newer than the compiler needs a newer one: {hint}",
        hint = CudaLibrary::Nvrtc.hint()
    )]
    Refused {
        /// The text's name.
        name: String,
        /// The options.
        options: Vec<String>,
        /// The compiler's version.
        version: String,
        /// What kind of error it says it is.
        said: String,
        /// The compiler's log.
        log: String,
    },
    /// A function of NVRTC fails that only can when memory does.
    #[error("`{call}` of NVRTC fails for `{name}.cu`: {said}")]
    Failed {
        /// The function.
        call: &'static str,
        /// The text's name.
        name: String,
        /// What it says.
        said: String,
    },
}

/// A compiler, and the folder where machine code is kept.
#[derive(Debug)]
pub struct CubinCache {
    folder: PathBuf,
    version: String,
    compiled: u64,
}

impl CubinCache {
    /// Looks for NVRTC. The folder is made when something is first kept there.
    ///
    /// # Errors
    /// [`CompileError::Absent`] where it does not load, [`CompileError::Old`] where it is older than
    /// CUDA 12's.
    pub fn open(folder: impl Into<PathBuf>) -> Result<CubinCache, CompileError> {
        let version = machine::version(CudaLibrary::Nvrtc).ok_or(CompileError::Absent)?;
        let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major.is_none_or(|major| major < VERSION_MIN) {
            return Err(CompileError::Old(version));
        }
        Ok(CubinCache { folder: folder.into(), version, compiled: 0 })
    }

    /// The version of NVRTC.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// How often the compiler has run.
    pub fn compiled(&self) -> u64 {
        self.compiled
    }

    /// Where the machine code of a text is kept, or would be.
    pub fn path(&self, unit: &CompileUnit, capability: (u32, u32), options: &[&str]) -> PathBuf {
        let key = key(unit, &self.version, &all_options(capability, options));
        let (major, minor) = capability;
        self.folder.join(format!("{}-sm_{major}{minor}-{}.cubin", unit.name, hex::encode(key)))
    }

    /// The machine code of a text for a compute capability, (9, 0) for sm_90. Options come after
    /// those that all kernels are compiled with.
    ///
    /// # Errors
    /// A [`CompileError`], with the compiler's log where it is the compiler that refuses.
    pub fn cubin<'u>(
        &mut self,
        unit: impl Into<CompileUnit<'u>>,
        capability: (u32, u32),
        options: &[&str],
    ) -> Result<Cubin, CompileError> {
        let unit = unit.into();
        if capability < CAPABILITY_MIN {
            return Err(CompileError::Capability(capability.0, capability.1));
        }
        let path = self.path(&unit, capability, options);
        let options = all_options(capability, options);
        let key = key(&unit, &self.version, &options);
        let entry = fs::read(&path);
        if let Some(bytes) = entry.as_deref().ok().and_then(|entry| unwrapped(entry, &key)) {
            return Ok(Cubin { bytes: bytes.to_vec(), came: CubinOrigin::Kept, unkept: None });
        }
        let came = if entry.is_ok() { CubinOrigin::Repaired } else { CubinOrigin::Compiled };
        self.compiled += 1;
        let bytes = compile(&unit, &self.version, &options)?;
        let unkept = keep(&path, &key, &bytes).err();
        Ok(Cubin { bytes, came, unkept })
    }
}

fn all_options((major, minor): (u32, u32), options: &[&str]) -> Vec<String> {
    let architecture = format!("--gpu-architecture=sm_{major}{minor}");
    let given = NVRTC_OPTIONS.iter().chain(options).map(|option| option.to_string());
    [architecture].into_iter().chain(given).collect()
}

/// The hash of all that machine code depends on. Every text comes after its length, so that no two
/// lists of texts are one.
fn key(unit: &CompileUnit, version: &str, options: &[String]) -> [u8; 32] {
    let headers = unit.headers.iter().flat_map(|header| [header.name, header.text]);
    let lists: [Vec<&str>; 3] = [
        vec![unit.name, unit.text, version],
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

/// The machine code of an entry, if it is whole and of this key.
fn unwrapped<'e>(entry: &'e [u8], key: &[u8; 32]) -> Option<&'e [u8]> {
    let (sum, cubin) = entry.strip_prefix(MAGIC)?.split_at_checked(32)?;
    (sum == checksum(key, cubin)).then_some(cubin)
}

fn keep(path: &Path, key: &[u8; 32], cubin: &[u8]) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut file = AtomicFile::create(path)?;
    for part in [MAGIC, &checksum(key, cubin), cubin] {
        file.write(part)?;
    }
    file.finish(&[])
}

/// A program of NVRTC's, which is freed.
struct NvrtcProgram<'a> {
    raw: sys::nvrtcProgram,
    name: &'a str,
}

impl Drop for NvrtcProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: NVRTC made it, and it is not used afterwards.
        let _ = unsafe { sys::nvrtcDestroyProgram(&raw mut self.raw) };
    }
}

impl NvrtcProgram<'_> {
    fn did(&self, call: &'static str, result: sys::nvrtcResult) -> Result<(), CompileError> {
        failed_unless_done(self.name, call, result)
    }

    /// What NVRTC wrote while it compiled; empty where it does not say.
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program is one of NVRTC's, and the log has as many bytes as it says.
        unsafe {
            if sys::nvrtcGetProgramLogSize(self.raw, &raw mut size) != DONE {
                return String::new();
            }
            let mut log = vec![0u8; size.max(1)];
            if sys::nvrtcGetProgramLog(self.raw, log.as_mut_ptr().cast()) != DONE {
                return String::new();
            }
            let log = CStr::from_bytes_until_nul(&log).unwrap_or_default();
            log.to_string_lossy().trim_end().to_owned()
        }
    }

    fn cubin(&self) -> Result<Vec<u8>, CompileError> {
        let mut size = 0;
        // SAFETY: the program was compiled, and the machine code has as many bytes as NVRTC says.
        unsafe {
            let asked = sys::nvrtcGetCUBINSize(self.raw, &raw mut size);
            self.did("nvrtcGetCUBINSize", asked)?;
            let mut cubin = vec![0u8; size];
            let got = sys::nvrtcGetCUBIN(self.raw, cubin.as_mut_ptr().cast::<c_char>());
            self.did("nvrtcGetCUBIN", got)?;
            Ok(cubin)
        }
    }
}

const DONE: sys::nvrtcResult = sys::nvrtcResult::NVRTC_SUCCESS;

fn failed_unless_done(
    name: &str,
    call: &'static str,
    result: sys::nvrtcResult,
) -> Result<(), CompileError> {
    if result == DONE {
        return Ok(());
    }
    Err(CompileError::Failed { call, name: name.into(), said: said(result) })
}

fn said(result: sys::nvrtcResult) -> String {
    // SAFETY: the text that is given for a result is the library's, and stays.
    let text = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(result)) };
    text.to_string_lossy().into_owned()
}

fn compile(unit: &CompileUnit, version: &str, options: &[String]) -> Result<Vec<u8>, CompileError> {
    let text = |what: &str, text: &str| {
        CString::new(text).map_err(|_| CompileError::ZeroByte(format!("{what} of `{}`", unit.name)))
    };
    let all = |what: &str, texts: &mut dyn Iterator<Item = &str>| {
        texts.map(|of| text(what, of)).collect::<Result<Vec<CString>, CompileError>>()
    };
    let names = all("a header's name", &mut unit.headers.iter().map(|header| header.name))?;
    let texts = all("a header", &mut unit.headers.iter().map(|header| header.text))?;
    let given = all("an option", &mut options.iter().map(String::as_str))?;
    let (source, file) = (text("the text", unit.text)?, format!("{}.cu", unit.name));
    let file = text("the name", &file)?;
    let pointers = |of: &[CString]| of.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
    let (name_pointers, text_pointers) = (pointers(&names), pointers(&texts));
    let option_pointers = pointers(&given);

    let mut raw = ptr::null_mut();
    // SAFETY: NVRTC loads, since there is a version of it; every pointer is to texts that live until the
    // end of this function, and there are as many as is said.
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
    failed_unless_done(unit.name, "nvrtcCreateProgram", created)?;
    let program = NvrtcProgram { raw, name: unit.name };
    // SAFETY: as above, and the program is one of NVRTC's.
    let result = unsafe {
        sys::nvrtcCompileProgram(program.raw, given.len() as c_int, option_pointers.as_ptr())
    };
    let refused = |said: String| CompileError::Refused {
        name: unit.name.into(),
        options: options.to_vec(),
        version: version.into(),
        said,
        log: program.log(),
    };
    if result != DONE {
        return Err(refused(said(result)));
    }
    let cubin = program.cubin()?;
    if cubin.is_empty() {
        return Err(refused("it makes no machine code".into()));
    }
    Ok(cubin)
}
