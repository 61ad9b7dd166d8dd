// Backward goes twice over the tiles, so that every sum has one order: a block has 64 rows, 16 a warp,
// and sums over the tiles of the others. For dq the rows are queries, the others keys; for dk and dv the
// rows are keys, the others the queries of all heads that share them. Then
// P = 2^(scale·log₂e·q·kᵀ − lse), dS = P⊙(dout·vᵀ − D), or their transposes, stay in registers, and
// are the left operands of dq = dS·k, dv = Pᵀ·dout and dk = dSᵀ·q. The scale comes last.
//
// The rows are in registers; the others' tiles take turns in two places of shared memory, one copied
// while the other is used.
#pragma once
#include "attention.cuh"

constexpr u32 ROWS = 64;

template <int W>
struct Backward {
    // Columns of a product that are made at a time: with two sums fewer.
    static constexpr u32 OF_QUERIES = 64, OF_KEYS = 32;
    // Numbers of the two matrices' tiles.
    static constexpr u32 TILES = 2 * ROWS * W;

    u32 length, width;
    float scale;
    u32 a[2][W / 16][4];

    DEVICE void begin_both(bf16* tiles, const Pair<bf16>& of, u32 first, u32 rows) const {
        begin_tile<W, ROWS>(tiles, of.first, of.first_stride, width, first, rows);
        begin_tile<W, ROWS>(tiles + ROWS * W, of.second, of.second_stride, width, first, rows);
    }

