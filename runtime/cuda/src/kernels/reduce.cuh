// Reductions over a warp, a row and a block. The order of additions depends on the block's shape alone.
#pragma once
#include "device.cuh"

constexpr u32 EVERY_LANE = 0xffffffffu;

struct Sum {
    static DEVICE float of(float a, float b) { return a + b; }
    static DEVICE float identity() { return 0.0f; }
};

// NaNs are ignored.
struct Maximum {
    static DEVICE float of(float a, float b) { return fmaxf(a, b); }
    static DEVICE float identity() { return __uint_as_float(0xff800000u); }  // −∞
};

// Every lane of the warp receives the same bits.
template <class Reduction>
DEVICE float over_warp(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x = Reduction::of(x, __shfl_xor_sync(EVERY_LANE, x, distance));
    }
    return x;
}

// Every lane of a row receives the result. All threads of the block must call this, including those
// without a row. A block has at most 32 warps.
template <class Reduction>
DEVICE float over_row(float x) {
    x = over_warp<Reduction>(x);
    if (blockDim.x == 32) return x;
    SHARED(float[32], warp_results);
    const u32 warps = blockDim.x / 32, first = threadIdx.y * warps;
    __syncthreads();  // The previous reduction may still be reading the array.
    if (threadIdx.x % 32 == 0) warp_results[first + threadIdx.x / 32] = x;
    __syncthreads();
    float all = Reduction::identity();
    for (u32 warp = 0; warp < warps; warp++) all = Reduction::of(all, warp_results[first + warp]);
    return all;
}

// 1/rms of a row with the sum of squares `s`.
DEVICE float inverse_rms(float s, float width, float epsilon) {
    return 1.0f / sqrtf(s / width + epsilon);
}

// Tree sum in f64 over all threads of a one-dimensional block of at most 256 threads, a power of two.
DEVICE double over_block(double x) {
    SHARED(double[256], of_threads);
    of_threads[threadIdx.x] = x;
    __syncthreads();
    for (u32 half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) of_threads[threadIdx.x] += of_threads[threadIdx.x + half];
        __syncthreads();
    }
    return of_threads[0];
}
