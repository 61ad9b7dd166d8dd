//! Memory of the device: how much there is, what is in it, and what may touch it.

use cudarc::driver::result;
use cudarc::driver::sys::CUresult::*;
use narrows_cuda::libraries::CudaLibrary;
use narrows_cuda::{KernelFamily, machine};

use crate::gpu::{self, Numbers, error};
use narrows_fake_cuda::child;

const MIB: usize = 1 << 20;

#[test]
fn a_machine_has_what_it_is_told() {
    let variables = [
        ("NARROWS_FAKE_CUDA_DEVICES", "3"),
        ("NARROWS_FAKE_CUDA_MEMORY", "1048576"),
        ("NARROWS_FAKE_CUDA_CAPABILITY", "8.6"),
    ];
    child::once("memory::a_machine_has_what_it_is_told", &variables, || {
        for library in CudaLibrary::ALL {
            assert!(machine::loads(library), "{library:?}");
        }
        assert_eq!(machine::version(CudaLibrary::Driver).as_deref(), Some("12.9"));
        assert_eq!(machine::version(CudaLibrary::Nvrtc).as_deref(), Some("12.9"));
        let gpus = machine::gpus().unwrap();
        assert_eq!(gpus.len(), 3);
        assert!(gpus.iter().all(|gpu| gpu.capability == (8, 6) && gpu.memory.0 == MIB as u64));
        assert!(gpus.iter().all(|gpu| gpu.name.contains("stand-in")));
    });
}

#[test]
fn memory_is_counted_and_full_of_nans() {
    let variables = [("NARROWS_FAKE_CUDA_MEMORY", "67108864")];
    child::once("memory::memory_is_counted_and_full_of_nans", &variables, || {
        let context = gpu::context(0);
        assert!(!context.has_async_alloc());
        assert_eq!(context.mem_get_info().unwrap(), (64 * MIB, 64 * MIB));
        let numbers = Numbers::new(1000);
        assert!(numbers.read().iter().all(|number| number.is_nan()));
        let large = Numbers::new(12 * MIB);
        assert_eq!(context.mem_get_info().unwrap().0, 16 * MIB - 4096);
        // SAFETY: nothing is written to it.
        let more = || error(unsafe { result::malloc_sync(32 * MIB) });
        assert_eq!(more(), CUDA_ERROR_OUT_OF_MEMORY);
        // SAFETY: nothing uses it any more, except where that is what is tried.
        unsafe { result::free_sync(large.at) }.unwrap();
        assert_eq!(more(), CUDA_SUCCESS);
        assert_eq!(error(unsafe { result::free_sync(large.at) }), CUDA_ERROR_INVALID_VALUE);
    });
}

#[test]
fn copies_stay_within_allocations() {
    let said = child::once("memory::copies_stay_within_allocations", &[], || {
        let context = gpu::context(0);
        let stream = context.new_stream().unwrap();
        let numbers = Numbers::of(&[1.0, 2.0]);
        let beyond = Numbers { count: 3, ..numbers };
        // SAFETY: it is refused.
        let copied =
            unsafe { result::memcpy_dtod_async(numbers.at, beyond.at, 12, stream.cu_stream()) };
        assert_eq!(error(copied), CUDA_ERROR_INVALID_VALUE);
        // Freed before the copy ran: an error that stays.
        let other = Numbers::new(2);
        numbers.copy_to(other, &stream);
        // SAFETY: that it is used all the same is what is tried.
        unsafe { result::free_sync(numbers.at) }.unwrap();
        assert_eq!(error(stream.synchronize()), CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(error(context.synchronize()), CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(error(stream.synchronize()), CUDA_ERROR_ILLEGAL_ADDRESS);
    });
    if let Some(said) = said {
        assert!(said.contains("byte 0 of 8 bytes that were freed"), "{said}");
    }
}

/// Pinned memory is read when the copy runs, other memory of the host at the call.
#[test]
fn pinned_memory_is_read_late() {
    child::once("memory::pinned_memory_is_read_late", &[], || {
        let context = gpu::context(0);
        let stream = context.new_stream().unwrap();
        let numbers = Numbers::new(1);
        let mut ordinary = vec![1.0f32];
        numbers.put(&ordinary, &stream);
        ordinary[0] = 2.0;
        assert_eq!(numbers.read(), [1.0]);
        // SAFETY: a number fits, and is written before it is read.
        let pinned = unsafe {
            std::slice::from_raw_parts_mut(result::malloc_host(4, 0).unwrap().cast::<f32>(), 1)
        };
        pinned[0] = 3.0;
        numbers.put(pinned, &stream);
        pinned[0] = 4.0;
        assert_eq!(numbers.read(), [4.0]);
    });
}

/// A kernel that is given too large a count leaves its memory, and the process ends.
#[test]
fn kernels_stay_within_allocations() {
    let Some(libraries) = child::libraries() else { return };
    let test = "memory::kernels_stay_within_allocations";
    if child::role().is_none() {
        let said = child::dies(&libraries, test);
        assert!(
            said.contains("add_into_f32_v1 touches byte") && said.contains("of 4096 bytes"),
            "{said}"
        );
        return;
    }
    let context = gpu::context(0);
    let stream = context.new_stream().unwrap();
    let function = gpu::kernel(&context, KernelFamily::Elementwise, "add_into_f32_v1");
    let (x, sum) = (Numbers::of(&vec![1.0; 1024]), Numbers::of(&vec![1.0; 1024]));
    gpu::add_into(&function, x, sum, &stream);
    assert_eq!(sum.read(), vec![2.0; 1024]);
    gpu::add_into(&function, x, Numbers { count: 1025, ..sum }, &stream);
    let _ = stream.synchronize();
    println!("it goes on");
}
