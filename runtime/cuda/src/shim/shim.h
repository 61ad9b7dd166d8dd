// Runs kernels on a processor: as much of CUDA C++ as our sources use.
//
// The threads of a block are fibers, which give way only at barriers. A warp's exchanges (shuffles,
// mma, ldmatrix) are barriers of the warp. Blocks run one after the other. What no test on a GPU
// reports is an error here: threads that wait at different barriers, a thread that ended while
// others wait for it, lanes left out of a mask, arguments that are not those the kernel declares.
// Shared memory holds NaNs when a block begins. Fibers and blocks run in either order, one always
// as far as it can before the next: a kernel that lacks a barrier, or whose blocks depend on each
// other, differs between the two.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include "fiber.h"

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__ __restrict

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

// What a caller hands over; tests/cuda/shim.rs has the same.
struct Launch {
    u32 grid[3], block[3];
    u32 shared_bytes;
    // 1 runs blocks and threads from the last to the first.
    u32 descending;
    // Without any, nothing runs: `error` is the most threads of a block, and the kinds it takes.
    void** arguments;
    // For each argument p (pointer), u (32 bits), l (64 bits) or f (float). Null where the caller
    // has them from the kernel.
    const char* kinds;
    char* error;
    u32 error_bytes;
};

enum class State { ready, at_block_barrier, at_warp_barrier, done };

// Where a thread waits, and in what.
struct Barrier {
    const char* what;
    const char* file;
    int line;
    bool operator==(const Barrier& other) const {
        return line == other.line && same(what, other.what) && same(file, other.file);
    }
    static bool same(const char* a, const char* b) { return a == b || !strcmp(a, b); }
};

// A copy that was begun and not yet waited for.
struct Copy {
    void* to;
    unsigned char of[16];
};

struct Thread {
    Fiber fiber;
    State state;
    Index3 index;
    u32 number;
    Barrier barrier;
    // Exchanges of the warp so far: two in a row use different slots.
    u32 exchanges;
    std::vector<Copy> copies;
    std::deque<std::vector<Copy>> groups;
};

constexpr u32 SLOT = 64;
struct Warp {
    alignas(16) unsigned char slots[2][32][SLOT];
};

struct Block {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    Fiber scheduler;
    Thread* current = nullptr;
    std::vector<uint4> dynamic;
    // Arrays of the block, by their declaration.
    std::vector<std::pair<const void*, std::vector<uint4>>> arrays;
    bool failed = false;
    // Whether the running thread let others of its warp go.
    bool warp_released = false;
    char error[512];
    void (*body)(void*) = nullptr;
    void* of = nullptr;
};
static Block block;

inline void give_way() { switch_fiber(block.current->fiber, block.scheduler); }

[[noreturn]] inline void fail(const char* what, const char* why, const char* file, int line) {
    snprintf(block.error, sizeof block.error, "%s at %s:%d in thread %u of block %u,%u,%u: %s",
             what, file, line, block.current->number, blockIdx.x, blockIdx.y, blockIdx.z, why);
    block.failed = true;
    give_way();
    abort();
}

inline __attribute__((noinline)) void wait_for_block(Barrier at) {
    block.current->state = State::at_block_barrier;
    block.current->barrier = at;
    give_way();
}

// Waits until all lanes of the warp are here. The last to arrive lets the others go.
inline __attribute__((noinline)) void wait_for_warp(Barrier at) {
    Thread& me = *block.current;
    me.state = State::at_warp_barrier;
    me.barrier = at;
    Thread* first = &block.threads[me.number / 32 * 32];
    for (u32 lane = 0; lane < 32; lane++) {
        if (first[lane].state != State::at_warp_barrier || !(first[lane].barrier == at)) {
            give_way();
            return;
        }
    }
    for (u32 lane = 0; lane < 32; lane++) first[lane].state = State::ready;
    block.warp_released = true;
}

