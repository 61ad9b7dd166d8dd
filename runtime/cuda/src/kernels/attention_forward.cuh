// Flash attention forward on tensor cores: 128 queries per block, 32 per warp, over tiles of 64 keys. Where queries come
// after all keys, the keys are whole tiles.
//
// Keys and values have one tile each in shared memory. Values are copied while scores are computed, and the
// next keys while probabilities are multiplied with the values. A warp has 32 rows instead of 16, so that
// every load from shared memory serves two mma instructions.
#pragma once
#include "attention.cuh"

constexpr u32 QUERIES = 128, KEYS = 64;

template <int W>
struct Forward {
    u32 length, keys, window, width, first_query;
    float scale;

    DEVICE void forward(const bf16* q, Pair<bf16> kv, bf16* out, float* lse, u32 q_stride,
                        u32 out_stride, u32 heads) const {
        DYNAMIC_SHARED(memory);
        bf16* const queries = reinterpret_cast<bf16*>(memory);
        bf16* const key_tile = queries + QUERIES * W;
        bf16* const values = key_tile + KEYS * W;
        const u32 first = first_query + (gridDim.x - 1 - blockIdx.x) * QUERIES;
        const u32 tiles = (min(min(first + QUERIES, length), keys) - 1) / KEYS + 1;
        const u32 first_tile = first < window ? 0 : (first + 1 - window) / KEYS;
        const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 * 32;

        start_tile_copy<W, QUERIES>(queries, q, q_stride, width, first, length);
        start_tile_copy<W, KEYS>(key_tile, kv.first, kv.first_stride, width, first_tile * KEYS, length);
        end_copy_group();

        float sums[2][W / 8][4] = {};
        float maxima[2][2], totals[2][2] = {};
#pragma unroll
        for (u32 half = 0; half < 4; half++) maxima[half / 2][half % 2] = minus_infinity();

        for (u32 tile = first_tile; tile < tiles; tile++) {
            const u32 key = tile * KEYS;
            // A warp whose last query precedes the tile attends to none of its keys, and neither does one whose windows
            // begin after it.
            const bool visible = key <= first + row + 31 && key + KEYS - 1 + window > first + row;
            wait_for_copies<0>();
            __syncthreads();
            start_tile_copy<W, KEYS>(values, kv.second, kv.second_stride, width, key, length);
            end_copy_group();
            float scores[2][KEYS / 8][4] = {};
            if (visible) multiply_keys(scores, queries, key_tile, row);
            wait_for_copies<0>();
            __syncthreads();
            if (tile + 1 < tiles) {
                start_tile_copy<W, KEYS>(key_tile, kv.first, kv.first_stride, width, key + KEYS, length);
            }
            end_copy_group();
            if (!visible) continue;
            // Packed immediately: registers do not suffice for both forms beside the accumulators.
            u32 p[2][KEYS / 16][4];
#pragma unroll
            for (u32 m = 0; m < 2; m++) {
                const u32 query = first + row + m * 16 + lane / 4;
                if (key + KEYS - 1 > first + row || key + window <= first + row + 31) {
                    // The barrier keeps this a branch, which most tiles skip.
                    __syncwarp();
                    mask(scores[m], query, key + lane % 4 * 2);
                }
                update_softmax(scores[m], sums[m], maxima[m], totals[m]);
#pragma unroll
                for (u32 n = 0; n < KEYS / 16; n++) {
                    pack_left(p[m][n], scores[m][n * 2], scores[m][n * 2 + 1]);
                }
            }
            multiply_values(sums, p, values);
        }

#pragma unroll
        for (u32 m = 0; m < 2; m++) {
            float inverse[2];
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const float total = over_quad<Sum>(totals[m][half]);
                const u32 query = first + row + m * 16 + half * 8 + lane / 4;
                inverse[half] = 1.0f / total;
                if (lane % 4 == 0 && query < length) {
                    lse[u64(query) * heads] = maxima[m][half] * scale + logf(total);
                }
            }
            // Only this warp uses these rows of the query tile.
            put_rows<W>(queries, row + m * 16, sums[m], inverse);
        }
        store_rows<W, 32>(out, out_stride, width, queries, row, first, length);
    }

    // Unscaled scores q·kᵀ.
    static DEVICE void multiply_keys(float (&scores)[2][KEYS / 8][4], const bf16* queries,
                                     const bf16* keys, u32 row) {
        const u32 lane = opaque_thread_index() % 32;
#pragma unroll(W > 64 ? 2 : 1)
        for (u32 step = 0; step < u32(W / 16); step++) {
            u32 a[2][4];
            load_left<W>(a[0], queries, row, step, lane);
            load_left<W>(a[1], queries, row + 16, step, lane);
#pragma unroll
            for (u32 n = 0; n < KEYS / 16; n++) {
                u32 b[4];
                load_right_transposed<W>(b, keys, n * 16, step, lane);
#pragma unroll
                for (u32 m = 0; m < 2; m++) {
                    mma_pair(scores[m][n * 2], scores[m][n * 2 + 1], a[m], b);
                }
            }
        }
    }

    DEVICE void mask(float (&scores)[KEYS / 8][4], u32 query, u32 key) const {
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (u32 at = 0; at < 4; at++) {
                // Keys after the query are also at a distance of at least a window: it wraps around.
                const u32 distance = query + at / 2 * 8 - (key + n * 8 + at % 2);
                if (distance >= window) scores[n][at] = MASKED;
            }
        }
    }

    // Online softmax: scores become e^(score − maximum), and the sums over earlier keys are rescaled to the
    // new maximum.
    DEVICE void update_softmax(float (&scores)[KEYS / 8][4], float (&sums)[W / 8][4],
                               float (&maxima)[2], float (&totals)[2]) const {
        const float factor = scale * LOG2_E;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float maximum = maxima[half];
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; n++) {
                maximum = fmaxf(maximum, fmaxf(scores[n][half * 2], scores[n][half * 2 + 1]));
            }
            maximum = over_quad<Maximum>(maximum);
            const float shrink = power_of_two((maxima[half] - maximum) * factor);
            const float offset = maximum * factor;
            float total = totals[half] * shrink;
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (u32 at = half * 2; at < half * 2 + 2; at++) {
                    scores[n][at] = power_of_two(scores[n][at] * factor - offset);
                    total += scores[n][at];
                }
            }
#pragma unroll
            for (u32 n = 0; n < u32(W / 8); n++) {
                sums[n][half * 2] *= shrink;
                sums[n][half * 2 + 1] *= shrink;
            }
            maxima[half] = maximum;
            totals[half] = total;
        }
    }

    static DEVICE void multiply_values(float (&sums)[2][W / 8][4],
                                       const u32 (&p)[2][KEYS / 16][4], const bf16* values) {
        const u32 lane = opaque_thread_index() % 32;
#pragma unroll
        for (u32 step = 0; step < KEYS / 16; step++) {
#pragma unroll
            for (u32 n = 0; n < u32(W / 16); n++) {
                u32 b[4];
                load_right<W>(b, values, step * 16, n, lane);
#pragma unroll
                for (u32 m = 0; m < 2; m++) {
                    mma_pair(sums[m][n * 2], sums[m][n * 2 + 1], p[m][step], b);
                }
            }
        }
    }
};
