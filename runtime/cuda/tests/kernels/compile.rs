//! The cubin cache: cubins are compiled once, and damaged entries are detected.
//!
//! Needs libnvrtc, which is found as in [`super::nvrtc`] and loaded in a child process whose loader path contains a folder
//! of links to it, as the command line does.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use narrows_cuda::{
    CompileError, CompileUnit, CubinCache, CubinOrigin, CudaLibrary, KernelFamily, KernelHeader,
    find_libraries, library_loads, link_libraries,
};

const CHILD: &str = "NARROWS_COMPILE_CHILD";
const PASSED: &str = "the test body has passed";
const A100: (u32, u32) = (8, 0);
const H100: (u32, u32) = (9, 0);

#[test]
fn cubins_are_cached() {
    if let Some(folder) = env::var_os(CHILD) {
        check_cache(Path::new(&folder));
        println!("{PASSED}");
        return;
    }
    let Some(library) = super::nvrtc::find("NARROWS_NVRTC", "libnvrtc.so") else {
        println!(
            "skipped: no libnvrtc; `pip install nvidia-cuda-nvrtc-cu12` into a virtual environment \
             and set NARROWS_NVRTC to its folder"
        );
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let links = folder.path().join("links");
    let nvrtc_folder: PathBuf = library.parent().expect("a folder").into();
    link_libraries(&find_libraries(&[nvrtc_folder]), &links).unwrap();
    let test = concat!(module_path!(), "::cubins_are_cached");
    let test = test.split_once("::").map_or(test, |(_, path)| path);
    let output = Command::new(env::current_exe().expect("this program"))
        .args([test, "--exact", "--nocapture"])
        .env(CHILD, folder.path().join("cubins"))
        .env("LD_LIBRARY_PATH", &links)
        .output()
        .expect("this program runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains(PASSED), "{text}{errors}");
    println!("{text}");
}

#[test]
fn a_missing_compiler_is_reported() {
    let opened = CubinCache::open("nowhere");
    if library_loads(CudaLibrary::Nvrtc) {
        let opened = opened.expect("a compiler");
        println!("skipped: NVRTC {} loads here", opened.nvrtc_version());
        return;
    }
    let error = opened.unwrap_err();
    assert!(error.to_string().contains("NVRTC does not load"), "{error}");
    assert!(error.hint().unwrap().contains("`pip install"), "{error}");
}

fn check_cache(folder: &Path) {
    let mut cubins = CubinCache::open(folder).unwrap();
    println!("NVRTC {}", cubins.nvrtc_version());
    let first = cubins.load_or_compile(KernelFamily::Gated, A100, &[]).unwrap();
    assert_eq!((first.origin, cubins.compiled()), (CubinOrigin::Compiled, 1));
    assert!(first.cache_error.is_none(), "{:?}", first.cache_error);
    assert!(first.bytes.starts_with(b"\x7fELF"));
    for kernel in ["gated_product_bf16_v8", "gated_product_backward_bf16_v8"] {
        let name = kernel.as_bytes();
        let has = first.bytes.windows(name.len()).any(|window| window == name);
        assert!(has, "the machine code has no {kernel}");
    }

    // Again, from the same cache and from another one on the folder.
    let again = cubins.load_or_compile(KernelFamily::Gated, A100, &[]).unwrap();
    assert_eq!((again.origin, cubins.compiled()), (CubinOrigin::Cached, 1));
    let mut later = CubinCache::open(folder).unwrap();
    let other = later.load_or_compile(KernelFamily::Gated, A100, &[]).unwrap();
    assert_eq!((other.origin, later.compiled()), (CubinOrigin::Cached, 0));
    assert!(again.bytes == first.bytes && other.bytes == first.bytes);

    check_damaged_entries(&mut cubins, &first.bytes);
    check_other_inputs(&mut cubins, folder, &first.bytes);
    check_errors(&mut cubins);
    check_unwritable_folder(folder);
}

/// A damaged entry is compiled again and replaced.
fn check_damaged_entries(cubins: &mut CubinCache, whole: &[u8]) {
    let path = cubins.entry_path(&KernelFamily::Gated.into(), A100, &[]);
    let entry = fs::read(&path).unwrap();
    let longer = [&entry[..], &[0]].concat();
    let flipped = |at: usize| {
        let mut bytes = entry.clone();
        bytes[at] ^= 1;
        bytes
    };
    let another = cubins.entry_path(&KernelFamily::Rotary.into(), A100, &[]);
    cubins.load_or_compile(KernelFamily::Rotary, A100, &[]).unwrap();
    let cases = [
        ("empty", vec![]),
        ("truncated in its header", entry[..20].to_vec()),
        ("truncated in the cubin", entry[..entry.len() - 1].to_vec()),
        ("with an appended byte", longer),
        ("with another format", flipped(3)),
        ("with another hash", flipped(17)),
        ("with another cubin", flipped(entry.len() / 2)),
        ("of another family", fs::read(another).unwrap()),
    ];
    for (name, bytes) in cases {
        fs::write(&path, bytes).unwrap();
        let before = cubins.compiled();
        let replaced = cubins.load_or_compile(KernelFamily::Gated, A100, &[]).unwrap();
        assert_eq!(
            (replaced.origin, cubins.compiled()),
            (CubinOrigin::Replaced, before + 1),
            "{name}"
        );
        assert!(replaced.bytes == whole && fs::read(&path).unwrap() == entry, "{name}");
        assert_eq!(
            cubins.load_or_compile(KernelFamily::Gated, A100, &[]).unwrap().origin,
            CubinOrigin::Cached,
            "{name}"
        );
    }
}

/// Every input of the compilation is part of the key.
fn check_other_inputs(cubins: &mut CubinCache, folder: &Path, whole: &[u8]) {
    let gated = CompileUnit::from(KernelFamily::Gated);
    let text = format!("{}\n// Another comment.\n", gated.source);
    let mut headers = gated.headers.to_vec();
    headers.push(KernelHeader { name: "more.cuh", text: "" });
    type Other<'a> = (&'a str, CompileUnit<'a>, (u32, u32), &'a [&'a str]);
    let cases: [Other; 5] = [
        ("a GPU", gated, H100, &[]),
        ("an option", gated, A100, &["--maxrregcount=32"]),
        ("options", gated, A100, &["--maxrregcount=32", "--fmad=false"]),
        ("a source", CompileUnit { source: &text, ..gated }, A100, &[]),
        ("a header", CompileUnit { headers: &headers, ..gated }, A100, &[]),
    ];
    let entries = || fs::read_dir(folder).unwrap().count();
    for (name, unit, capability, options) in cases {
        let before = (entries(), cubins.compiled());
        let cubin = cubins.load_or_compile(unit, capability, options).unwrap();
        assert_eq!(cubin.origin, CubinOrigin::Compiled, "another {name}");
        assert_eq!((entries(), cubins.compiled()), (before.0 + 1, before.1 + 1), "another {name}");
        if capability != A100 {
            assert!(cubin.bytes != whole);
        }
    }
    assert_eq!(
        cubins.load_or_compile(KernelFamily::Gated, A100, &[]).unwrap().origin,
        CubinOrigin::Cached
    );
}

/// Errors contain the compiler's log, and leave no cache entry.
fn check_errors(cubins: &mut CubinCache) {
    let broken =
        CompileUnit { name: "broken", source: "int f() { return nothing; }", headers: &[] };
    let error = cubins.load_or_compile(broken, A100, &[]).unwrap_err();
    let CompileError::Rejected { log, .. } = &error else { panic!("{error:?}") };
    assert!(log.contains("broken.cu(1)") && log.contains("\"nothing\" is undefined"), "{log}");
    assert!(error.to_string().contains(log.as_str()));
    assert!(!cubins.entry_path(&broken, A100, &[]).exists());

    let message =
        cubins.load_or_compile(KernelFamily::Gated, (99, 0), &[]).unwrap_err().to_string();
    assert!(message.contains("sm_990") && message.contains("--gpu-architecture"), "{message}");
    let message = cubins.load_or_compile(KernelFamily::Gated, (7, 5), &[]).unwrap_err().to_string();
    assert!(
        message.contains("compute capability 8.0 or newer") && message.contains("7.5"),
        "{message}"
    );
    let zero = CompileUnit { source: "\0", ..broken };
    let message = cubins.load_or_compile(zero, A100, &[]).unwrap_err().to_string();
    assert!(message.contains("`broken` contains a zero byte"), "{message}");
}

/// A cache that cannot be written still compiles.
fn check_unwritable_folder(folder: &Path) {
    let taken = folder.join("taken");
    fs::write(&taken, "a file").unwrap();
    let cubin = CubinCache::open(taken.join("within"))
        .unwrap()
        .load_or_compile(KernelFamily::Gated, A100, &[])
        .unwrap();
    assert!(cubin.cache_error.is_some() && !cubin.bytes.is_empty());
}
