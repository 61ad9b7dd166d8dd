// Copies and memsets.
//
// The source of a copy is read when the copy runs, not when it is queued. Only pageable host memory is read during the
// call, as by a driver that stages it; in a graph it, too, is read when the copy runs.
#include <cstring>
#include "state.h"

namespace fake_cuda {

static bool is_pinned(const void* pointer, u64 bytes) {
    const u64 begin = reinterpret_cast<u64>(pointer);
    auto after = state().pinned.upper_bound(begin);
    if (after == state().pinned.begin()) return false;
    --after;
    return begin + bytes <= after->second;
}

// Source or destination of a copy: rows of bytes.
struct Side {
    // Host or device address.
    char* first;
    u64 pitch;
    bool on_device;
    u64 span(u64 width, u64 height) const { return height ? (height - 1) * pitch + width : 0; }
};

// A range of host memory that must still be pinned when the copy runs, if it was when it was queued.
struct HostRange {
    bool pinned;
    const void* pointer;
    u64 bytes;
    bool is_valid() const { return !pinned || is_pinned(pointer, bytes); }
};

static CUresult check_side(Device& device, const Side& side, u64 bytes) {
    if (!side.on_device || is_in_allocation(device.ordinal, side.first, bytes)) return CUDA_SUCCESS;
    report("a copy of " + std::to_string(bytes) + " bytes is not within an allocation");
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult copy(const char* kind, Side to, Side from, u64 width, u64 height, CUstream stream) {
    Device* owner;
    if (CUresult result = working_device(owner)) return result;
    Device& device = *owner;
    if (CUresult result = resolve(device, stream)) return result;
    const u64 to_bytes = to.span(width, height), from_bytes = from.span(width, height);
    if (!to_bytes || !width) return CUDA_SUCCESS;
    if (CUresult result = check_side(device, to, to_bytes)) return result;
    if (CUresult result = check_side(device, from, from_bytes)) return result;
    std::shared_ptr<std::string> staged;
    if (!from.on_device && !stream->capture && !is_pinned(from.first, from_bytes)) {
        staged = std::make_shared<std::string>(from.first, from_bytes);
    }
    const std::string name = std::string("copy_") + kind + " " + std::to_string(width * height);
    const HostRange source_range = {!from.on_device && is_pinned(from.first, from_bytes), from.first, from_bytes};
    const HostRange target_range = {!to.on_device && is_pinned(to.first, to_bytes), to.first, to_bytes};
    return queue(stream, at_once(name, [=](int device) {
        if (to.on_device && !check_range(device, to.first, to_bytes, name)) return;
        if (from.on_device && !check_range(device, from.first, from_bytes, name)) return;
        if (!source_range.is_valid() || !target_range.is_valid()) {
            return fail(device, CUDA_ERROR_ILLEGAL_ADDRESS, name + ": its pinned memory was freed");
        }
        const char* source = staged ? staged->data() : from.first;
        for (u64 row = 0; row < height; row++) {
            memmove(to.first + row * to.pitch, source + row * from.pitch, width);
        }
    }));
}

static Side on_device(CUdeviceptr at) { return {reinterpret_cast<char*>(at), 0, true}; }
static Side on_host(const void* at) {
    return {const_cast<char*>(static_cast<const char*>(at)), 0, false};
}

// A copy on the legacy stream, for which the host may wait.
static CUresult copy_sync(const char* kind, Side to, Side from, u64 bytes, bool wait) {
    std::unique_lock<std::mutex> guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    if (CUresult result = check_not_capturing()) return result;
    if (CUresult result = copy(kind, to, from, bytes, 1, nullptr)) return result;
    if (!wait) return CUDA_SUCCESS;
    CUstream legacy = &device->legacy;
    log("host synchronises device=" + std::to_string(device->ordinal) + " stream=0");
    return wait_for(*device, legacy, [&] { return idle(legacy); }, guard);
}

static CUresult set(CUdeviceptr at, std::string pattern, u64 count, CUstream stream) {
    Device* device;
    if (CUresult result = working_device(device)) return result;
    if (CUresult result = resolve(*device, stream)) return result;
    const u64 bytes = count * pattern.size();
    if (!bytes) return CUDA_SUCCESS;
    char* const first = reinterpret_cast<char*>(at);
    if (at % pattern.size()) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult result = check_side(*device, {first, 0, true}, bytes)) return result;
    const std::string name = "set " + std::to_string(bytes);
    return queue(stream, at_once(name, [=](int device) {
        if (!check_range(device, first, bytes, name)) return;
        if (pattern.size() == 1) {
            memset(first, pattern[0], bytes);
            return;
        }
        for (u64 at = 0; at < bytes; at += pattern.size()) {
            memcpy(first + at, pattern.data(), pattern.size());
        }
    }));
}

static std::string bytes_of(u32 value) { return {reinterpret_cast<char*>(&value), 4}; }

static CUresult rows(const CUDA_MEMCPY2D& of, CUstream stream) {
    const auto side = [](u32 type, const void* host, CUdeviceptr device, u64 x, u64 y, u64 pitch) {
        Side side = type == MEMORY_DEVICE ? on_device(device) : on_host(host);
        side.first += y * pitch + x;
        side.pitch = pitch;
        return side;
    };
    const auto known = [](u32 type) { return type == MEMORY_HOST || type == MEMORY_DEVICE; };
    if (!known(of.srcMemoryType) || !known(of.dstMemoryType)) return CUDA_ERROR_NOT_SUPPORTED;
    const Side from = side(of.srcMemoryType, of.srcHost, of.srcDevice, of.srcXInBytes, of.srcY, of.srcPitch);
    const Side to = side(of.dstMemoryType, of.dstHost, of.dstDevice, of.dstXInBytes, of.dstY, of.dstPitch);
    if (from.pitch < of.WidthInBytes || to.pitch < of.WidthInBytes) return CUDA_ERROR_INVALID_VALUE;
    return copy("rows", to, from, of.WidthInBytes, of.Height, stream);
}

}  // namespace fake_cuda

using namespace fake_cuda;

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    Guard guard(lock());
    return copy("htod", on_device(to), on_host(from), bytes, 1, stream);
}
EXPORT CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    Guard guard(lock());
    return copy("dtoh", on_host(to), on_device(from), bytes, 1, stream);
}
EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    Guard guard(lock());
    return copy("dtod", on_device(to), on_device(from), bytes, 1, stream);
}
EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
    return copy_sync("htod", on_device(to), on_host(from), bytes, true);
}
EXPORT CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
    return copy_sync("dtoh", on_host(to), on_device(from), bytes, true);
}
// The host does not wait for copies within the device.
EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return copy_sync("dtod", on_device(to), on_device(from), bytes, false);
}
EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* of, CUstream stream) {
    Guard guard(lock());
    return rows(*of, stream);
}
EXPORT CUresult cuMemsetD8Async(CUdeviceptr at, u8 value, size_t count, CUstream stream) {
    Guard guard(lock());
    return set(at, std::string(1, char(value)), count, stream);
}
EXPORT CUresult cuMemsetD32Async(CUdeviceptr at, u32 value, size_t count, CUstream stream) {
    Guard guard(lock());
    return set(at, bytes_of(value), count, stream);
}
EXPORT CUresult cuMemsetD8_v2(CUdeviceptr at, u8 value, size_t count) {
    return cuMemsetD8Async(at, value, count, nullptr);
}
EXPORT CUresult cuMemsetD32_v2(CUdeviceptr at, u32 value, size_t count) {
    return cuMemsetD32Async(at, value, count, nullptr);
}
