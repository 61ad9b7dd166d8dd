// Attention in plain f32 sums, forward and backward: for f32, of which the tensor cores have no
// products, and for bf16 heads that are not made of pieces of 16 bytes. T is the format in memory, V
// how many numbers are accessed at a time; tiles are f32, W features wide, with zeros after those that
// a head has. A block has 16 rows, four a warp, and goes over tiles of 32 others, one a lane: a lane
// makes its other's product with each row, the warp softens them, and then each lane sums some
// features of all others. Backward goes twice, as in attention.cu.
#pragma once
#include "attention.cuh"

template <class T, int V, int W>
struct Plain {
    static constexpr u32 OF_WARP = 4, OF_BLOCK = 16, OTHERS = 32;
    // Numbers from a row of a tile to the next: lanes read rows in vectors, from different banks.
    static constexpr u32 PITCH = W + 4;
    // Features of a lane.
    static constexpr u32 EACH = W / 32;
    using Sums = float[OF_WARP][EACH];

    u32 length, width;
    float scale;

    // Shared memory of the block: two matrices' rows, two tiles of others, and each warp's weights.
    struct Memory {
        float *rows, *others, *weights;
    };

    static DEVICE Memory memory_of(float* memory) {
        float* const others = memory + 2 * OF_BLOCK * PITCH;
        return {memory, others, others + 2 * OTHERS * PITCH + threadIdx.x / 32 * OF_WARP * OTHERS};
    }

    // Rows `first` to `first + COUNT` of a matrix, zeros from row `length` on.
    template <u32 COUNT>
    DEVICE void copy_tile(float* tile, const T* from, u32 stride, u32 first) const {
        constexpr u32 PIECES = W / V;
        for (u32 at = threadIdx.x; at < COUNT * PIECES; at += THREADS) {
            const u32 row = at / PIECES, piece = at % PIECES * V;
            float values[V] = {};
            if (first + row < length && piece < width) {
                load(from + u64(first + row) * stride + piece, values);
            }
            store(tile + row * PITCH + piece, values);
        }
    }

    // Of this warp's rows with this lane's other.
    static DEVICE void multiply(float (&x)[OF_WARP], const float* rows, const float* others) {
        rows += threadIdx.x / 32 * OF_WARP * PITCH;
        others += threadIdx.x % 32 * PITCH;
#pragma unroll
        for (u32 r = 0; r < OF_WARP; r++) x[r] = 0.0f;
#pragma unroll 4
        for (u32 at = 0; at < u32(W); at += 4) {
            float a[4], b[4];
            load(others + at, b);
#pragma unroll
            for (u32 r = 0; r < OF_WARP; r++) {
                load(rows + r * PITCH + at, a);
#pragma unroll
                for (int i = 0; i < 4; i++) x[r] += a[i] * b[i];
            }
        }
    }

    // sums += weights·others, of this warp's rows; `mine` are the weights of this lane's other.
    static DEVICE void add(Sums& sums, const float (&mine)[OF_WARP], float* weights,
                           const float* others) {
        const u32 lane = threadIdx.x % 32;
        __syncwarp();  // What is there may still be read.
#pragma unroll
        for (u32 r = 0; r < OF_WARP; r++) weights[r * OTHERS + lane] = mine[r];
        __syncwarp();
#pragma unroll 4
        for (u32 other = 0; other < OTHERS; other++) {
            float x[EACH];
            load(others + other * PITCH + lane * EACH, x);
#pragma unroll
            for (u32 r = 0; r < OF_WARP; r++) {
#pragma unroll
                for (u32 i = 0; i < EACH; i++) sums[r][i] += weights[r * OTHERS + other] * x[i];
            }
        }
    }

    DEVICE void store_sums(T* to, u32 stride, u32 first, const Sums& sums,
                           const float (&scales)[OF_WARP]) const {
        constexpr u32 AT_ONCE = V < int(EACH) ? V : EACH;
        const u32 lane = threadIdx.x % 32, row = first + threadIdx.x / 32 * OF_WARP;
#pragma unroll
        for (u32 r = 0; r < OF_WARP; r++) {
#pragma unroll
            for (u32 begin = 0; begin < EACH; begin += AT_ONCE) {
                const u32 column = lane * EACH + begin;
                float made[AT_ONCE];
#pragma unroll
                for (u32 i = 0; i < AT_ONCE; i++) made[i] = sums[r][begin + i] * scales[r];
                if (row + r < length && column < width) {
                    store(to + u64(row + r) * stride + column, made);
                }
            }
        }
    }

