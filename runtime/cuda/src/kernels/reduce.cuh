// Reductions over the lanes of a warp and of a row, in an order that the block's shape alone decides.
#pragma once
#include "device.cuh"

constexpr u32 EVERY_LANE = 0xffffffffu;

struct Sum {
    static DEVICE float of(float a, float b) { return a + b; }
    static DEVICE float nothing() { return 0.0f; }
};

// NaNs are passed over.
struct Larger {
    static DEVICE float of(float a, float b) { return fmaxf(a, b); }
    static DEVICE float nothing() { return __uint_as_float(0xff800000u); }  // −∞
};

// Every lane of the warp gets the result, and all get the same bits.
template <class Reduction>
DEVICE float over_warp(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x = Reduction::of(x, __shfl_xor_sync(EVERY_LANE, x, distance));
    }
    return x;
}

// Every lane of a row gets the result. All threads of the block call it, also those without a row.
// A block has at most 32 warps.
template <class Reduction>
DEVICE float over_row(float x) {
    x = over_warp<Reduction>(x);
    if (blockDim.x == 32) return x;
    SHARED(float[32], warp_results);
    const u32 warps = blockDim.x / 32, first = threadIdx.y * warps;
    __syncthreads();  // What is there may still be read.
    if (threadIdx.x % 32 == 0) warp_results[first + threadIdx.x / 32] = x;
    __syncthreads();
    float all = Reduction::nothing();
    for (u32 warp = 0; warp < warps; warp++) all = Reduction::of(all, warp_results[first + warp]);
    return all;
}

// 1/rms of a row of which the sum of squares is known.
DEVICE float inverse_rms(float s, float width, float epsilon) {
    return 1.0f / sqrtf(s / width + epsilon);
}

// The sum over all threads of a block of one dimension, in f64; thread 0 gets it. Each thread's
// numbers are summed first, then the threads' in halves.
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
