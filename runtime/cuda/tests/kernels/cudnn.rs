//! cuDNN has plans for the attention of CoLA's models on an A100 and on an H100.
//!
//! Plans are built without a GPU, for GPUs described in cuDNN's own form. Needs libcudnn and libnvrtc of the Python
//! wheels `nvidia-cudnn-cu12` and `nvidia-cuda-nvrtc-cu12`: `NARROWS_CUDNN` and `NARROWS_NVRTC` name folders above them.
//! A C compiler makes a driver without devices.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use narrows_cuda::{AttentionKey, attention_workspace_without_gpu};

use super::nvrtc::find;

const CHILD: &str = "NARROWS_CUDNN_CHILD";

/// Properties by which GPUs differ: name, compute capability times 100, multiprocessors, shared memory per block in bytes,
/// clock in kHz, and bytes of L2 cache.
type GpuProperties = (&'static str, u32, u32, u32, u32, u32);

const A100: GpuProperties = ("NVIDIA A100-SXM4-80GB", 800, 108, 166_912, 1_410_000, 41_943_040);
const H100: GpuProperties = ("NVIDIA H100 80GB HBM3", 900, 132, 232_448, 1_980_000, 52_428_800);

/// Sequences, their length, query heads, KV heads and head size: CoLA-1B, CoLA-7B and CoLA-60M, and grouped queries.
const SHAPES: [[u64; 5]; 4] =
    [[4, 4096, 32, 32, 64], [1, 4096, 32, 32, 128], [8, 256, 8, 8, 64], [4, 4096, 32, 8, 128]];

/// Maximum workspace, of the last of these shapes: query gradients in f32 twice, gradients of keys and values of every
/// query head in bf16, and one f32 per query.
const WORKSPACE_MAX: u64 = 4 * 32 * 4096 * (128 * (2 * 4 + 2 * 2) + 4) + (1 << 20);

fn properties((name, version, units, shared, clock, cache): GpuProperties) -> String {
    format!(
        r#"{{"deviceVer":{version},"driverVer":12090,"cudaDeviceId":0,"totalGlobalMem":85899345920,
        "maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,
        "multiProcessorCount":{units},"warpSize":32,"maxSharedMemoryPerBlock":49152,
        "maxSharedMemoryPerBlockOptin":{shared},"reservedSharedMemoryPerBlock":1024,
        "maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,
        "pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,"smClockRateKHz":{clock},
        "memClockRateKHz":2000000,"memoryBusWidth":5120,"l2CacheSize":{cache},"deviceName":"{name}"}}"#
    )
}

/// Forward and backward, with queries, keys and values alternately in operands of their own and side by side in the rows
/// of one.
fn keys() -> Vec<AttentionKey> {
    let mut keys = vec![];
    for (index, [sequences, length, heads, kv_heads, head_dim]) in SHAPES.into_iter().enumerate() {
        let joint = (heads + 2 * kv_heads) * head_dim;
        let [q_stride, k_stride, v_stride] = match index % 2 {
            0 => [joint; 3],
            _ => [heads, kv_heads, kv_heads].map(|heads| heads * head_dim),
        };
        keys.extend([false, true].map(|is_backward| AttentionKey {
            is_backward,
            sequences,
            length,
            heads,
            kv_heads,
            head_dim,
            q_stride,
            k_stride,
            v_stride,
            out_stride: heads * head_dim,
        }));
    }
    keys
}

#[test]
fn attention_has_plans_for_the_h100() {
    check_plans(H100, concat!(module_path!(), "::attention_has_plans_for_the_h100"));
}

#[test]
#[ignore = "second level: an older GPU"]
fn attention_has_plans_for_the_a100() {
    check_plans(A100, concat!(module_path!(), "::attention_has_plans_for_the_a100"));
}

/// Runs a test of this name in a child process, with a driver without devices. There, builds the plans for a GPU.
fn check_plans(gpu: GpuProperties, test: &str) {
    if env::var(CHILD).is_ok() {
        for key in keys() {
            let workspace = attention_workspace_without_gpu(&properties(gpu), &key);
            let workspace = workspace.unwrap_or_else(|error| panic!("{gpu:?}, {key:?}: {error}"));
            println!("{}, {key:?}: workspace of {workspace} bytes", gpu.0);
            assert!(workspace <= WORKSPACE_MAX, "{workspace} bytes");
            assert!(key.is_backward || workspace < 1 << 20, "{workspace} bytes");
        }
        return;
    }
    let libraries = [("NARROWS_CUDNN", "libcudnn.so"), ("NARROWS_NVRTC", "libnvrtc.so")].map(
        |(name, prefix)| find(name, prefix).and_then(|file| file.parent().map(Path::to_owned)),
    );
    let [Some(cudnn), Some(nvrtc)] = libraries else {
        println!(
            "skipped: no libcudnn and libnvrtc; `pip install nvidia-cudnn-cu12 nvidia-cuda-nvrtc-cu12` into a \
             virtual environment, and set NARROWS_CUDNN and NARROWS_NVRTC to its folder"
        );
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    if let Err(reason) = driver_without_devices(folder.path()) {
        println!("skipped: {reason}");
        return;
    }
    link(&cudnn.join("libcudnn.so.9"), &folder.path().join("libcudnn.so"));
    let test = test.split_once("::").map_or(test, |(_, path)| path);
    let path = env::join_paths([folder.path(), &cudnn, &nvrtc]).expect("a path");
    let output = Command::new(env::current_exe().expect("this program"))
        .args([test, "--exact", "--nocapture", "--include-ignored"])
        .env(CHILD, "1")
        .env("LD_LIBRARY_PATH", path)
        .output()
        .expect("this program runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("workspace of"), "{text}{errors}");
    println!("{text}");
}

/// Compiles the libraries of a machine without devices.
fn driver_without_devices(folder: &Path) -> Result<(), String> {
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".into());
    let source = folder.join("no_device.c");
    fs::write(&source, include_str!("no_device.c")).expect("a file");
    let library: PathBuf = folder.join("libcuda.so.1");
    let mut command = Command::new(&compiler);
    command.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
    let output = command.output().map_err(|_| format!("`{compiler}` is not a C compiler"))?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    link(&library, &folder.join("libcublasLt.so.12"));
    Ok(())
}

fn link(target: &Path, at: &Path) {
    std::os::unix::fs::symlink(target, at).expect("a link");
}
