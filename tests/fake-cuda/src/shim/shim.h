// Runs kernels on the CPU: the subset of CUDA C++ that the kernels use.
//
// The threads of a block are fibers, which yield at barriers only. A warp-wide operation (shuffle, mma, ldmatrix) is a
// barrier of the warp. Blocks run one after the other. Mistakes that a GPU does not report are errors here: threads
// that wait at different barriers, a thread that ended while others wait for it, lanes missing from a mask, arguments
// that differ from the kernel's parameters. Shared memory contains NaNs when a block begins. Fibers and blocks run in
// ascending or in descending order, each as far as it can before the next: a kernel that lacks a barrier, or whose
// blocks depend on each other, gives different results in the two orders.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include "fiber.h"

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__ __restrict
#define __grid_constant__

struct uint2 {
    u32 x, y;
} __attribute__((aligned(8)));
struct uint4 {
    u32 x, y, z, w;
} __attribute__((aligned(16)));
struct float4 {
    float x, y, z, w;
} __attribute__((aligned(16)));

struct Index3 {
    u32 x, y, z;
};
static Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

// Parameters of a launch; tests/kernels/shim.rs and the fake driver have the same layout.
struct Launch {
    u32 grid[3], block[3];
    u32 shared_bytes;
    // 1 runs blocks and threads in descending order.
    u32 descending;
    // Null to query the kernel: nothing runs, and `error` receives the maximum threads per block and the kinds of its
    // parameters.
    void** arguments;
    // Kind of each argument: p (pointer), u (32 bits), l (64 bits), f (float), or the bytes of a structure in parentheses.
    // Null where the caller has queried them.
    const char* kinds;
    char* error;
    u32 error_bytes;
};

enum class State { ready, at_block_barrier, at_warp_barrier, done };

// A barrier: the operation and its place in the source.
struct Barrier {
    const char* operation;
    const char* file;
    int line;
    bool operator==(const Barrier& other) const {
        return line == other.line && same(operation, other.operation) && same(file, other.file);
    }
    static bool same(const char* a, const char* b) { return a == b || !strcmp(a, b); }
};

// An asynchronous copy that has not been waited for.
struct Copy {
    void* to;
    unsigned char bytes[16];
};

struct Thread {
    Fiber fiber;
    State state;
    Index3 index;
    u32 number;
    Barrier barrier;
    // Warp-wide operations so far. Two consecutive ones use different slots.
    u32 warp_operations;
    // Copies in flight, and the number of copies up to the end of each closed group.
    std::vector<Copy> copies;
    std::vector<size_t> group_ends;
};

constexpr u32 SLOT = 64;
struct Warp {
    // Inputs and outputs of a warp-wide operation: arrays with an element for each lane.
    alignas(32) unsigned char inputs[2][32 * SLOT];
    alignas(32) unsigned char outputs[2][32 * SLOT];
    // Lanes that wait at a warp barrier.
    u32 waiting;
};

struct Block {
    std::vector<Thread> threads;
    // As many as the largest block had threads.
    std::vector<Stack> stacks;
    std::vector<Warp> warps;
    Fiber scheduler;
    Thread* current = nullptr;
    // Position of the running thread in the order of execution.
    u32 position = 0;
    bool descending = false;
    std::vector<uint4> dynamic;
    // Shared arrays, keyed by their declarations.
    std::vector<std::pair<const void*, std::vector<uint4>>> arrays;
    bool failed = false;
    // Whether the running thread has released other lanes of its warp.
    bool warp_released = false;
    char error[512];
    void (*body)(void*) = nullptr;
    void* closure = nullptr;
};
static Block block;

// The thread at a position of the order of execution.
inline Thread& thread_at(u32 position) {
    const u32 count = u32(block.threads.size());
    return block.threads[block.descending ? count - 1 - position : position];
}

// Sets the thread that runs next.
inline Thread& select_thread(u32 position) {
    Thread& thread = thread_at(position);
    block.position = position;
    block.current = &thread;
    threadIdx = thread.index;
    return thread;
}

