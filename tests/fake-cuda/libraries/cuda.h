// The supported part of the driver API: results, attributes and structures with the values of NVIDIA's headers.
#pragma once
#include "operation.h"

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = u64;
using CUcontext = struct CUctx_st*;
using CUevent = struct CUevent_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUgraph = struct CUgraph_st*;
using CUgraphExec = struct CUgraphExec_st*;

// Results with their descriptions.
#define RESULTS(each)                                                                          \
    each(CUDA_SUCCESS, 0, "no error")                                                          \
    each(CUDA_ERROR_INVALID_VALUE, 1, "invalid argument")                                      \
    each(CUDA_ERROR_OUT_OF_MEMORY, 2, "out of memory")                                         \
    each(CUDA_ERROR_NOT_INITIALIZED, 3, "initialization error")                                \
    each(CUDA_ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected")                      \
    each(CUDA_ERROR_INVALID_DEVICE, 101, "invalid device ordinal")                             \
    each(CUDA_ERROR_INVALID_IMAGE, 200, "device kernel image is invalid")                      \
    each(CUDA_ERROR_INVALID_CONTEXT, 201, "invalid device context")                            \
    each(CUDA_ERROR_NO_BINARY_FOR_GPU, 209, "no kernel image is available for execution on the device") \
    each(CUDA_ERROR_INVALID_HANDLE, 400, "invalid resource handle")                            \
    each(CUDA_ERROR_ILLEGAL_STATE, 401, "the operation cannot be performed in the present state") \
    each(CUDA_ERROR_NOT_FOUND, 500, "named symbol not found")                                  \
    each(CUDA_ERROR_NOT_READY, 600, "device not ready")                                        \
    each(CUDA_ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered")          \
    each(CUDA_ERROR_LAUNCH_FAILED, 719, "unspecified launch failure")                          \
    each(CUDA_ERROR_NOT_SUPPORTED, 801, "operation not supported")                             \
    each(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900, "operation not permitted when stream is capturing") \
    each(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 901, "operation failed due to a previous error during capture") \
    each(CUDA_ERROR_STREAM_CAPTURE_MERGE, 902, "operation would result in a merge of separate capture sequences") \
    each(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, 903, "capture was not ended in the same stream as it began") \
    each(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, 904, "capturing stream has unjoined work")        \
    each(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, 905, "dependency created on uncaptured work in another stream") \
    each(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906, "operation would make the legacy stream depend on a capturing blocking stream") \
    each(CUDA_ERROR_CAPTURED_EVENT, 907, "operation not permitted on an event last recorded in a capturing stream") \
    each(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, 908, "attempt to terminate a thread-local capture sequence from another thread")

enum : CUresult {
#define VALUE(name, number, description) name = number,
    RESULTS(VALUE)
#undef VALUE
};

enum { CU_STREAM_NON_BLOCKING = 1 };
enum { CU_EVENT_DISABLE_TIMING = 2 };
// A record or wait during a capture becomes a graph node, for an event outside of the graph.
enum { CU_EVENT_EXTERNAL = 1 };
enum CaptureMode { CAPTURE_GLOBAL = 0, CAPTURE_THREAD_LOCAL = 1, CAPTURE_RELAXED = 2 };
enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_INVALIDATED = 2 };
enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2 };
enum { MAX_DYNAMIC_SHARED_BYTES = 8 };

struct CUDA_MEMCPY2D {
    size_t srcXInBytes, srcY;
    u32 srcMemoryType;
    const void* srcHost;
    CUdeviceptr srcDevice;
    void* srcArray;
    size_t srcPitch;
    size_t dstXInBytes, dstY;
    u32 dstMemoryType;
    void* dstHost;
    CUdeviceptr dstDevice;
    void* dstArray;
    size_t dstPitch;
    size_t WidthInBytes, Height;
};
