// Attention with f32 FMAs instead of tensor cores, forward and backward: for f32, for bf16 heads that
// are not a multiple of 16 bytes or are wider than 128 features, and for bf16 queries of some positions
// that are no whole tiles. T is the format in memory, V the vector width of memory accesses; tiles are f32,
// W features wide, padded with zeros. A block has 16 rows, four per warp, and loops over tiles of 32 inner rows, one per lane. Inner rows are keys and values in the forward
// pass and for dq, and queries for dk and dv. A lane computes the dot products of its inner row with each row of
// the warp, the warp applies the softmax, and then each lane sums W/32 features over all inner rows. The
// backward pass computes the probabilities twice, as in attention_backward.cuh.
#pragma once
#include "attention.cuh"

template <class T, int V, int W>
struct ScalarAttention {
    static constexpr u32 WARP_ROWS = 4, BLOCK_ROWS = 16, INNER_ROWS = 32;
    // Elements from one row of a tile to the next: padded so that lanes reading rows hit different banks.
    static constexpr u32 PITCH = W + 4;
    // Features that one lane sums.
    static constexpr u32 LANE_FEATURES = W / 32;
    using Sums = float[WARP_ROWS][LANE_FEATURES];

    u32 length, keys, key_rows, window, width, first_query;
    QueryRuns queries;
    float scale;

    // Shared memory of the block: rows of two matrices, tiles of two inner matrices, and weights of each warp.
    struct Memory {
        float *rows, *inner, *weights;
    };

    static DEVICE Memory memory_of(float* memory) {
        float* const inner = memory + 2 * BLOCK_ROWS * PITCH;
        return {memory, inner, inner + 2 * INNER_ROWS * PITCH + threadIdx.x / 32 * WARP_ROWS * INNER_ROWS};
    }

    // Copies rows `first` to `first + COUNT` of a matrix to a tile; rows from `end` on become zeros.
    template <u32 COUNT>
    DEVICE void copy_tile(float* tile, const T* from, u32 stride, u32 first, u32 end) const {
        constexpr u32 VECTORS = W / V;
        for (u32 at = threadIdx.x; at < COUNT * VECTORS; at += THREADS) {
            const u32 row = at / VECTORS, column = at % VECTORS * V;
            float values[V] = {};
            if (first + row < end && column < width) {
                load(from + u64(first + row) * stride + column, values);
            }
            store(tile + row * PITCH + column, values);
        }
    }

    // x[r]: the dot product of row r of this warp with the inner row of this lane.
    static DEVICE void multiply(float (&x)[WARP_ROWS], const float* rows, const float* inner) {
        rows += threadIdx.x / 32 * WARP_ROWS * PITCH;
        inner += threadIdx.x % 32 * PITCH;
#pragma unroll
        for (u32 r = 0; r < WARP_ROWS; r++) x[r] = 0.0f;
#pragma unroll 4
        for (u32 at = 0; at < u32(W); at += 4) {
            float a[4], b[4];
            load(inner + at, b);
#pragma unroll
            for (u32 r = 0; r < WARP_ROWS; r++) {
                load(rows + r * PITCH + at, a);
#pragma unroll
                for (int i = 0; i < 4; i++) x[r] += a[i] * b[i];
            }
        }
    }

    // sums += weights·inner for the rows of this warp; `lane_weights` are the weights of this lane's inner row.
    static DEVICE void accumulate(Sums& sums, const float (&lane_weights)[WARP_ROWS], float* weights,
                           const float* inner) {
        const u32 lane = threadIdx.x % 32;
        __syncwarp();  // Other lanes may still be reading the previous weights.
#pragma unroll
        for (u32 r = 0; r < WARP_ROWS; r++) weights[r * INNER_ROWS + lane] = lane_weights[r];
        __syncwarp();
#pragma unroll 4
        for (u32 inner_row = 0; inner_row < INNER_ROWS; inner_row++) {
            float x[LANE_FEATURES];
            load(inner + inner_row * PITCH + lane * LANE_FEATURES, x);
#pragma unroll
            for (u32 r = 0; r < WARP_ROWS; r++) {
#pragma unroll
                for (u32 i = 0; i < LANE_FEATURES; i++) sums[r][i] += weights[r * INNER_ROWS + inner_row] * x[i];
            }
        }
    }

