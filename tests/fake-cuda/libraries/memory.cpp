// Device memory, and pinned host memory.
//
// An allocation is followed by an inaccessible page, up to the alignment of 256 bytes, and addresses are never reused:
// a kernel that accesses memory out of bounds or after its release ends the process with a message. Unwritten memory is
// 0xff, which is NaN in every format, and takes no physical memory: its pages are copy-on-write.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cstdio>
#include <cstring>
#include "state.h"

namespace fake_cuda {

constexpr u64 PAGE = 4096, ALIGNMENT = 256, CHUNK = 4 << 20;

static u64 rounded(u64 bytes, u64 to) { return (bytes + to - 1) / to * to; }

// A file filled with 0xff.
static int unwritten_file() {
    static const int file = [] {
        const int file = memfd_create("narrows-unwritten", MFD_CLOEXEC);
        const std::string bytes(CHUNK, '\xff');
        if (file < 0 || write(file, bytes.data(), CHUNK) != ssize_t(CHUNK)) return -1;
        return file;
    }();
    return file;
}

static void* map(u64 bytes) {
    const u64 whole = bytes + 2 * PAGE;
    void* mapped = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED || unwritten_file() < 0) return nullptr;
    char* const first = static_cast<char*>(mapped) + PAGE;
    for (u64 at = 0; at < bytes; at += CHUNK) {
        const u64 piece = bytes - at < CHUNK ? bytes - at : CHUNK;
        void* piece_mapping = mmap(first + at, piece, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, unwritten_file(), 0);
        if (piece_mapping == MAP_FAILED) return nullptr;
    }
    return mapped;
}

// The last allocation that begins at or before an address.
static Allocation* allocation_at(Device& device, u64 address, u64& begin) {
    auto after = device.allocations.upper_bound(address);
    if (after == device.allocations.begin()) return nullptr;
    --after;
    begin = after->first;
    return &after->second;
}

bool is_in_allocation(int ordinal, const void* pointer, u64 bytes) {
    u64 begin, address = reinterpret_cast<u64>(pointer);
    const Allocation* allocation = allocation_at(*state().devices[ordinal], address, begin);
    if (!allocation || allocation->freed) return false;
    return address - begin <= allocation->bytes && bytes <= allocation->bytes - (address - begin);
}

static std::string describe_address(int ordinal, u64 address) {
    u64 begin;
    const Allocation* allocation = allocation_at(*state().devices[ordinal], address, begin);
    if (!allocation) return "an address in no allocation of the device";
    const std::string offset = std::to_string(address - begin);
    const std::string bytes = std::to_string(allocation->bytes) + " bytes";
    return "byte " + offset + " of " + bytes + (allocation->freed ? " that were freed" : "");
}

bool check_range(int ordinal, const void* pointer, u64 bytes, const std::string& what) {
    if (is_in_allocation(ordinal, pointer, bytes)) return true;
    fail(ordinal, CUDA_ERROR_ILLEGAL_ADDRESS,
         what + " accesses " + std::to_string(bytes) + " bytes at " +
             describe_address(ordinal, reinterpret_cast<u64>(pointer)));
    return false;
}

// The kernel that is running, for messages about invalid accesses.
static char running_kernel[256];
static int running_device;
static struct sigaction previous_handler;

static void on_fault(int signal, siginfo_t* info, void*) {
    const u64 address = reinterpret_cast<u64>(info->si_addr);
    report(std::string(running_kernel) + " accesses " + describe_address(running_device, address));
    sigaction(signal, &previous_handler, nullptr);
}

void watch_faults(int ordinal, const std::string& kernel) {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    snprintf(running_kernel, sizeof running_kernel, "%s", kernel.c_str());
    running_device = ordinal;
    sigaction(SIGSEGV, &action, &previous_handler);
}

void unwatch_faults() { sigaction(SIGSEGV, &previous_handler, nullptr); }

}  // namespace fake_cuda

using namespace fake_cuda;

static u64 total_bytes() { return setting("NARROWS_FAKE_CUDA_MEMORY", 4ull << 30); }

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    if (CUresult result = check_not_capturing()) return result;
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    const u64 taken = rounded(bytes, 512);
    if (taken > total_bytes() - device->used_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    const u64 aligned = rounded(bytes, ALIGNMENT), pages = rounded(aligned, PAGE);
    void* mapped = map(pages);
    if (!mapped) return CUDA_ERROR_OUT_OF_MEMORY;
    *pointer = reinterpret_cast<u64>(mapped) + PAGE + pages - aligned;
    device->allocations[*pointer] = {bytes, false, mapped, pages + 2 * PAGE};
    device->used_bytes += taken;
    return CUDA_SUCCESS;
}

// Does not wait: queued operations that still use the memory are an error.
EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    if (CUresult result = check_not_capturing()) return result;
    if (!pointer) return CUDA_SUCCESS;
    auto entry = device->allocations.find(pointer);
    if (entry == device->allocations.end() || entry->second.freed) {
        report("freed memory was not allocated, or was freed before");
        return CUDA_ERROR_INVALID_VALUE;
    }
    Allocation& allocation = entry->second;
    device->used_bytes -= rounded(allocation.bytes, 512);
    allocation.freed = true;
    mmap(allocation.mapped, allocation.mapped_bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    *total = total_bytes();
    *free = *total - device->used_bytes;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void** pointer, size_t bytes, u32) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    if (CUresult result = check_not_capturing()) return result;
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    *pointer = aligned_alloc(PAGE, rounded(bytes, PAGE));
    if (!*pointer) return CUDA_ERROR_OUT_OF_MEMORY;
    memset(*pointer, 0xff, bytes);
    const u64 begin = reinterpret_cast<u64>(*pointer);
    state().pinned[begin] = begin + bytes;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAllocHost_v2(void** pointer, size_t bytes) {
    return cuMemHostAlloc(pointer, bytes, 0);
}

EXPORT CUresult cuMemFreeHost(void* pointer) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    if (!state().pinned.erase(reinterpret_cast<u64>(pointer))) return CUDA_ERROR_INVALID_VALUE;
    free(pointer);
    return CUDA_SUCCESS;
}
