//! Device memory: its size, its initial contents, and bounds of accesses.

use cudarc::driver::result;
use cudarc::driver::sys::CUresult::*;
use narrows_cuda::{CudaLibrary, KernelFamily, gpus, library_loads, library_version};

use crate::device::{self, DeviceArray, error};
use narrows_fake_cuda::child;

const MIB: usize = 1 << 20;

#[test]
fn devices_are_configured_by_variables() {
    let variables = [
        ("NARROWS_FAKE_CUDA_DEVICES", "3"),
        ("NARROWS_FAKE_CUDA_MEMORY", "1048576"),
        ("NARROWS_FAKE_CUDA_CAPABILITY", "8.6"),
    ];
    child::under_one_seed("memory::devices_are_configured_by_variables", &variables, || {
        for library in CudaLibrary::ALL {
            assert!(library_loads(library), "{library:?}");
        }
        assert_eq!(library_version(CudaLibrary::Driver).as_deref(), Some("12.9"));
        assert_eq!(library_version(CudaLibrary::Nvrtc).as_deref(), Some("12.9"));
        let gpus = gpus().unwrap();
        assert_eq!(gpus.len(), 3);
        assert!(gpus.iter().all(|gpu| gpu.capability == (8, 6) && gpu.memory.0 == MIB as u64));
        assert!(gpus.iter().all(|gpu| gpu.name.contains("fake")));
    });
}

#[test]
fn memory_is_limited_and_initially_nan() {
    let variables = [("NARROWS_FAKE_CUDA_MEMORY", "67108864")];
    child::under_one_seed("memory::memory_is_limited_and_initially_nan", &variables, || {
        let context = device::context(0);
        assert!(!context.has_async_alloc());
        assert_eq!(context.mem_get_info().unwrap(), (64 * MIB, 64 * MIB));
        let array = DeviceArray::new(1000);
        assert!(array.read().iter().all(|element| element.is_nan()));
        let large = DeviceArray::new(12 * MIB);
        assert_eq!(context.mem_get_info().unwrap().0, 16 * MIB - 4096);
        // SAFETY: the memory is not used.
        let more = || error(unsafe { result::malloc_sync(32 * MIB) });
        assert_eq!(more(), CUDA_ERROR_OUT_OF_MEMORY);
        // SAFETY: the array is not used afterwards; the second call is expected to fail.
        unsafe { result::free_sync(large.address) }.unwrap();
        assert_eq!(more(), CUDA_SUCCESS);
        assert_eq!(error(unsafe { result::free_sync(large.address) }), CUDA_ERROR_INVALID_VALUE);
    });
}

#[test]
fn copies_outside_allocations_fail() {
    let output = child::under_one_seed("memory::copies_outside_allocations_fail", &[], || {
        let context = device::context(0);
        let stream = context.new_stream().unwrap();
        let array = DeviceArray::of(&[1.0, 2.0]);
        let beyond = DeviceArray { count: 3, ..array };
        // SAFETY: the call is rejected.
        let copied = unsafe {
            result::memcpy_dtod_async(array.address, beyond.address, 12, stream.cu_stream())
        };
        assert_eq!(error(copied), CUDA_ERROR_INVALID_VALUE);
        // Memory that is freed before the copy runs is a sticky error.
        let other = DeviceArray::new(2);
        array.copy_to(other, &stream);
        // SAFETY: the fake driver detects the later use.
        unsafe { result::free_sync(array.address) }.unwrap();
        assert_eq!(error(stream.synchronize()), CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(error(context.synchronize()), CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(error(stream.synchronize()), CUDA_ERROR_ILLEGAL_ADDRESS);
    });
    if let Some(output) = output {
        assert!(output.contains("byte 0 of 8 bytes that were freed"), "{output}");
    }
}

/// Pinned memory is read when the copy runs, pageable memory during the call.
#[test]
fn pinned_memory_is_read_when_the_copy_runs() {
    child::under_one_seed("memory::pinned_memory_is_read_when_the_copy_runs", &[], || {
        let context = device::context(0);
        let stream = context.new_stream().unwrap();
        let array = DeviceArray::new(1);
        let mut ordinary = vec![1.0f32];
        array.upload(&ordinary, &stream);
        ordinary[0] = 2.0;
        assert_eq!(array.read(), [1.0]);
        // SAFETY: the memory has this size, and is written before it is read.
        let pinned = unsafe {
            std::slice::from_raw_parts_mut(result::malloc_host(4, 0).unwrap().cast::<f32>(), 1)
        };
        pinned[0] = 3.0;
        array.upload(pinned, &stream);
        pinned[0] = 4.0;
        assert_eq!(array.read(), [4.0]);
    });
}

/// A kernel with too large a count accesses memory out of bounds, which ends the process.
#[test]
fn kernels_outside_allocations_end_the_process() {
    let Some(libraries) = child::libraries() else { return };
    let test = "memory::kernels_outside_allocations_end_the_process";
    if child::role().is_none() {
        let output = child::output_of_crash(&libraries, test);
        assert!(
            output.contains("add_into_f32_v1 accesses byte") && output.contains("of 4096 bytes"),
            "{output}"
        );
        return;
    }
    let context = device::context(0);
    let stream = context.new_stream().unwrap();
    let function = device::kernel(&context, KernelFamily::Elementwise, "add_into_f32_v1");
    let (x, sum) = (DeviceArray::of(&vec![1.0; 1024]), DeviceArray::of(&vec![1.0; 1024]));
    device::add_into(&function, x, sum, &stream);
    assert_eq!(sum.read(), vec![2.0; 1024]);
    device::add_into(&function, x, DeviceArray { count: 1025, ..sum }, &stream);
    let _ = stream.synchronize();
    println!("the process continues");
}