    DEVICE void store_sums(T* to, u32 stride, u32 first, const Sums& sums,
                           const float (&scales)[WARP_ROWS]) const {
        constexpr u32 VECTOR = V < int(LANE_FEATURES) ? V : LANE_FEATURES;
        const u32 lane = threadIdx.x % 32, row = first + threadIdx.x / 32 * WARP_ROWS;
#pragma unroll
        for (u32 r = 0; r < WARP_ROWS; r++) {
#pragma unroll
            for (u32 begin = 0; begin < LANE_FEATURES; begin += VECTOR) {
                const u32 column = lane * LANE_FEATURES + begin;
                float scaled[VECTOR];
#pragma unroll
                for (u32 i = 0; i < VECTOR; i++) scaled[i] = sums[r][begin + i] * scales[r];
                if (row + r < length && column < width) {
                    store(to + u64(row + r) * stride + column, scaled);
                }
            }
        }
    }

    // First of the tiles of keys with one that a block's queries attend to.
    DEVICE u32 first_key(u32 first_query) const {
        return first_query < window ? 0 : (first_query + 1 - window) / INNER_ROWS * INNER_ROWS;
    }

    // End of the keys that the queries of a block attend to.
    DEVICE u32 key_end(u32 first_query) const {
        return min(min(first_query + BLOCK_ROWS, length), keys);
    }

    // A query after all keys sees what one at the last key does.
    DEVICE bool is_key_masked(u32 query, u32 key) const {
        return is_masked(min(query, keys - 1), key);
    }

    // Keys after the query are also at a distance of at least a window: it wraps around.
    DEVICE bool is_masked(u32 query, u32 key) const { return query - key >= window; }

    DEVICE void forward(const T* q, Pair<T> kv, T* out, float* lse, u32 q_stride,
                        u32 out_stride, u32 heads) const {
        DYNAMIC_SHARED(memory);
        const Memory at = memory_of(memory);
        const u32 first = first_query + (gridDim.x - 1 - blockIdx.x) * BLOCK_ROWS;
        const u32 lane = threadIdx.x % 32, row = first + threadIdx.x / 32 * WARP_ROWS;
        copy_tile<BLOCK_ROWS>(at.rows, q, q_stride, first, length);
        const float factor = scale * LOG2_E;
        Sums sums = {};
        float maxima[WARP_ROWS], totals[WARP_ROWS] = {};
#pragma unroll
        for (u32 r = 0; r < WARP_ROWS; r++) maxima[r] = minus_infinity();
        for (u32 key = first_key(first); key < key_end(first); key += INNER_ROWS) {
            __syncthreads();
            copy_inner(at.inner, kv, key, min(length, keys));
            __syncthreads();
            float p[WARP_ROWS];
            multiply(p, at.rows, at.inner);
#pragma unroll
            for (u32 r = 0; r < WARP_ROWS; r++) {
                if (is_key_masked(row + r, key + lane)) p[r] = MASKED;
                const float maximum = fmaxf(maxima[r], over_warp<Maximum>(p[r]));
                const float shrink = power_of_two((maxima[r] - maximum) * factor);
                p[r] = power_of_two((p[r] - maximum) * factor);
                totals[r] = totals[r] * shrink + p[r];
                maxima[r] = maximum;
#pragma unroll
                for (u32 i = 0; i < LANE_FEATURES; i++) sums[r][i] *= shrink;
            }
            accumulate(sums, p, at.weights, at.inner + INNER_ROWS * PITCH);
        }
        float inverse[WARP_ROWS];
#pragma unroll
        for (u32 r = 0; r < WARP_ROWS; r++) {
            const float total = over_warp<Sum>(totals[r]);
            inverse[r] = 1.0f / total;
            if (lane == 0 && row + r < length) {
                lse[u64(row + r) * heads] = maxima[r] * scale + logf(total);
            }
        }
        store_sums(out, out_stride, first, sums, inverse);
    }

    DEVICE void copy_inner(float* tiles, Pair<T> inner, u32 first, u32 end) const {
        copy_tile<INNER_ROWS>(tiles, inner.first, inner.first_stride, first, end);
        copy_tile<INNER_ROWS>(tiles + INNER_ROWS * PITCH, inner.second, inner.second_stride, first,
                              end);
    }