    DEVICE void forward(const T* q, Pair<T> kv, T* out, float* lse, u32 q_stride,
                        u32 out_stride, u32 heads) const {
        DYNAMIC_SHARED(memory);
        const Memory at = memory_of(memory);
        const u32 first = (gridDim.x - 1 - blockIdx.x) * OF_BLOCK;
        const u32 lane = threadIdx.x % 32, row = first + threadIdx.x / 32 * OF_WARP;
        copy_tile<OF_BLOCK>(at.rows, q, q_stride, first);
        const float factor = scale * LOG2_E;
        Sums sums = {};
        float maxima[OF_WARP], totals[OF_WARP] = {};
#pragma unroll
        for (u32 r = 0; r < OF_WARP; r++) maxima[r] = minus_infinity();
        for (u32 key = 0; key < min(first + OF_BLOCK, length); key += OTHERS) {
            __syncthreads();
            copy_both(at.others, kv, key);
            __syncthreads();
            float p[OF_WARP];
            multiply(p, at.rows, at.others);
#pragma unroll
            for (u32 r = 0; r < OF_WARP; r++) {
                if (key + lane > row + r) p[r] = minus_infinity();
                // A row's first tile has a key that it sees.
                const float maximum = fmaxf(maxima[r], over_warp<Larger>(p[r]));
                const float shrink = power_of_two((maxima[r] - maximum) * factor);
                p[r] = power_of_two((p[r] - maximum) * factor);
                totals[r] = totals[r] * shrink + p[r];
                maxima[r] = maximum;
#pragma unroll
                for (u32 i = 0; i < EACH; i++) sums[r][i] *= shrink;
            }
            add(sums, p, at.weights, at.others + OTHERS * PITCH);
        }
        float inverse[OF_WARP];
#pragma unroll
        for (u32 r = 0; r < OF_WARP; r++) {
            const float total = over_warp<Sum>(totals[r]);
            inverse[r] = 1.0f / total;
            if (lane == 0 && row + r < length) {
                lse[u64(row + r) * heads] = maxima[r] * scale + logf(total);
            }
        }
        store_sums(out, out_stride, first, sums, inverse);
    }

    DEVICE void copy_both(float* tiles, Pair<T> others, u32 first) const {
        copy_tile<OTHERS>(tiles, others.first, others.first_stride, first);
        copy_tile<OTHERS>(tiles + OTHERS * PITCH, others.second, others.second_stride, first);
    }

    DEVICE void copy_rows(float* tiles, Pair<T> rows, u32 first) const {
        copy_tile<OF_BLOCK>(tiles, rows.first, rows.first_stride, first);
        copy_tile<OF_BLOCK>(tiles + OF_BLOCK * PITCH, rows.second, rows.second_stride, first);
    }

    DEVICE void queries(Pair<T> rows, Pair<T> others, const float* statistics, T* dq, u32 stride) const {
        DYNAMIC_SHARED(memory);
        const Memory at = memory_of(memory);
        const u32 first = (gridDim.x - 1 - blockIdx.x) * OF_BLOCK;
        const u32 lane = threadIdx.x % 32, row = first + threadIdx.x / 32 * OF_WARP;
        copy_rows(at.rows, rows, first);
        Sums sums = {};
        for (u32 key = 0; key < min(first + OF_BLOCK, length); key += OTHERS) {
            __syncthreads();
            copy_both(at.others, others, key);
            __syncthreads();
            float x[OF_WARP], y[OF_WARP];
            multiply(x, at.rows, at.others);
            multiply(y, at.rows + OF_BLOCK * PITCH, at.others + OTHERS * PITCH);
#pragma unroll
            for (u32 r = 0; r < OF_WARP; r++) {
                float both[2];
                load(statistics + u64(row + r) * 2, both);
                const float p = power_of_two(x[r] * (scale * LOG2_E) - both[0]);
                y[r] = key + lane > row + r ? 0.0f : p * (y[r] - both[1]);
            }
            add(sums, y, at.weights, at.others);
        }
        const float scales[OF_WARP] = {scale, scale, scale, scale};
        store_sums(dq, stride, first, sums, scales);
    }

    DEVICE void keys(Pair<T> rows, Pair<T> others, const float* statistics, u32 padded,
                     u32 group, T* dk, T* dv) const {
        DYNAMIC_SHARED(memory);
        const Memory at = memory_of(memory);
        const u32 first = blockIdx.x * OF_BLOCK;
        const u32 lane = threadIdx.x % 32, row = first + threadIdx.x / 32 * OF_WARP;
        if (group) copy_rows(at.rows, rows, first);
        Sums of_k = {}, of_v = {};
        for (u32 head = 0; head < group; head++) {
            for (u32 query = first / OTHERS * OTHERS; query < length; query += OTHERS) {
                __syncthreads();
                copy_both(at.others, others.further(head * width), query);
                __syncthreads();
                float both[2];
                load(statistics + (u64(head) * padded + query + lane) * 2, both);
                float x[OF_WARP], y[OF_WARP];
                multiply(x, at.rows, at.others);
                multiply(y, at.rows + OF_BLOCK * PITCH, at.others + OTHERS * PITCH);
#pragma unroll
                for (u32 r = 0; r < OF_WARP; r++) {
                    const float p = power_of_two(x[r] * (scale * LOG2_E) - both[0]);
                    x[r] = row + r > query + lane ? 0.0f : p;
                    y[r] = x[r] * (y[r] - both[1]);
                }
                add(of_v, x, at.weights, at.others + OTHERS * PITCH);
                add(of_k, y, at.weights, at.others);
            }
        }
        const float scales[OF_WARP] = {scale, scale, scale, scale};
        const float ones[OF_WARP] = {1.0f, 1.0f, 1.0f, 1.0f};
        dk = results_of_block(dk, rows.first_stride, length, width);
        dv = results_of_block(dv, rows.second_stride, length, width);
        store_sums(dk, rows.first_stride, first, of_k, scales);
        store_sums(dv, rows.second_stride, first, of_v, ones);
    }
};
