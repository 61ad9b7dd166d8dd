//! Machine code is compiled once, kept, and known to be damaged when it is.
//!
//! Needs libnvrtc, as [`super::nvrtc`] does and from where that finds it. It is loaded in a child process, which is
//! told of a folder of links to it, as the command line tells itself.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use narrows_cuda::KernelFamily;
use narrows_cuda::compile::{CompileError, CompileUnit, CubinCache, CubinOrigin};
use narrows_cuda::libraries::{self, CudaLibrary};
use narrows_cuda::machine;

const CHILD: &str = "NARROWS_COMPILE_CHILD";
const CHECKED: &str = "all of it is checked";
const A100: (u32, u32) = (8, 0);
const H100: (u32, u32) = (9, 0);

#[test]
fn machine_code_is_kept() {
    if let Some(folder) = env::var_os(CHILD) {
        kept(Path::new(&folder));
        println!("{CHECKED}");
        return;
    }
    let Some(library) = super::nvrtc::find() else {
        println!(
            "skipped: no libnvrtc; `pip install nvidia-cuda-nvrtc-cu12` into a virtual environment \
             and set NARROWS_NVRTC to its folder"
        );
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let links = folder.path().join("links");
    let place: PathBuf = library.parent().expect("a folder").into();
    libraries::link(&libraries::find(&[place]), &links).unwrap();
    let test = concat!(module_path!(), "::machine_code_is_kept");
    let test = test.split_once("::").map_or(test, |(_, path)| path);
    let output = Command::new(env::current_exe().expect("this program"))
        .args([test, "--exact", "--nocapture"])
        .env(CHILD, folder.path().join("cubins"))
        .env("LD_LIBRARY_PATH", &links)
        .output()
        .expect("this program runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains(CHECKED), "{said}{errors}");
    println!("{said}");
}

/// Without a compiler there is a sentence.
#[test]
fn a_missing_compiler_is_said() {
    let opened = CubinCache::open("nowhere");
    if machine::loads(CudaLibrary::Nvrtc) {
        let opened = opened.expect("a compiler");
        println!("skipped: NVRTC {} loads here", opened.version());
        return;
    }
    let said = opened.unwrap_err().to_string();
    assert!(said.contains("NVRTC does not load; `pip install"), "{said}");
}

fn kept(folder: &Path) {
    let mut cubins = CubinCache::open(folder).unwrap();
    println!("NVRTC {}", cubins.version());
    let first = cubins.cubin(KernelFamily::Gated, A100, &[]).unwrap();
    assert_eq!((first.came, cubins.compiled()), (CubinOrigin::Compiled, 1));
    assert!(first.unkept.is_none(), "{:?}", first.unkept);
    assert!(first.bytes.starts_with(b"\x7fELF"));
    for kernel in ["gated_product_bf16_v8", "gated_product_backward_bf16_v8"] {
        let name = kernel.as_bytes();
        let has = first.bytes.windows(name.len()).any(|window| window == name);
        assert!(has, "the machine code has no {kernel}");
    }

    // The same again, and by another process.
    let again = cubins.cubin(KernelFamily::Gated, A100, &[]).unwrap();
    assert_eq!((again.came, cubins.compiled()), (CubinOrigin::Kept, 1));
    let mut later = CubinCache::open(folder).unwrap();
    let other = later.cubin(KernelFamily::Gated, A100, &[]).unwrap();
    assert_eq!((other.came, later.compiled()), (CubinOrigin::Kept, 0));
    assert!(again.bytes == first.bytes && other.bytes == first.bytes);

    damaged(&mut cubins, &first.bytes);
    others(&mut cubins, folder, &first.bytes);
    refused(&mut cubins);
    unwritable(folder);
}

/// Whatever is wrong with an entry, it is compiled again and then whole.
fn damaged(cubins: &mut CubinCache, whole: &[u8]) {
    let path = cubins.path(&KernelFamily::Gated.into(), A100, &[]);
    let entry = fs::read(&path).unwrap();
    let longer = [&entry[..], &[0]].concat();
    let flipped = |at: usize| {
        let mut bytes = entry.clone();
        bytes[at] ^= 1;
        bytes
    };
    let another = cubins.path(&KernelFamily::Rotary.into(), A100, &[]);
    cubins.cubin(KernelFamily::Rotary, A100, &[]).unwrap();
    let cases = [
        ("empty", vec![]),
        ("cut within its head", entry[..20].to_vec()),
        ("cut within the code", entry[..entry.len() - 1].to_vec()),
        ("longer", longer),
        ("of another form", flipped(3)),
        ("with another hash", flipped(17)),
        ("with other code", flipped(entry.len() / 2)),
        ("of another family", fs::read(another).unwrap()),
    ];
    for (name, bytes) in cases {
        fs::write(&path, bytes).unwrap();
        let before = cubins.compiled();
        let repaired = cubins.cubin(KernelFamily::Gated, A100, &[]).unwrap();
        assert_eq!(
            (repaired.came, cubins.compiled()),
            (CubinOrigin::Repaired, before + 1),
            "{name}"
        );
        assert!(repaired.bytes == whole && fs::read(&path).unwrap() == entry, "{name}");
        assert_eq!(
            cubins.cubin(KernelFamily::Gated, A100, &[]).unwrap().came,
            CubinOrigin::Kept,
            "{name}"
        );
    }
}

/// What machine code depends on has an entry of its own.
fn others(cubins: &mut CubinCache, folder: &Path, whole: &[u8]) {
    let gated = CompileUnit::from(KernelFamily::Gated);
    let text = format!("{}\n// Another text.\n", gated.text);
    let mut headers = gated.headers.to_vec();
    headers.push(narrows_cuda::source::KernelHeader { name: "more.cuh", text: "" });
    type Other<'a> = (&'a str, CompileUnit<'a>, (u32, u32), &'a [&'a str]);
    let cases: [Other; 5] = [
        ("a GPU", gated, H100, &[]),
        ("an option", gated, A100, &["--maxrregcount=32"]),
        ("options", gated, A100, &["--maxrregcount=32", "--fmad=false"]),
        ("a text", CompileUnit { text: &text, ..gated }, A100, &[]),
        ("a header", CompileUnit { headers: &headers, ..gated }, A100, &[]),
    ];
    let entries = || fs::read_dir(folder).unwrap().count();
    for (name, unit, capability, options) in cases {
        let before = (entries(), cubins.compiled());
        let made = cubins.cubin(unit, capability, options).unwrap();
        assert_eq!(made.came, CubinOrigin::Compiled, "another {name}");
        assert_eq!((entries(), cubins.compiled()), (before.0 + 1, before.1 + 1), "another {name}");
        if capability != A100 {
            assert!(made.bytes != whole);
        }
    }
    assert_eq!(cubins.cubin(KernelFamily::Gated, A100, &[]).unwrap().came, CubinOrigin::Kept);
}

/// What does not compile is said with the compiler's log, and nothing is kept.
fn refused(cubins: &mut CubinCache) {
    let broken = CompileUnit { name: "broken", text: "int f() { return nothing; }", headers: &[] };
    let error = cubins.cubin(broken, A100, &[]).unwrap_err();
    let CompileError::Refused { log, .. } = &error else { panic!("{error:?}") };
    assert!(log.contains("broken.cu(1)") && log.contains("\"nothing\" is undefined"), "{log}");
    assert!(error.to_string().contains(log.as_str()));
    assert!(!cubins.path(&broken, A100, &[]).exists());

    let said = cubins.cubin(KernelFamily::Gated, (99, 0), &[]).unwrap_err().to_string();
    assert!(said.contains("sm_990") && said.contains("--gpu-architecture"), "{said}");
    let said = cubins.cubin(KernelFamily::Gated, (7, 5), &[]).unwrap_err().to_string();
    assert!(said.contains("capability 7.5: they need 8.0"), "{said}");
    let zero = CompileUnit { text: "\0", ..broken };
    let said = cubins.cubin(zero, A100, &[]).unwrap_err().to_string();
    assert!(said.contains("`broken` has a zero byte"), "{said}");
}

/// Where nothing can be kept there is machine code all the same.
fn unwritable(folder: &Path) {
    let taken = folder.join("taken");
    fs::write(&taken, "a file").unwrap();
    let made = CubinCache::open(taken.join("within"))
        .unwrap()
        .cubin(KernelFamily::Gated, A100, &[])
        .unwrap();
    assert!(made.unkept.is_some() && !made.bytes.is_empty());
}