    // The rows, from the tiles in which they have arrived.
    DEVICE void take_rows(const bf16* tiles, u32 row) {
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 of = 0; of < 2; of++) {
#pragma unroll
            for (u32 step = 0; step < u32(W / 16); step++) {
                load_left<W>(a[of][step], tiles + of * ROWS * W, row, step, lane);
            }
        }
    }

    // x and y: the rows' products with COLUMNS others, from `other` on.
    template <u32 COLUMNS>
    DEVICE void multiply_rows(float (&x)[COLUMNS / 8][4], float (&y)[COLUMNS / 8][4],
                              const bf16* tiles, u32 other) const {
        const u32 lane = thread_anew() % 32;
#pragma unroll
        for (u32 step = 0; step < u32(W / 16); step++) {
#pragma unroll
            for (u32 n = 0; n < COLUMNS / 16; n++) {
                u32 b[4];
                load_right_transposed<W>(b, tiles, other + n * 16, step, lane);
                mma_pair(x[n * 2], x[n * 2 + 1], a[0][step], b);
                load_right_transposed<W>(b, tiles + ROWS * W, other + n * 16, step, lane);
                mma_pair(y[n * 2], y[n * 2 + 1], a[1][step], b);
            }
        }
    }

    // sums += left·others, the others from `other` on.
    template <u32 COLUMNS>
    static DEVICE void add_product(float (&sums)[W / 8][4], const u32 (&left)[COLUMNS / 16][4],
                                   const bf16* tile, u32 other) {
        const u32 lane = thread_anew() % 32;
#pragma unroll
        for (u32 step = 0; step < COLUMNS / 16; step++) {
#pragma unroll
            for (u32 n = 0; n < u32(W / 16); n++) {
                u32 b[4];
                load_right<W>(b, tile, other + step * 16, n, lane);
                mma_pair(sums[n * 2], sums[n * 2 + 1], left[step], b);
            }
        }
    }

    DEVICE void queries(Pair<bf16> rows, Pair<bf16> others, const float* statistics, bf16* dq,
                        u32 stride) {
        DYNAMIC_SHARED(memory);
        bf16* const tiles = reinterpret_cast<bf16*>(memory);
        const u32 number = gridDim.x - 1 - blockIdx.x, first = number * ROWS;
        const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
        begin_both(tiles, rows, first, length);
        end_copy_group();
        begin_both(tiles + TILES, others, 0, length);
        end_copy_group();
        float lse[2], d[2];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float both[2];
            load(statistics + (first + row + half * 8 + lane / 4) * 2, both);
            lse[half] = both[0];
            d[half] = both[1];
        }
        wait_for_copies<1>();
        __syncthreads();
        take_rows(tiles, row);

        const float factor = scale * LOG2_E;
        float sums[W / 8][4] = {};
        for (u32 tile = 0; tile <= number; tile++) {
            const bf16* const here = tiles + (tile + 1) % 2 * TILES;
            wait_for_copies<0>();
            __syncthreads();
            if (tile < number) {
                begin_both(tiles + tile % 2 * TILES, others, (tile + 1) * ROWS, length);
            }
            end_copy_group();
            float x[OF_QUERIES / 8][4] = {}, y[OF_QUERIES / 8][4] = {};
            multiply_rows<OF_QUERIES>(x, y, here, 0);
            u32 ds[OF_QUERIES / 16][4];
#pragma unroll
            for (u32 n = 0; n < OF_QUERIES / 8; n++) {
#pragma unroll
                for (u32 at = 0; at < 4; at++) {
                    const u32 half = at / 2, key = n * 8 + lane % 4 * 2 + at % 2;
                    const bool later = tile == number && key > row + half * 8 + lane / 4;
                    const float p = later ? 0.0f : power_of_two(x[n][at] * factor - lse[half]);
                    x[n][at] = p * (y[n][at] - d[half]);
                }
                if (n % 2 == 1) pack_left(ds[n / 2], x[n - 1], x[n]);
            }
            add_product<OF_QUERIES>(sums, ds, here, 0);
        }
        wait_for_copies<0>();
        __syncthreads();
        const float scales[2] = {scale, scale};
        put_rows<W>(tiles, row, sums, scales);
        store_rows<W, 16>(dq, stride, width, tiles, row, first, length);
    }

    // The keys of `group` heads; zeros where that is none. Gradients have the
    // strides of their matrices. A head's queries are `width` columns after those
    // of the one before.
    DEVICE void keys(Pair<bf16> rows, Pair<bf16> others, const float* statistics, u32 padded,
                     u32 group, bf16* dk, bf16* dv) {
        DYNAMIC_SHARED(memory);
        bf16* const tiles = reinterpret_cast<bf16*>(memory);
        float* const of_others = memory + TILES;
        const u32 number = blockIdx.x, first = number * ROWS;
        const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
        // Which queries are copied next. Counted, not divided from the turn: that takes registers.
        u32 head = 0, tile = number, begun = 0;
        const auto begin = [&] {
            const u32 query = tile * ROWS, place = begun++ % 2;
            begin_both(tiles + place * TILES, others.further(head * width), query, length);
            if (threadIdx.x < ROWS / 2) {
                const float* from = statistics + (u64(head) * padded + query) * 2;
                begin_copy(of_others + place * ROWS * 2 + threadIdx.x * 4, from + threadIdx.x * 4, true);
            }
            if (++tile == gridDim.x) {
                tile = number;
                head++;
            }
        };
        begin_both(tiles + TILES, rows, first, group ? length : 0);
        end_copy_group();
        if (group) begin();
        end_copy_group();
        wait_for_copies<1>();
        __syncthreads();
        take_rows(tiles + TILES, row);

        const float factor = scale * LOG2_E;
        float of_k[W / 8][4] = {}, of_v[W / 8][4] = {};
        const u32 each = gridDim.x - number;
        for (u32 turn = 0; turn < each * group; turn++) {
            const bf16* const here = tiles + turn % 2 * TILES;
            const float* const numbers = of_others + turn % 2 * ROWS * 2;
            const bool masked = turn % each == 0;
            wait_for_copies<0>();
            __syncthreads();
            if (head < group) begin();
            end_copy_group();
#pragma unroll
            for (u32 query = 0; query < ROWS; query += OF_KEYS) {
                if (masked && query + OF_KEYS <= row) continue;
                float x[OF_KEYS / 8][4] = {}, y[OF_KEYS / 8][4] = {};
                multiply_rows<OF_KEYS>(x, y, here, query);
                u32 p[OF_KEYS / 16][4], ds[OF_KEYS / 16][4];
#pragma unroll
                for (u32 n = 0; n < OF_KEYS / 8; n++) {
                    const u32 column = query + n * 8 + lane % 4 * 2;
                    float both[4];
                    load(numbers + column * 2, both);
#pragma unroll
                    for (u32 at = 0; at < 4; at++) {
                        const bool later = masked && row + at / 2 * 8 + lane / 4 > column + at % 2;
                        const float exponent = x[n][at] * factor - both[at % 2 * 2];
                        x[n][at] = later ? 0.0f : power_of_two(exponent);
                        y[n][at] = x[n][at] * (y[n][at] - both[at % 2 * 2 + 1]);
                    }
                    if (n % 2 == 1) {
                        pack_left(p[n / 2], x[n - 1], x[n]);
                        pack_left(ds[n / 2], y[n - 1], y[n]);
                    }
                }
                add_product<OF_KEYS>(of_v, p, here + ROWS * W, query);
                add_product<OF_KEYS>(of_k, ds, here, query);
            }
        }
        wait_for_copies<0>();
        __syncthreads();
        const float scales[2] = {scale, scale}, ones[2] = {1.0f, 1.0f};
        put_rows<W>(tiles, row, of_k, scales);
        put_rows<W>(tiles + ROWS * W, row, of_v, ones);
        dk = results_of_block(dk, rows.first_stride, length, width);
        dv = results_of_block(dv, rows.second_stride, length, width);
        store_rows<W, 16>(dk, rows.first_stride, width, tiles, row, first, length);
        store_rows<W, 16>(dv, rows.second_stride, width, tiles + ROWS * W, row, first, length);
    }
};
