// Modules, and launches of kernels.
//
// An image contains the names of a kernel family and an architecture. The library of the family's kernels, compiled for
// the CPU, lies beside this library; its entries take a launch as shim.h defines it.
#include <dlfcn.h>
#include <cstdio>
#include <cstring>
#include <tuple>
#include "state.h"

namespace fake_cuda {

u32 architecture();
u32 shared_bytes_max();
void watch_faults(int device, const std::string& kernel);
void unwatch_faults();

// The layout of shim.h.
struct Launch {
    u32 grid[3], block[3];
    u32 shared_bytes, descending;
    void** arguments;
    const char* kinds;
    char* error;
    u32 error_bytes;
};
using Entry = int (*)(const Launch*);

constexpr u32 SHARED_BYTES = 48 << 10;

static std::string own_folder() {
    Dl_info info;
    if (!dladdr(reinterpret_cast<void*>(&own_folder), &info)) return ".";
    const std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

}  // namespace fake_cuda

struct CUfunc_st {
    std::string name;
    fake_cuda::Entry entry;
    // Kind of each parameter: p (pointer), u (32 bits), l (64 bits) or f (float).
    std::string kinds;
    u32 threads_max;
    u32 shared_max = fake_cuda::SHARED_BYTES;
};

struct CUmod_st {
    void* kernels;
    int device;
    std::map<std::string, std::unique_ptr<CUfunc_st>> functions;
};

using namespace fake_cuda;

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    if (CUresult result = check_not_capturing()) return result;
    const std::string text = static_cast<const char*>(image), magic = "\x7f" "ELF narrows fake CUDA\n";
    if (text.compare(0, magic.size(), magic)) {
        report("a loaded image was not produced by the fake NVRTC");
        return CUDA_ERROR_INVALID_IMAGE;
    }
    const size_t end = text.find('\n', magic.size());
    const std::string family = text.substr(magic.size(), end - magic.size());
    const std::string target = text.substr(end + 1);
    if (target != "sm_" + std::to_string(architecture())) {
        report("an image of " + family + " is for " + target + ", not for this device");
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    const std::string path = own_folder() + "/kernels-" + family + ".so";
    void* kernels = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!kernels) {
        report(dlerror());
        return CUDA_ERROR_INVALID_IMAGE;
    }
    *module = new CUmod_st{kernels, device->ordinal, {}};
    return CUDA_SUCCESS;
}

// Its kernels stay loaded, for what is queued.
EXPORT CUresult cuModuleUnload(CUmodule) {
    Guard guard(lock());
    Device* device;
    return context_device(device);
}

EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    auto& slot = module->functions[name];
    if (!slot) {
        auto entry = reinterpret_cast<Entry>(dlsym(module->kernels, name));
        if (!entry) return CUDA_ERROR_NOT_FOUND;
        char description[256] = {}, kinds[256] = {};
        u32 threads = 0;
        Launch query = {};
        query.error = description;
        query.error_bytes = sizeof description;
        entry(&query);
        if (sscanf(description, "%u %255s", &threads, kinds) < 1) return CUDA_ERROR_NOT_FOUND;
        slot.reset(new CUfunc_st{name, entry, kinds, threads});
    }
    *function = slot.get();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    if (attribute != MAX_DYNAMIC_SHARED_BYTES) return attribute == 9 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (value < 0 || u32(value) > shared_bytes_max()) return CUDA_ERROR_INVALID_VALUE;
    function->shared_max = u32(value);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int* value, int attribute, CUfunction function) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    switch (attribute) {
        case 0: *value = int(function->threads_max); break;
        case MAX_DYNAMIC_SHARED_BYTES: *value = int(function->shared_max); break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

// Why a launch is invalid; empty if it is valid.
static std::string defect(const CUfunc_st& function, const Launch& launch) {
    const auto& [grid, block] = std::tie(launch.grid, launch.block);
    const u64 threads = u64(block[0]) * block[1] * block[2];
    if (!threads || !grid[0] || !grid[1] || !grid[2]) return "it has no blocks or no threads";
    if (grid[0] > 0x7fffffff || grid[1] > 65535 || grid[2] > 65535) return "its grid is too large";
    if (block[0] > 1024 || block[1] > 1024 || block[2] > 64) return "its block is too large";
    if (threads > function.threads_max) {
        return "a block has " + std::to_string(threads) + " threads, and the kernel is compiled for " +
               std::to_string(function.threads_max);
    }
    if (launch.shared_bytes > function.shared_max) {
        return std::to_string(launch.shared_bytes) + " bytes of shared memory are more than the " +
               std::to_string(function.shared_max) + " it was allowed";
    }
    return "";
}

// A kernel's parameter: its kind, with '(' for a structure, and its size.
struct Parameter {
    char kind;
    size_t bytes;
};

static std::vector<Parameter> parameters(const CUfunc_st& function) {
    std::vector<Parameter> parameters;
    for (size_t at = 0; at < function.kinds.size(); at++) {
        const char kind = function.kinds[at];
        size_t bytes = kind == 'p' || kind == 'l' ? 8 : 4;
        if (kind == '(') {
            bytes = std::stoul(function.kinds.substr(at + 1));
            at = function.kinds.find(')', at);
        }
        parameters.push_back({kind, bytes});
    }
    return parameters;
}

static void run(int device, const CUfunc_st& function, Launch launch,
                std::vector<std::vector<u64>> values) {
    std::vector<void*> arguments;
    const std::vector<Parameter> declared = parameters(function);
    for (size_t at = 0; at < values.size(); at++) {
        const std::string what = "argument " + std::to_string(at) + " of " + function.name;
        const void* pointer = reinterpret_cast<void*>(values[at][0]);
        if (declared[at].kind == 'p' && pointer && !check_range(device, pointer, 1, what)) return;
        arguments.push_back(values[at].data());
    }
    char error[1024] = {};
    launch.arguments = arguments.data();
    launch.descending = draw(2);
    launch.error = error;
    launch.error_bytes = sizeof error;
    watch_faults(device, function.name);
    const int failed = function.entry(&launch);
    unwatch_faults();
    if (failed) fail(device, CUDA_ERROR_LAUNCH_FAILED, function.name + ": " + error);
}

EXPORT CUresult cuLaunchKernel(CUfunction function, u32 grid_x, u32 grid_y, u32 grid_z, u32 block_x,
                               u32 block_y, u32 block_z, u32 shared_bytes, CUstream stream,
                               void** arguments, void** extra) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    if (CUresult result = resolve(*device, stream)) return result;
    if (extra) return CUDA_ERROR_NOT_SUPPORTED;
    Launch launch = {};
    launch.grid[0] = grid_x, launch.grid[1] = grid_y, launch.grid[2] = grid_z;
    launch.block[0] = block_x, launch.block[1] = block_y, launch.block[2] = block_z;
    launch.shared_bytes = shared_bytes;
    if (const std::string why = defect(*function, launch); !why.empty()) {
        report("a launch of " + function->name + " is refused: " + why);
        return CUDA_ERROR_INVALID_VALUE;
    }
    const std::vector<Parameter> declared = parameters(*function);
    std::vector<std::vector<u64>> values;
    size_t parameter_bytes = 0;
    for (size_t at = 0; at < declared.size(); at++) {
        if (!arguments || !arguments[at]) return CUDA_ERROR_INVALID_VALUE;
        const size_t bytes = declared[at].bytes;
        parameter_bytes += (bytes + 7) / 8 * 8;
        values.emplace_back((bytes + 7) / 8);
        memcpy(values.back().data(), arguments[at], bytes);
    }
    // The limit of all drivers; those for CUDA 12.1 and later allow more.
    if (parameter_bytes > 4096) return CUDA_ERROR_INVALID_VALUE;
    const CUfunc_st* of = function;
    return queue(stream, at_once("launch " + function->name, [=](int device) {
        run(device, *of, launch, values);
    }));
}