    DEVICE void copy_rows(float* tiles, Pair<T> rows, u32 first) const {
        copy_tile<BLOCK_ROWS>(tiles, rows.first, rows.first_stride, first, length);
        copy_tile<BLOCK_ROWS>(tiles + BLOCK_ROWS * PITCH, rows.second, rows.second_stride, first,
                              length);
    }

    DEVICE void query_gradients(Pair<T> rows, Pair<T> inner, const float* statistics, T* dq,
                                u32 stride) const {
        DYNAMIC_SHARED(memory);
        const Memory at = memory_of(memory);
        const u32 first = first_query + (gridDim.x - 1 - blockIdx.x) * BLOCK_ROWS;
        const u32 lane = threadIdx.x % 32, row = first + threadIdx.x / 32 * WARP_ROWS;
        copy_rows(at.rows, rows, first);
        Sums sums = {};
        for (u32 key = first_key(first); key < key_end(first); key += INNER_ROWS) {
            __syncthreads();
            copy_inner(at.inner, inner, key, min(length, keys));
            __syncthreads();
            float x[WARP_ROWS], y[WARP_ROWS];
            multiply(x, at.rows, at.inner);
            multiply(y, at.rows + BLOCK_ROWS * PITCH, at.inner + INNER_ROWS * PITCH);
#pragma unroll
            for (u32 r = 0; r < WARP_ROWS; r++) {
                float lse_and_d[2];
                load(statistics + u64(row + r) * 2, lse_and_d);
                const float p = power_of_two(x[r] * (scale * LOG2_E) - lse_and_d[0]);
                y[r] = is_key_masked(row + r, key + lane) ? 0.0f : p * (y[r] - lse_and_d[1]);
            }
            accumulate(sums, y, at.weights, at.inner);
        }
        const float scales[WARP_ROWS] = {scale, scale, scale, scale};
        store_sums(dq, stride, first, sums, scales);
    }

    DEVICE void key_value_gradients(Pair<T> rows, Pair<T> inner, const float* statistics,
                                    u32 padded, u32 group, T* dk, T* dv) const {
        DYNAMIC_SHARED(memory);
        const Memory at = memory_of(memory);
        const u32 first = blockIdx.x * BLOCK_ROWS;
        const u32 lane = threadIdx.x % 32, row = first + threadIdx.x / 32 * WARP_ROWS;
        if (group) copy_rows(at.rows, rows, first);
        Sums dk_sums = {}, dv_sums = {};
        const u32 begin = queries.rows_before(first) / INNER_ROWS * INNER_ROWS;
        // The last key of the block is visible to the queries before this one.
        const u32 end = queries.rows_before(first + BLOCK_ROWS - 1 + window);
        for (u32 head = 0; head < group; head++) {
            for (u32 query = begin; query < end; query += INNER_ROWS) {
                __syncthreads();
                copy_inner(at.inner, inner.advanced_by(head * width), query, queries.rows);
                __syncthreads();
                const u32 position = queries.position(query + lane);
                float lse_and_d[2];
                load(statistics + (u64(head) * padded + query + lane) * 2, lse_and_d);
                float x[WARP_ROWS], y[WARP_ROWS];
                multiply(x, at.rows, at.inner);
                multiply(y, at.rows + BLOCK_ROWS * PITCH, at.inner + INNER_ROWS * PITCH);
#pragma unroll
                for (u32 r = 0; r < WARP_ROWS; r++) {
                    const float p = power_of_two(x[r] * (scale * LOG2_E) - lse_and_d[0]);
                    x[r] = is_masked(position, row + r) ? 0.0f : p;
                    y[r] = x[r] * (y[r] - lse_and_d[1]);
                }
                accumulate(dv_sums, x, at.weights, at.inner + INNER_ROWS * PITCH);
                accumulate(dk_sums, y, at.weights, at.inner);
            }
        }
        const float scales[WARP_ROWS] = {scale, scale, scale, scale};
        const float ones[WARP_ROWS] = {1.0f, 1.0f, 1.0f, 1.0f};
        dk = results_of_block(dk, rows.first_stride, key_rows, width);
        dv = results_of_block(dv, rows.second_stride, key_rows, width);
        store_sums(dk, rows.first_stride, first, dk_sums, scales);
        store_sums(dv, rows.second_stride, first, dv_sums, ones);
    }
};