// Suspends the running thread. If the scheduler would continue the next thread, switches to that one directly.
inline void yield() {
    Thread& self = *block.current;
    const u32 next = block.position + 1;
    const bool in_order = !block.failed && !block.warp_released && next < block.threads.size();
    if (in_order && thread_at(next).state == State::ready) {
        switch_fiber(self.fiber, select_thread(next).fiber);
    } else {
        switch_fiber(self.fiber, block.scheduler);
    }
}

[[noreturn]] inline void fail(const char* operation, const char* reason, const char* file, int line) {
    snprintf(block.error, sizeof block.error, "%s at %s:%d in thread %u of block %u,%u,%u: %s",
             operation, file, line, block.current->number, blockIdx.x, blockIdx.y, blockIdx.z, reason);
    block.failed = true;
    yield();
    abort();
}

inline __attribute__((noinline)) void wait_for_block(Barrier barrier) {
    block.current->state = State::at_block_barrier;
    block.current->barrier = barrier;
    yield();
}

// Waits until all lanes of the warp have arrived at the same barrier. The last lane to arrive calls `last` and releases
// the others.
template <class Last>
inline void wait_for_warp(Barrier barrier, Last last) {
    Thread& self = *block.current;
    Warp& warp = block.warps[self.number / 32];
    self.state = State::at_warp_barrier;
    self.barrier = barrier;
    if (++warp.waiting < 32) return yield();
    Thread* lanes = &block.threads[self.number / 32 * 32];
    for (u32 lane = 0; lane < 32; lane++) {
        if (!(lanes[lane].barrier == barrier)) return yield();
    }
    last();
    warp.waiting = 0;
    for (u32 lane = 0; lane < 32; lane++) lanes[lane].state = State::ready;
    block.warp_released = true;
}

// A warp-wide operation: `combine(inputs, outputs)` maps the inputs of the 32 lanes to their outputs.
template <class Output, class Input, class Combine>
Output warp_operation(const Input& input, u32 mask, Barrier barrier, Combine combine) {
    static_assert(sizeof(Input) <= SLOT && sizeof(Output) <= SLOT, "a lane's operands fit a slot");
    static_assert(alignof(Input) <= 32 && alignof(Output) <= 32);
    static_assert(std::is_trivially_copyable_v<Input> && std::is_trivially_copyable_v<Output>);
    if (mask != 0xffffffffu) {
        fail(barrier.operation, "not all lanes are in its mask", barrier.file, barrier.line);
    }
    Thread& self = *block.current;
    Warp& warp = block.warps[self.number / 32];
    const u32 lane = self.number % 32, slot = self.warp_operations++ % 2;
    Input* inputs = reinterpret_cast<Input*>(warp.inputs[slot]);
    Output* outputs = reinterpret_cast<Output*>(warp.outputs[slot]);
    inputs[lane] = input;
    wait_for_warp(barrier, [&] { combine(inputs, outputs); });
    return outputs[lane];
}

// A shuffle: lane i receives the value of lane `source(i)`.
template <class T, class Source>
T shuffle(T value, u32 mask, Barrier barrier, Source source) {
    return warp_operation<T>(value, mask, barrier, [&](const T* inputs, T* outputs) {
        for (u32 lane = 0; lane < 32; lane++) outputs[lane] = inputs[source(lane)];
    });
}

// A shared array for one declaration, full of NaNs when the block begins.
inline void* shared_array(const void* declaration, size_t bytes) {
    for (auto& [key, memory] : block.arrays) {
        if (key == declaration) return memory.data();
    }
    std::vector<uint4> memory((bytes + 15) / 16, uint4{~0u, ~0u, ~0u, ~0u});
    block.arrays.emplace_back(declaration, std::move(memory));
    return block.arrays.back().second.data();
}