// Every lane's value, in the order of lanes, `SLOT` bytes apart.
template <class T>
const unsigned char* exchange(const T& mine, u32 mask, Barrier at) {
    static_assert(sizeof(T) <= SLOT, "a lane exchanges at most a slot");
    if (mask != 0xffffffffu) fail(at.what, "not all lanes are in its mask", at.file, at.line);
    Thread& me = *block.current;
    auto& slots = block.warps[me.number / 32].slots[me.exchanges++ % 2];
    memcpy(slots[me.number % 32], &mine, sizeof(T));
    wait_for_warp(at);
    return slots[0];
}

template <class T>
T lane_of(const unsigned char* slots, u32 lane) {
    T value;
    memcpy(&value, slots + lane * SLOT, sizeof(T));
    return value;
}

// Memory of the block for one declaration, full of NaNs when the block begins.
inline void* shared_array(const void* declaration, size_t bytes) {
    for (auto& [key, memory] : block.arrays) {
        if (key == declaration) return memory.data();
    }
    std::vector<uint4> memory((bytes + 15) / 16, uint4{~0u, ~0u, ~0u, ~0u});
    block.arrays.emplace_back(declaration, std::move(memory));
    return block.arrays.back().second.data();
}

// To the nearest, ties to even.
inline u16 round_to_bf16(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    if (x != x) return u16(bits >> 16 | 0x40);
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void describe_stop() {
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
    const Barrier& at = waiting->barrier;
    const int written =
        snprintf(block.error, sizeof block.error,
                 "block %u,%u,%u stops: thread %u waits in %s at %s:%d, and thread %u ", blockIdx.x,
                 blockIdx.y, blockIdx.z, waiting->number, at.what, at.file, at.line, other->number);
    char* rest = block.error + written;
    const size_t room = sizeof block.error - written;
    if (other->state == State::done) {
        snprintf(rest, room, "has ended");
    } else {
        snprintf(rest, room, "waits in %s at %s:%d", other->barrier.what, other->barrier.file,
                 other->barrier.line);
    }
    block.failed = true;
}

inline void begin_thread() {
    block.body(block.of);
    block.current->state = State::done;
    give_way();
}

// All threads of a block, until they end or none can go on.
inline void run_block(bool descending) {
    const u32 count = u32(block.threads.size());
    block.arrays.clear();
    std::fill(block.dynamic.begin(), block.dynamic.end(), uint4{~0u, ~0u, ~0u, ~0u});
    for (Thread& thread : block.threads) {
        thread.state = State::ready;
        thread.exchanges = 0;
        thread.copies.clear();
        thread.groups.clear();
        start_fiber(thread.fiber, begin_thread);
    }
    for (;;) {
        u32 done = 0, waiting = 0;
        // The first thread that can go on always does, as far as it can: what others have not read
        // yet it may overwrite, what they have not written yet it may read.
        for (u32 at = 0; at < count;) {
            Thread& thread = block.threads[descending ? count - 1 - at : at];
            if (thread.state != State::ready) {
                at++;
                continue;
            }
            block.current = &thread;
            block.warp_released = false;
            threadIdx = thread.index;
            switch_fiber(block.scheduler, thread.fiber);
            if (block.failed) return;
            if (block.warp_released) at = at / 32 * 32;
        }
        const Barrier& first = block.threads[0].barrier;
        for (Thread& thread : block.threads) {
            done += thread.state == State::done;
            waiting += thread.state == State::at_block_barrier && thread.barrier == first;
        }
        if (done == count) return;
        if (waiting != count) return describe_stop();
        for (Thread& thread : block.threads) thread.state = State::ready;
    }
}

template <class T>
constexpr char kind_of() {
    if (std::is_pointer_v<T>) return 'p';
    if (std::is_same_v<T, float>) return 'f';
    return sizeof(T) == 8 ? 'l' : 'u';
}

template <class... Arguments, size_t... AT>
int run(void (*kernel)(Arguments...), const Launch* launch, u32 threads_max,
        std::index_sequence<AT...>) {
    const auto refuse = [&](const char* why) {
        snprintf(launch->error, launch->error_bytes, "%s", why);
        return 1;
    };
    const char declared[] = {kind_of<Arguments>()..., 0};
    char why[256];
    if (!launch->arguments) {
        snprintf(launch->error, launch->error_bytes, "%u %s", threads_max, declared);
        return 0;
    }
    if (launch->kinds && strcmp(declared, launch->kinds)) {
        snprintf(why, sizeof why, "the kernel takes %s, it is given %s", declared, launch->kinds);
        return refuse(why);
    }
    blockDim = {launch->block[0], launch->block[1], launch->block[2]};
    gridDim = {launch->grid[0], launch->grid[1], launch->grid[2]};
    const u32 count = blockDim.x * blockDim.y * blockDim.z;
    if (count == 0 || count % 32 || count > 1024) return refuse("a block is 1 to 32 whole warps");
    if (count > threads_max) {
        snprintf(why, sizeof why, "a block has %u threads, it is compiled for %u", count, threads_max);
        return refuse(why);
    }
    block.threads.resize(count);
    block.warps.resize(count / 32);
    block.dynamic.resize((launch->shared_bytes + 15) / 16);
    block.failed = false;
    for (u32 at = 0; at < count; at++) {
        const u32 x = at % blockDim.x, y = at / blockDim.x % blockDim.y;
        block.threads[at].number = at;
        block.threads[at].index = {x, y, at / blockDim.x / blockDim.y};
    }
    auto call = [&] { kernel(*static_cast<Arguments*>(launch->arguments[AT])...); };
    block.body = [](void* of) { (*static_cast<decltype(call)*>(of))(); };
    block.of = &call;
    const u64 blocks = u64(gridDim.x) * gridDim.y * gridDim.z;
    for (u64 at = 0; at < blocks && !block.failed; at++) {
        const u64 number = launch->descending ? blocks - 1 - at : at;
        blockIdx = {u32(number % gridDim.x), u32(number / gridDim.x % gridDim.y),
                    u32(number / gridDim.x / gridDim.y)};
        run_block(launch->descending);
    }
    return block.failed ? refuse(block.error) : 0;
}

template <class... Arguments>
int run(void (*kernel)(Arguments...), const Launch* launch, u32 threads_max) {
    return run(kernel, launch, threads_max, std::index_sequence_for<Arguments...>());
}

}  // namespace shim

