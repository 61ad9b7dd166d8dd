// Definitions that every kernel uses: element formats, macros for kernels and shared memory, and
// vectorised memory access. No CUDA header is included, so that NVRTC alone compiles the kernels.
//
// With NARROWS_SHIM a C++ compiler compiles the same sources to run on the CPU (../shim/shim.h).
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#ifdef NARROWS_SHIM
#include "shim.h"
#else
// Declares a kernel under the name by which launch/ refers to it. Registers are limited so that `blocks`
// blocks of `threads` threads fit on a multiprocessor.
#define KERNEL(threads, blocks, name, ...) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__)
// A statically sized array in shared memory: `SHARED(float[32], parts);`.
#define SHARED(type, name)     \
    using name##_array = type; \
    __shared__ __align__(16) name##_array name
// The dynamic shared memory of the block; the launch sets its size.
#define DYNAMIC_SHARED(name)                             \
    extern __shared__ float4 narrows_dynamic_shared[];   \
    float* const name = reinterpret_cast<float*>(narrows_dynamic_shared)
#endif

#define DEVICE __device__ __forceinline__

// bfloat16: the upper half of an f32.
struct bf16 {
    u16 bits;
};

DEVICE float widen(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
DEVICE float widen(float x) { return x; }

#ifdef NARROWS_SHIM
using shim::round_to_bf16;
#else
// Rounds to nearest, ties to even.
DEVICE u16 round_to_bf16(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#endif

template <class T>
DEVICE T narrow(float x);
template <>
DEVICE float narrow<float>(float x) {
    return x;
}
template <>
DEVICE bf16 narrow<bf16>(float x) {
    return bf16{round_to_bf16(x)};
}

// The integer type that one memory access of BYTES bytes moves.
template <int BYTES>
struct Word;
template <>
struct Word<2> {
    using type = u16;
};
template <>
struct Word<4> {
    using type = u32;
};
template <>
struct Word<8> {
    using type = uint2;
};
template <>
struct Word<16> {
    using type = uint4;
};

template <class T, int COUNT>
union Packed {
    typename Word<sizeof(T) * COUNT>::type word;
    T of[COUNT];
};

// Loads COUNT elements as f32. `from` is aligned to min(COUNT·sizeof(T), 16) bytes.
template <class T, int COUNT>
DEVICE void load(const T* from, float (&to)[COUNT]) {
    constexpr int each = sizeof(T) * COUNT > 16 ? 16 / sizeof(T) : COUNT;
    using Piece = Packed<T, each>;
#pragma unroll
    for (int first = 0; first < COUNT; first += each) {
        Piece piece;
        piece.word = *reinterpret_cast<const decltype(Piece::word)*>(from + first);
#pragma unroll
        for (int i = 0; i < each; i++) to[first + i] = widen(piece.of[i]);
    }
}

// Stores COUNT f32 values as T, with the alignment of `load`.
template <class T, int COUNT>
DEVICE void store(T* to, const float (&from)[COUNT]) {
    constexpr int each = sizeof(T) * COUNT > 16 ? 16 / sizeof(T) : COUNT;
    using Piece = Packed<T, each>;
#pragma unroll
    for (int first = 0; first < COUNT; first += each) {
        Piece piece;
#pragma unroll
        for (int i = 0; i < each; i++) piece.of[i] = narrow<T>(from[first + i]);
        *reinterpret_cast<decltype(Piece::word)*>(to + first) = piece.word;
    }
}

// Copies COUNT elements unchanged.
template <class T, int COUNT>
DEVICE void copy(const T* from, T* to) {
    using Piece = typename Word<sizeof(T) * COUNT>::type;
    *reinterpret_cast<Piece*>(to) = *reinterpret_cast<const Piece*>(from);
}

template <int COUNT>
struct Count {
    static constexpr int value = COUNT;
};

// Calls `body(Count<V>, column)` for this lane's vectors of a row, then `body(Count<1>, column)` for its
// elements of the tail where V does not divide `columns`. A lane visits the same columns in every call.
template <int V, class Body>
DEVICE void each(u32 columns, u32 lane, u32 lanes, Body body) {
    const u32 whole = columns / V * V;
    for (u32 column = lane * V; column < whole; column += lanes * V) body(Count<V>(), column);
    if constexpr (V > 1) {
        for (u32 column = whole + lane; column < columns; column += lanes) body(Count<1>(), column);
    }
}

// The number of a thread among those that share an array, and how many these are.
struct Team {
    u64 thread, threads;
};

// Calls `body` for this thread's vectors and tail elements of a flat array that a team shares; `elements` may exceed 32
// bits.
template <int V, class Body>
DEVICE void each_element(u64 elements, Team team, Body body) {
    const u64 vectors = elements / V;
    for (u64 at = team.thread; at < vectors; at += team.threads) body(Count<V>(), at * V);
    if constexpr (V > 1) {
        for (u64 at = vectors * V + team.thread; at < elements; at += team.threads) body(Count<1>(), at);
    }
}

// As above, with all threads of the grid.
template <int V, class Body>
DEVICE void each_element(u64 elements, Body body) {
    const Team grid = {u64(blockIdx.x) * blockDim.x + threadIdx.x, u64(gridDim.x) * blockDim.x};
    each_element<V>(elements, grid, body);
}

// to[i] = from[i], rounded to nearest even where it is narrower.
template <class From, class To, int V>
DEVICE void cast_elements(const From* from, To* to, u64 elements) {
    each_element<V>(elements, [&](auto count, u64 at) {
        float values[decltype(count)::value];
        load(from + at, values);
        store(to + at, values);
    });
}

// The row that a thread works on. A block is (lanes per row, rows). Threads beyond the last row have
// `live` false and must not return before the last barrier.
struct RowTeam {
    u64 row;
    bool live;
    u32 lane, lanes;
};

DEVICE RowTeam row_team(u32 rows) {
    const u64 row = u64(blockIdx.x) * blockDim.y + threadIdx.y;
    return {row, row < rows, threadIdx.x, blockDim.x};
}

// Instantiates `call(format, vector width, name suffix)` for every format.
#define EACH_FORMAT(call)   \
    call(bf16, 8, bf16_v8)  \
    call(bf16, 1, bf16_v1)  \
    call(float, 4, f32_v4)  \
    call(float, 1, f32_v1)