// Rounds to nearest, ties to even.
inline u16 round_to_bf16(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    if (x != x) return u16(bits >> 16 | 0x40);
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Reports two threads that cannot both go on.
inline void report_deadlock() {
    const Thread *waiting = nullptr, *other = nullptr;
    for (const Thread& thread : block.threads) {
        const bool waits =
            thread.state == State::at_block_barrier || thread.state == State::at_warp_barrier;
        if (waits && !waiting) waiting = &thread;
    }
    for (const Thread& thread : block.threads) {
        const bool same = thread.state == waiting->state && thread.barrier == waiting->barrier;
        if (!same && !other) other = &thread;
    }
    const Barrier& barrier = waiting->barrier;
    const int written = snprintf(
        block.error, sizeof block.error,
        "block %u,%u,%u stops: thread %u waits in %s at %s:%d, and thread %u ", blockIdx.x, blockIdx.y,
        blockIdx.z, waiting->number, barrier.operation, barrier.file, barrier.line, other->number);
    char* rest = block.error + written;
    const size_t room = sizeof block.error - written;
    if (other->state == State::done) {
        snprintf(rest, room, "has ended");
    } else {
        snprintf(rest, room, "waits in %s at %s:%d", other->barrier.operation, other->barrier.file,
                 other->barrier.line);
    }
    block.failed = true;
}

inline void thread_entry() {
    block.body(block.closure);
    block.current->state = State::done;
    yield();
}

// Runs all threads of a block until they end or none can go on.
inline void run_block() {
    const u32 count = u32(block.threads.size());
    block.arrays.clear();
    for (uint4& word : block.dynamic) word = {~0u, ~0u, ~0u, ~0u};
    for (Warp& warp : block.warps) warp.waiting = 0;
    for (Thread& thread : block.threads) {
        thread.state = State::ready;
        thread.warp_operations = 0;
        thread.copies.clear();
        thread.group_ends.clear();
        start_fiber(thread.fiber, block.stacks[thread.number], thread_entry);
    }
    for (;;) {
        u32 done = 0, waiting = 0;
        // Always continues the first thread that can go on, as far as it can: it may overwrite what others have not
        // read yet, and read what they have not written yet.
        for (u32 at = 0; at < count;) {
            if (thread_at(at).state != State::ready) {
                at++;
                continue;
            }
            block.warp_released = false;
            switch_fiber(block.scheduler, select_thread(at).fiber);
            if (block.failed) return;
            at = block.warp_released ? block.position / 32 * 32 : block.position;
        }
        const Barrier& first = block.threads[0].barrier;
        for (Thread& thread : block.threads) {
            done += thread.state == State::done;
            waiting += thread.state == State::at_block_barrier && thread.barrier == first;
        }
        if (done == count) return;
        if (waiting != count) return report_deadlock();
        for (Thread& thread : block.threads) thread.state = State::ready;
    }
}

template <class T>
std::string kind_of() {
    if (std::is_class_v<T>) return "(" + std::to_string(sizeof(T)) + ")";
    if (std::is_pointer_v<T>) return "p";
    if (std::is_same_v<T, float>) return "f";
    return sizeof(T) == 8 ? "l" : "u";
}

// Runs a launch whose arguments have been checked.
inline int run_blocks(const Launch* launch, u32 threads_max, void (*body)(void*), void* closure) {
    const auto refuse = [&](const char* reason) {
        snprintf(launch->error, launch->error_bytes, "%s", reason);
        return 1;
    };
    blockDim = {launch->block[0], launch->block[1], launch->block[2]};
    gridDim = {launch->grid[0], launch->grid[1], launch->grid[2]};
    const u32 count = blockDim.x * blockDim.y * blockDim.z;
    if (count == 0 || count % 32 || count > 1024) return refuse("a block is 1 to 32 whole warps");
    if (count > threads_max) {
        char reason[256];
        snprintf(reason, sizeof reason, "a block has %u threads, the kernel is compiled for %u", count,
                 threads_max);
        return refuse(reason);
    }
    block.threads.resize(count);
    if (block.stacks.size() < count) block.stacks.resize(count);
    block.warps.resize(count / 32);
    block.dynamic.resize((launch->shared_bytes + 15) / 16);
    block.failed = false;
    for (u32 at = 0; at < count; at++) {
        const u32 x = at % blockDim.x, y = at / blockDim.x % blockDim.y;
        block.threads[at].number = at;
        block.threads[at].index = {x, y, at / blockDim.x / blockDim.y};
    }
    block.body = body;
    block.closure = closure;
    block.descending = launch->descending;
    const u64 blocks = u64(gridDim.x) * gridDim.y * gridDim.z;
    for (u64 at = 0; at < blocks && !block.failed; at++) {
        const u64 number = launch->descending ? blocks - 1 - at : at;
        blockIdx = {u32(number % gridDim.x), u32(number / gridDim.x % gridDim.y),
                    u32(number / gridDim.x / gridDim.y)};
        run_block();
    }
    return block.failed ? refuse(block.error) : 0;
}

template <class... Arguments, size_t... AT>
int run(void (*kernel)(Arguments...), const Launch* launch, u32 threads_max,
        std::index_sequence<AT...>) {
    const std::string declared = (kind_of<std::remove_const_t<Arguments>>() + ... + "");
    if (!launch->arguments) {
        snprintf(launch->error, launch->error_bytes, "%u %s", threads_max, declared.c_str());
        return 0;
    }
    if (launch->kinds && declared != launch->kinds) {
        snprintf(launch->error, launch->error_bytes, "the kernel takes %s, and receives %s", declared.c_str(),
                 launch->kinds);
        return 1;
    }
    auto call = [&] { kernel(*static_cast<Arguments*>(launch->arguments[AT])...); };
    const auto body = [](void* closure) { (*static_cast<decltype(call)*>(closure))(); };
    return run_blocks(launch, threads_max, body, &call);
}

template <class... Arguments>
int run(void (*kernel)(Arguments...), const Launch* launch, u32 threads_max) {
    return run(kernel, launch, threads_max, std::index_sequence_for<Arguments...>());
}

}  // namespace shim

