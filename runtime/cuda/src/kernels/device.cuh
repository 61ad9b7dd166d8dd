// What every kernel is written with: number formats, kernels and shared memory as macros, and
// memory access in vectors. No header of CUDA is needed, so NVRTC alone compiles the kernels.
//
// With NARROWS_SHIM the same sources are compiled by a C++ compiler and run on processors
// (../shim/shim.h).
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#ifdef NARROWS_SHIM
#include "shim.h"
#else
// A kernel by the name that the launch table calls it. The compiler may use as many registers as
// let `blocks` blocks of `threads` threads run on a multiprocessor.
#define KERNEL(threads, blocks, name, ...) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__)
// An array of the block, `SHARED(float[32], parts);`.
#define SHARED(type, name)     \
    using name##_array = type; \
    __shared__ __align__(16) name##_array name
// The memory of the block whose size the launch says.
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
// To the nearest, ties to even.
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

// What one access to memory moves.
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

// COUNT numbers from memory that is aligned to all of them, or to 16 bytes.
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

// COUNT numbers as they are.
template <class T, int COUNT>
DEVICE void copy(const T* from, T* to) {
    using Piece = typename Word<sizeof(T) * COUNT>::type;
    *reinterpret_cast<Piece*>(to) = *reinterpret_cast<const Piece*>(from);
}

template <int COUNT>
struct Count {
    static constexpr int value = COUNT;
};

// Calls `body(Count<V>, column)` for the vectors of a row that are this lane's, then
// `body(Count<1>, column)` for what is left where V does not divide the columns. A lane meets the
// same columns in every call.
template <int V, class Body>
DEVICE void each(u32 columns, u32 lane, u32 lanes, Body body) {
    const u32 whole = columns / V * V;
    for (u32 column = lane * V; column < whole; column += lanes * V) body(Count<V>(), column);
    if constexpr (V > 1) {
        for (u32 column = whole + lane; column < columns; column += lanes) body(Count<1>(), column);
    }
}

// The same over memory without rows, whose numbers may exceed 32 bits, for all threads of the grid.
template <int V, class Body>
DEVICE void each_of_all(u64 elements, Body body) {
    const u64 first = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    const u64 threads = u64(gridDim.x) * blockDim.x;
    const u64 vectors = elements / V;
    for (u64 at = first; at < vectors; at += threads) body(Count<V>(), at * V);
    if constexpr (V > 1) {
        for (u64 at = vectors * V + first; at < elements; at += threads) body(Count<1>(), at);
    }
}

// The row that a thread works on. A block is (lanes of a row, rows); all its threads stay until the
// end, since they meet at barriers, and `live` says whether there is such a row.
struct RowTeam {
    u64 row;
    bool live;
    u32 lane, lanes;
};

DEVICE RowTeam row_team(u32 rows) {
    const u64 row = u64(blockIdx.x) * blockDim.y + threadIdx.y;
    return {row, row < rows, threadIdx.x, blockDim.x};
}

// All numbers a macro is called for: a name's ending, the format, and how many in a vector.
#define EACH_FORMAT(call)   \
    call(bf16, 8, bf16_v8)  \
    call(bf16, 1, bf16_v1)  \
    call(float, 4, f32_v4)  \
    call(float, 1, f32_v1)
