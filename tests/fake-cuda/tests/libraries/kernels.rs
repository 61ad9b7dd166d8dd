//! Modules, functions and launches: invalid ones are rejected as by a GPU.

use cudarc::driver::sys::CUfunction_attribute_enum::*;
use cudarc::driver::sys::CUresult::*;
use cudarc::nvrtc::Ptx;
use narrows_cuda::{CompileUnit, CubinCache, KernelFamily};

use crate::device::{self, CAPABILITY, DeviceArray, error};
use narrows_fake_cuda::child;

const SHARED: u32 = 48 << 10;
const SHARED_MAX: u32 = 227 << 10;

#[test]
fn only_known_sources_compile() {
    child::under_one_seed("kernels::only_known_sources_compile", &[], || {
        let folder = tempfile::tempdir().unwrap();
        let mut cubins = CubinCache::open(folder.path()).unwrap();
        for family in KernelFamily::ALL {
            cubins.load_or_compile(family, CAPABILITY, &[]).unwrap();
        }
        let norm = CompileUnit::from(KernelFamily::Norm);
        let source = format!("{} ", norm.source);
        let other = cubins
            .load_or_compile(CompileUnit { source: &source, ..norm }, CAPABILITY, &[])
            .unwrap_err();
        assert!(
            other.to_string().contains("differs from what the fake NVRTC was built from"),
            "{other}"
        );
        let headers = &norm.headers[1..];
        let fewer =
            cubins.load_or_compile(CompileUnit { headers, ..norm }, CAPABILITY, &[]).unwrap_err();
        assert!(fewer.to_string().contains("or a header"), "{fewer}");

        let context = device::context(0);
        let load = |bytes| context.load_module(Ptx::from_binary(bytes));
        let a100 = cubins.load_or_compile(KernelFamily::Norm, (8, 0), &[]).unwrap().bytes;
        assert_eq!(error(load(a100)), CUDA_ERROR_NO_BINARY_FOR_GPU);
        assert_eq!(error(load(b"\x7fELF of something else\0".to_vec())), CUDA_ERROR_INVALID_IMAGE);
        let module =
            load(cubins.load_or_compile(KernelFamily::Norm, CAPABILITY, &[]).unwrap().bytes)
                .unwrap();
        assert_eq!(error(module.load_function("add_into_f32_v1")), CUDA_ERROR_NOT_FOUND);
        module.load_function("norm_bf16_v8").unwrap();
    });
}

#[test]
fn invalid_launches_are_rejected() {
    child::under_one_seed("kernels::invalid_launches_are_rejected", &[], || {
        let context = device::context(0);
        let stream = context.new_stream().unwrap();
        let function = device::kernel(&context, KernelFamily::Elementwise, "add_into_f32_v1");
        let (x, sum) = (DeviceArray::of(&[1.0; 64]), DeviceArray::of(&[1.0; 64]));
        let launch = |grid, block, shared| {
            let mut arguments = [x.address, sum.address, 64];
            error(device::launch(&function, (grid, block, shared), &mut arguments, &stream))
        };
        let one = [1, 1, 1];
        let refused: [([u32; 3], [u32; 3], u32); 7] = [
            ([0, 1, 1], one, 0),
            ([1, 65536, 1], one, 0),
            (one, [0, 1, 1], 0),
            (one, [1, 1, 65], 0),
            // The kernel is compiled for 256 threads.
            (one, [512, 1, 1], 0),
            (one, [32, 1, 1], SHARED + 1),
            (one, [32, 1, 1], SHARED_MAX),
        ];
        for (grid, block, shared) in refused {
            assert_eq!(
                launch(grid, block, shared),
                CUDA_ERROR_INVALID_VALUE,
                "{grid:?} {block:?} {shared}"
            );
        }
        let allow = |bytes: u32| {
            error(
                function
                    .set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes as i32),
            )
        };
        assert_eq!(allow(SHARED_MAX + 1), CUDA_ERROR_INVALID_VALUE);
        assert_eq!(allow(SHARED_MAX), CUDA_SUCCESS);
        assert_eq!(launch(one, [32, 1, 1], SHARED_MAX), CUDA_SUCCESS);
        assert_eq!(launch([2, 1, 1], [128, 1, 1], SHARED), CUDA_SUCCESS);
        assert_eq!(sum.read(), [3.0; 64]);
    });
}

/// A kernel's failure is reported by the next synchronisation and by all later calls.
#[test]
fn a_failed_launch_is_a_sticky_error() {
    let output = child::under_one_seed("kernels::a_failed_launch_is_a_sticky_error", &[], || {
        let context = device::context(0);
        let stream = context.new_stream().unwrap();
        let function = device::kernel(&context, KernelFamily::Elementwise, "add_into_f32_v1");
        let sum = DeviceArray::of(&[1.0; 64]);
        let shape = ([1, 1, 1], [32, 1, 1], 0);
        device::launch(&function, shape, &mut [64, sum.address, 64], &stream).unwrap();
        assert_eq!(error(stream.synchronize()), CUDA_ERROR_ILLEGAL_ADDRESS);
        let again = device::launch(&function, shape, &mut [sum.address, sum.address, 64], &stream);
        assert_eq!(error(again), CUDA_ERROR_ILLEGAL_ADDRESS);
    });
    if let Some(output) = output {
        assert!(
            output.contains("argument 0 of add_into_f32_v1 accesses 1 bytes at an address in no"),
            "{output}"
        );
    }
}