#define KERNEL(threads, blocks, name, ...)                \
    static void name##_body(__VA_ARGS__);                 \
    extern "C" int name(const shim::Launch* launch) {     \
        return shim::run(name##_body, launch, (threads)); \
    }                                                     \
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
    shim::wait_for_warp({"__syncwarp", file, line});
}

template <class T>
T __shfl_sync(u32 mask, T value, int lane, SHIM_SITE) {
    const auto slots = shim::exchange(value, mask, {"__shfl_sync", file, line});
    return shim::lane_of<T>(slots, u32(lane) % 32);
}

template <class T>
T __shfl_xor_sync(u32 mask, T value, int with, SHIM_SITE) {
    const u32 me = shim::block.current->number % 32;
    const auto slots = shim::exchange(value, mask, {"__shfl_xor_sync", file, line});
    return shim::lane_of<T>(slots, (me ^ u32(with)) % 32);
}

// Lanes without a source keep their own value.
template <class T>
T __shfl_down_sync(u32 mask, T value, u32 by, SHIM_SITE) {
    const u32 me = shim::block.current->number % 32;
    const auto slots = shim::exchange(value, mask, {"__shfl_down_sync", file, line});
    return shim::lane_of<T>(slots, me + by < 32 ? me + by : me);
}

template <class T>
T __shfl_up_sync(u32 mask, T value, u32 by, SHIM_SITE) {
    const u32 me = shim::block.current->number % 32;
    const auto slots = shim::exchange(value, mask, {"__shfl_up_sync", file, line});
    return shim::lane_of<T>(slots, me >= by ? me - by : me);
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