#define KERNEL(threads, blocks, name, ...)                                                       \
    static void name##_body(__VA_ARGS__);                                                        \
    extern "C" __attribute__((visibility("default"))) int name(const shim::Launch* launch) {     \
        return shim::run(name##_body, launch, (threads));                                        \
    }                                                                                            \
    static void name##_body(__VA_ARGS__)
#define SHARED(type, name)                  \
    using name##_array = type;              \
    static const char name##_declaration{}; \
    auto& name =                            \
        *static_cast<name##_array*>(shim::shared_array(&name##_declaration, sizeof(name##_array)))
#define DYNAMIC_SHARED(name) float* const name = reinterpret_cast<float*>(shim::block.dynamic.data())

#define SHIM_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(SHIM_SITE) { shim::wait_for_block({"__syncthreads", file, line}); }

inline void __syncwarp(u32 mask = 0xffffffffu, SHIM_SITE) {
    if (mask != 0xffffffffu) shim::fail("__syncwarp", "not all lanes are in its mask", file, line);
    shim::wait_for_warp({"__syncwarp", file, line}, [] {});
}

template <class T>
T __shfl_sync(u32 mask, T value, int source, SHIM_SITE) {
    const auto from = [&](u32) { return u32(source) % 32; };
    return shim::shuffle(value, mask, {"__shfl_sync", file, line}, from);
}

template <class T>
T __shfl_xor_sync(u32 mask, T value, int with, SHIM_SITE) {
    const auto from = [&](u32 lane) { return (lane ^ u32(with)) % 32; };
    return shim::shuffle(value, mask, {"__shfl_xor_sync", file, line}, from);
}

// Lanes without a source keep their own value.
template <class T>
T __shfl_down_sync(u32 mask, T value, u32 by, SHIM_SITE) {
    const auto from = [&](u32 lane) { return lane + by < 32 ? lane + by : lane; };
    return shim::shuffle(value, mask, {"__shfl_down_sync", file, line}, from);
}

template <class T>
T __shfl_up_sync(u32 mask, T value, u32 by, SHIM_SITE) {
    const auto from = [&](u32 lane) { return lane >= by ? lane - by : lane; };
    return shim::shuffle(value, mask, {"__shfl_up_sync", file, line}, from);
}

inline float __uint_as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline u32 __float_as_uint(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}

inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
