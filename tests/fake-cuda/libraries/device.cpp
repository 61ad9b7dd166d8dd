// Devices, contexts, and names of results.
#include <cstdio>
#include <cstring>
#include "state.h"

namespace fake_cuda {

thread_local CUcontext current = nullptr;
thread_local CaptureMode thread_mode = CAPTURE_GLOBAL;

static u64 memory_bytes() { return setting("NARROWS_FAKE_CUDA_MEMORY", 4ull << 30); }

// Ten times the major plus the minor: "9.0" is 90.
static u32 capability() {
    static const u32 both = [] {
        u32 major = 9, minor = 0;
        const char* text = getenv("NARROWS_FAKE_CUDA_CAPABILITY");
        if (text && *text && sscanf(text, "%u.%u", &major, &minor) != 2) {
            report(std::string("NARROWS_FAKE_CUDA_CAPABILITY is ") + text + ", not of the form 9.0");
        }
        return major * 10 + minor;
    }();
    return both;
}

u32 architecture() { return capability(); }

// Maximum dynamic shared memory of a block, by NVIDIA's table of compute capabilities.
u32 shared_bytes_max() {
    switch (capability()) {
        case 80: case 87: return 163 << 10;
        case 86: case 89: case 120: return 99 << 10;
        default: return 227 << 10;
    }
}

CUresult context_device(Device*& device) {
    state().last_call_ms = u64(now_ms());
    if (!state().initialised) return CUDA_ERROR_NOT_INITIALIZED;
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    device = state().devices[current->device].get();
    return CUDA_SUCCESS;
}

CUresult working_device(Device*& device) {
    if (CUresult result = context_device(device)) return result;
    return device->error;
}

CUresult resolve(Device& device, CUstream& stream) {
    // The handles 1 and 2 are CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
    if (!stream || stream == reinterpret_cast<CUstream>(1)) {
        stream = &device.legacy;
        return CUDA_SUCCESS;
    }
    if (stream == reinterpret_cast<CUstream>(2)) return CUDA_ERROR_NOT_SUPPORTED;
    if (stream == &device.legacy) return CUDA_SUCCESS;
    if (!state().streams.count(stream) || stream->destroyed) {
        report("a call uses a stream that does not exist");
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (stream->device != device.ordinal) {
        report("a call uses a stream of another device than the thread's context");
        return CUDA_ERROR_INVALID_HANDLE;
    }
    return CUDA_SUCCESS;
}

int current_device() {
    Device* device;
    return context_device(device) ? -1 : device->ordinal;
}

int device_of(CUstream stream) {
    Device* device;
    if (context_device(device) || resolve(*device, stream)) return -1;
    return device->ordinal;
}

static CUresult exists(CUdevice device) {
    if (!state().initialised) return CUDA_ERROR_NOT_INITIALIZED;
    const bool there = device >= 0 && size_t(device) < state().devices.size();
    return there ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static int attribute(int which, CUdevice device) {
    switch (which) {
        case 1: return 1024;                    // MAX_THREADS_PER_BLOCK
        case 2: case 3: return 1024;            // MAX_BLOCK_DIM_X, _Y
        case 4: return 64;                      // MAX_BLOCK_DIM_Z
        case 5: return 0x7fffffff;              // MAX_GRID_DIM_X
        case 6: case 7: return 65535;           // MAX_GRID_DIM_Y, _Z
        case 8: return 48 << 10;                // MAX_SHARED_MEMORY_PER_BLOCK
        case 10: return 32;                     // WARP_SIZE
        case 12: case 82: return 65536;         // registers of a block, of a multiprocessor
        case 13: return 1'500'000;              // CLOCK_RATE, kHz
        case 16: return 132;                    // MULTIPROCESSOR_COUNT
        case 31: case 41: return 1;             // CONCURRENT_KERNELS, UNIFIED_ADDRESSING
        case 33: return device + 1;             // PCI_BUS_ID
        case 36: return 2'000'000;              // MEMORY_CLOCK_RATE, kHz
        case 37: return 5120;                   // GLOBAL_MEMORY_BUS_WIDTH, bits
        case 38: return 50 << 20;               // L2_CACHE_SIZE
        case 39: return 2048;                   // MAX_THREADS_PER_MULTIPROCESSOR
        case 40: return 3;                      // ASYNC_ENGINE_COUNT
        case 75: return int(capability() / 10); // COMPUTE_CAPABILITY_MAJOR
        case 76: return int(capability() % 10); // COMPUTE_CAPABILITY_MINOR
        case 81: return int(shared_bytes_max() + 1024);  // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
        case 97: return int(shared_bytes_max());         // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        case 106: return 32;                    // MAX_BLOCKS_PER_MULTIPROCESSOR
        default: return 0;                      // Also MEMORY_POOLS_SUPPORTED, 115.
    }
}

}  // namespace fake_cuda

using namespace fake_cuda;

EXPORT CUresult cuInit(u32) {
    Guard guard(lock());
    State& all = state();
    if (all.initialised) return CUDA_SUCCESS;
    const u64 count = setting("NARROWS_FAKE_CUDA_DEVICES", 1);
    for (u64 ordinal = 0; ordinal < count; ordinal++) {
        auto device = std::make_unique<Device>();
        device->ordinal = int(ordinal);
        device->context.device = int(ordinal);
        device->legacy.device = int(ordinal);
        device->legacy.number = 0;
        device->legacy.blocking = true;
        all.devices.push_back(std::move(device));
    }
    all.initialised = true;
    return count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORT CUresult cuDriverGetVersion(int* version) {
    *version = int(setting("NARROWS_FAKE_CUDA_DRIVER", 12090));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int* count) {
    Guard guard(lock());
    if (!state().initialised) return CUDA_ERROR_NOT_INITIALIZED;
    *count = int(state().devices.size());
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    Guard guard(lock());
    *device = ordinal;
    return exists(ordinal);
}

EXPORT CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
    Guard guard(lock());
    if (CUresult result = exists(device)) return result;
    snprintf(name, size_t(length), "Narrows fake GPU");
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
    Guard guard(lock());
    if (CUresult result = exists(device)) return result;
    *bytes = memory_bytes();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int* value, int which, CUdevice device) {
    Guard guard(lock());
    if (CUresult result = exists(device)) return result;
    *value = attribute(which, device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(char* uuid, CUdevice device) {
    Guard guard(lock());
    if (CUresult result = exists(device)) return result;
    memcpy(uuid, "narrows fake gpu", 16);
    uuid[15] = char(device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(char* uuid, CUdevice device) {
    return cuDeviceGetUuid_v2(uuid, device);
}

EXPORT CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
    Guard guard(lock());
    if (CUresult result = exists(device)) return result;
    snprintf(id, size_t(length), "0000:%02x:00.0", device + 1);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
    Guard guard(lock());
    if (CUresult result = exists(ordinal)) return result;
    Device& device = *state().devices[ordinal];
    device.retained++;
    if (state().first_device < 0) state().first_device = ordinal;
    *context = &device.context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
    Guard guard(lock());
    if (CUresult result = exists(ordinal)) return result;
    Device& device = *state().devices[ordinal];
    if (!device.retained) return CUDA_ERROR_INVALID_CONTEXT;
    device.retained--;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
    Guard guard(lock());
    if (!state().initialised) return CUDA_ERROR_NOT_INITIALIZED;
    *context = current;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    Guard guard(lock());
    if (!state().initialised) return CUDA_ERROR_NOT_INITIALIZED;
    if (context && !state().devices[context->device]->retained) return CUDA_ERROR_INVALID_CONTEXT;
    current = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
    Guard guard(lock());
    Device* context_owner;
    if (CUresult result = context_device(context_owner)) return result;
    *device = context_owner->ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetFlags(u32) {
    Guard guard(lock());
    Device* device;
    return context_device(device);
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize() {
    std::unique_lock<std::mutex> guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    if (CUresult result = check_not_capturing()) return result;
    for (CapturePtr& capture : state().captures) {
        if (capture->origin->device != device->ordinal) continue;
        invalidate(*capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    log("host synchronises device=" + std::to_string(device->ordinal));
    const auto all = [&] {
        for (CUstream stream : state().streams) {
            if (stream->device == device->ordinal && !idle(stream)) return false;
        }
        return idle(&device->legacy);
    };
    return wait_for(*device, nullptr, all, guard);
}

EXPORT CUresult cuGetErrorName(CUresult result, const char** name) {
    switch (result) {
#define NAME(of, number, sentence) \
    case number: *name = #of; return CUDA_SUCCESS;
        RESULTS(NAME)
#undef NAME
        default: *name = nullptr; return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult cuGetErrorString(CUresult result, const char** text) {
    switch (result) {
#define SENTENCE(of, number, sentence) \
    case number: *text = sentence; return CUDA_SUCCESS;
        RESULTS(SENTENCE)
#undef SENTENCE
        default: *text = nullptr; return CUDA_ERROR_INVALID_VALUE;
    }
}
