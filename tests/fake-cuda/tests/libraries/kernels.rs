//! Modules, functions and launches: what a GPU refuses is refused.

use cudarc::driver::sys::CUfunction_attribute_enum::*;
use cudarc::driver::sys::CUresult::*;
use cudarc::nvrtc::Ptx;
use narrows_cuda::KernelFamily;
use narrows_cuda::compile::{CompileUnit, CubinCache};

use crate::gpu::{self, CAPABILITY, Numbers, error};
use narrows_fake_cuda::child;

const SHARED: u32 = 48 << 10;
const SHARED_MAX: u32 = 227 << 10;

#[test]
fn only_programs_that_were_built_in_compile() {
    child::once("kernels::only_programs_that_were_built_in_compile", &[], || {
        let folder = tempfile::tempdir().unwrap();
        let mut cubins = CubinCache::open(folder.path()).unwrap();
        for family in KernelFamily::ALL {
            cubins.cubin(family, CAPABILITY, &[]).unwrap();
        }
        let norm = CompileUnit::from(KernelFamily::Norm);
        let text = format!("{} ", norm.text);
        let other = cubins.cubin(CompileUnit { text: &text, ..norm }, CAPABILITY, &[]).unwrap_err();
        assert!(other.to_string().contains("not what the stand-in was built from"), "{other}");
        let headers = &norm.headers[1..];
        let fewer = cubins.cubin(CompileUnit { headers, ..norm }, CAPABILITY, &[]).unwrap_err();
        assert!(fewer.to_string().contains("or a header"), "{fewer}");

        let context = gpu::context(0);
        let load = |bytes| context.load_module(Ptx::from_binary(bytes));
        let a100 = cubins.cubin(KernelFamily::Norm, (8, 0), &[]).unwrap().bytes;
        assert_eq!(error(load(a100)), CUDA_ERROR_NO_BINARY_FOR_GPU);
        assert_eq!(error(load(b"\x7fELF of something else\0".to_vec())), CUDA_ERROR_INVALID_IMAGE);
        let module =
            load(cubins.cubin(KernelFamily::Norm, CAPABILITY, &[]).unwrap().bytes).unwrap();
        assert_eq!(error(module.load_function("add_into_f32_v1")), CUDA_ERROR_NOT_FOUND);
        module.load_function("norm_bf16_v8").unwrap();
    });
}

#[test]
fn launches_are_limited() {
    child::once("kernels::launches_are_limited", &[], || {
        let context = gpu::context(0);
        let stream = context.new_stream().unwrap();
        let function = gpu::kernel(&context, KernelFamily::Elementwise, "add_into_f32_v1");
        let (x, sum) = (Numbers::of(&[1.0; 64]), Numbers::of(&[1.0; 64]));
        let launch = |grid, block, shared| {
            let mut arguments = [x.at, sum.at, 64];
            error(gpu::launch(&function, (grid, block, shared), &mut arguments, &stream))
        };
        let one = [1, 1, 1];
        let refused: [([u32; 3], [u32; 3], u32); 7] = [
            ([0, 1, 1], one, 0),
            ([1, 65536, 1], one, 0),
            (one, [0, 1, 1], 0),
            (one, [1, 1, 65], 0),
            // It is compiled for 256.
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

/// What a kernel cannot do is said when it runs, by whatever waits for it.
#[test]
fn a_launch_that_fails_stays_failed() {
    let said = child::once("kernels::a_launch_that_fails_stays_failed", &[], || {
        let context = gpu::context(0);
        let stream = context.new_stream().unwrap();
        let function = gpu::kernel(&context, KernelFamily::Elementwise, "add_into_f32_v1");
        let sum = Numbers::of(&[1.0; 64]);
        let shape = ([1, 1, 1], [32, 1, 1], 0);
        gpu::launch(&function, shape, &mut [64, sum.at, 64], &stream).unwrap();
        assert_eq!(error(stream.synchronize()), CUDA_ERROR_ILLEGAL_ADDRESS);
        let again = gpu::launch(&function, shape, &mut [sum.at, sum.at, 64], &stream);
        assert_eq!(error(again), CUDA_ERROR_ILLEGAL_ADDRESS);
    });
    if let Some(said) = said {
        assert!(
            said.contains("argument 0 of add_into_f32_v1 touches 1 bytes at which is in no"),
            "{said}"
        );
    }
}
