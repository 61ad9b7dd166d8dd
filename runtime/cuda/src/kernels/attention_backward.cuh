// Flash attention backward on tensor cores. The probabilities are computed twice, in one kernel for dq and
// in one for dk and dv, so that every sum has one order. A block has 64 rows, 16 per warp, and loops over
// tiles of inner rows. For dq the rows are queries and the inner rows keys; for dk and dv the rows are keys and
// the inner rows the queries of all heads that share them. P = 2^(scale·log₂e·q·kᵀ − lse) and
// dS = P⊙(dout·vᵀ − D), or their transposes, stay in registers and are the left operands of dq = dS·k,
// dv = Pᵀ·dout and dk = dSᵀ·q. The scale is applied last.
//
// The rows are in registers; the tiles of inner rows are double-buffered in shared memory.
#pragma once
#include "attention.cuh"

constexpr u32 ROWS = 64;

// GENERAL: whether keys and values may have a window, whose masks take registers, or queries of two runs of positions.
// Gradients of queries always may. Two runs begin and end at whole tiles, and so do queries that come after all keys.
template <int W, bool GENERAL = false>
struct Backward {
    // Inner rows, the columns of P, per mma pass. The dk/dv kernel has two accumulators, so it takes fewer.
    static constexpr u32 DQ_COLUMNS = 64, DKV_COLUMNS = GENERAL ? 16 : 32;
    // Elements of one buffer: a tile of each of the two matrices.
    static constexpr u32 TILES = 2 * ROWS * W;

    u32 length, keys, key_rows, window, width, first_query;
    QueryRuns queries;
    float scale;
    u32 a[2][W / 16][4];

    DEVICE void start_pair_copy(bf16* tiles, const Pair<bf16>& from, u32 first, u32 rows) const {
        start_tile_copy<W, ROWS>(tiles, from.first, from.first_stride, width, first, rows);
        start_tile_copy<W, ROWS>(tiles + ROWS * W, from.second, from.second_stride, width, first, rows);
    }

    // Loads the rows into registers from the tiles they were copied to.
    DEVICE void load_rows(const bf16* tiles, u32 row) {
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 matrix = 0; matrix < 2; matrix++) {
#pragma unroll
            for (u32 step = 0; step < u32(W / 16); step++) {
                load_left<W>(a[matrix][step], tiles + matrix * ROWS * W, row, step, lane);
            }
        }
    }

    // x and y: dot products of the rows of the first and the second matrix with COLUMNS inner rows, from
    // `inner_row` on.
    template <u32 COLUMNS>
    DEVICE void multiply_rows(float (&x)[COLUMNS / 8][4], float (&y)[COLUMNS / 8][4],
                              const bf16* tiles, u32 inner_row) const {
        const u32 lane = opaque_thread_index() % 32;
#pragma unroll
        for (u32 step = 0; step < u32(W / 16); step++) {
#pragma unroll
            for (u32 n = 0; n < COLUMNS / 16; n++) {
                u32 b[4];
                load_right_transposed<W>(b, tiles, inner_row + n * 16, step, lane);
                mma_pair(x[n * 2], x[n * 2 + 1], a[0][step], b);
                load_right_transposed<W>(b, tiles + ROWS * W, inner_row + n * 16, step, lane);
                mma_pair(y[n * 2], y[n * 2 + 1], a[1][step], b);
            }
        }
    }

    // Masks scores, of which the first is at `distance` from its key to its query. The distance grows by SIGN with each
    // column, and falls by SIGN with each row. Keys after the query are also at a distance of at least a window: it wraps
    // around.
    template <u32 COLUMNS, int SIGN>
    DEVICE void mask_rows(float (&x)[COLUMNS / 8][4], u32 distance) const {
#pragma unroll
        for (u32 n = 0; n < COLUMNS / 8; n++) {
#pragma unroll
            for (u32 at = 0; at < 4; at++) {
                const u32 apart = distance + u32(SIGN) * (n * 8 + at % 2 - at / 2 * 8);
                if (apart >= window) x[n][at] = MASKED;
            }
        }
    }

    // sums += left·inner for the COLUMNS inner rows from `inner_row` on.
    template <u32 COLUMNS>
    static DEVICE void accumulate(float (&sums)[W / 8][4], const u32 (&left)[COLUMNS / 16][4],
                                   const bf16* tile, u32 inner_row) {
        const u32 lane = opaque_thread_index() % 32;
#pragma unroll
        for (u32 step = 0; step < COLUMNS / 16; step++) {
#pragma unroll
            for (u32 n = 0; n < u32(W / 16); n++) {
                u32 b[4];
                load_right<W>(b, tile, inner_row + step * 16, n, lane);
                mma_pair(sums[n * 2], sums[n * 2 + 1], left[step], b);
            }
        }
    }

    DEVICE void query_gradients(Pair<bf16> rows, Pair<bf16> inner, const float* statistics, bf16* dq,
                        u32 stride) {
        DYNAMIC_SHARED(memory);
        bf16* const tiles = reinterpret_cast<bf16*>(memory);
        const u32 row_tile = first_query / ROWS + gridDim.x - 1 - blockIdx.x;
        const u32 first = row_tile * ROWS;
        const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
        const u32 first_tile = first < window ? 0 : (first + 1 - window) / ROWS;
        const u32 last_tile = min(row_tile, (keys - 1) / ROWS);
        start_pair_copy(tiles, rows, first, length);
        end_copy_group();
        start_pair_copy(tiles + TILES, inner, first_tile * ROWS, length);
        end_copy_group();
        float lse[2], d[2];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float lse_and_d[2];
            load(statistics + (first + row + half * 8 + lane / 4) * 2, lse_and_d);
            lse[half] = lse_and_d[0];
            d[half] = lse_and_d[1];
        }
        wait_for_copies<1>();
        __syncthreads();
        load_rows(tiles, row);

        const float factor = scale * LOG2_E;
        float sums[W / 8][4] = {};
        for (u32 tile = first_tile; tile <= last_tile; tile++) {
            const u32 buffer = (tile - first_tile) % 2;
            const bf16* const current = tiles + (1 - buffer) * TILES;
            const bool masked = tile == row_tile || (row_tile - tile + 1) * ROWS > window;
            wait_for_copies<0>();
            __syncthreads();
            if (tile < last_tile) {
                start_pair_copy(tiles + buffer * TILES, inner, (tile + 1) * ROWS, length);
            }
            end_copy_group();
            float x[DQ_COLUMNS / 8][4] = {}, y[DQ_COLUMNS / 8][4] = {};
            multiply_rows<DQ_COLUMNS>(x, y, current, 0);
            if (masked) {
                // The barrier keeps this a branch, which most tiles skip.
                __syncwarp();
                const u32 thread = opaque_thread_index();
                const u32 query = (row_tile - tile) * ROWS + thread / 32 * 16 + thread % 32 / 4;
                mask_rows<DQ_COLUMNS, -1>(x, query - thread % 4 * 2);
            }
            u32 ds[DQ_COLUMNS / 16][4];
#pragma unroll
            for (u32 n = 0; n < DQ_COLUMNS / 8; n++) {
#pragma unroll
                for (u32 at = 0; at < 4; at++) {
                    const u32 half = at / 2;
                    const float p = power_of_two(x[n][at] * factor - lse[half]);
                    x[n][at] = p * (y[n][at] - d[half]);
                }
                if (n % 2 == 1) pack_left(ds[n / 2], x[n - 1], x[n]);
            }
            accumulate<DQ_COLUMNS>(sums, ds, current, 0);
        }
        wait_for_copies<0>();
        __syncthreads();
        const float scales[2] = {scale, scale};
        put_rows<W>(tiles, row, sums, scales);
        store_rows<W, 16>(dq, stride, width, tiles, row, first, length);
    }

    // dk and dv of the keys that `group` query heads share; zeros where `group` is 0. Gradients have the
    // strides of their matrices. The queries of consecutive heads are `width` columns apart.
    DEVICE void key_value_gradients(Pair<bf16> rows, Pair<bf16> inner, const float* statistics,
                                    u32 padded, u32 group, bf16* dk, bf16* dv) {
        DYNAMIC_SHARED(memory);
        bf16* const tiles = reinterpret_cast<bf16*>(memory);
        float* const inner_statistics = memory + TILES;
        const u32 row_tile = blockIdx.x, first = row_tile * ROWS;
        const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
        // The tiles with a query that attends to a key of the block, in the order of the rows of queries.
        const u32 tile_begin = GENERAL ? queries.rows_before(first) / ROWS : row_tile;
        const u32 tile_end =
            GENERAL ? (queries.rows_before(first + ROWS - 1 + window) + ROWS - 1) / ROWS : gridDim.x;
        if (GENERAL && tile_begin == tile_end) group = 0;
        // The next queries to copy. Deriving them from `round` by a division would take registers.
        u32 head = 0, tile = tile_begin, started = 0;
        const u32 query_rows = GENERAL ? queries.rows : length;
        const auto start_next_copy = [&] {
            const u32 query = tile * ROWS, buffer = started++ % 2;
            start_pair_copy(tiles + buffer * TILES, inner.advanced_by(head * width), query, query_rows);
            if (threadIdx.x < ROWS / 2) {
                const float* from = statistics + (u64(head) * padded + query) * 2;
                float* const to = inner_statistics + buffer * ROWS * 2;
                start_copy(to + threadIdx.x * 4, from + threadIdx.x * 4, true);
            }
            if (++tile == tile_end) {
                tile = tile_begin;
                head++;
            }
        };
        start_pair_copy(tiles + TILES, rows, first, group ? length : 0);
        end_copy_group();
        if (group) start_next_copy();
        end_copy_group();
        wait_for_copies<1>();
        __syncthreads();
        load_rows(tiles + TILES, row);

        const float factor = scale * LOG2_E;
        float dk_sums[W / 8][4] = {}, dv_sums[W / 8][4] = {};
        const u32 tiles_per_head = tile_end - tile_begin;
        for (u32 round = 0; round < tiles_per_head * group; round++) {
            const bf16* const current = tiles + round % 2 * TILES;
            const float* const current_statistics = inner_statistics + round % 2 * ROWS * 2;
            u32 tiles_apart = round % tiles_per_head;
            if (GENERAL) tiles_apart = queries.position((tile_begin + tiles_apart) * ROWS) / ROWS - row_tile;
            const bool masked = tiles_apart == 0;
            wait_for_copies<0>();
            __syncthreads();
            if (head < group) start_next_copy();
            end_copy_group();
#pragma unroll
            for (u32 query = 0; query < ROWS; query += DKV_COLUMNS) {
                if (masked && query + DKV_COLUMNS <= row) continue;
                float x[DKV_COLUMNS / 8][4] = {}, y[DKV_COLUMNS / 8][4] = {};
                multiply_rows<DKV_COLUMNS>(x, y, current, query);
                if (GENERAL && (masked || (tiles_apart + 1) * ROWS > window)) {
                    // The barrier keeps this a branch, which most tiles skip.
                    __syncwarp();
                    mask_rows<DKV_COLUMNS, 1>(
                        x, tiles_apart * ROWS + query + lane % 4 * 2 - (row + lane / 4));
                }
                u32 p[DKV_COLUMNS / 16][4], ds[DKV_COLUMNS / 16][4];
#pragma unroll
                for (u32 n = 0; n < DKV_COLUMNS / 8; n++) {
                    const u32 column = query + n * 8 + lane % 4 * 2;
                    float lse_and_d[4];
                    load(current_statistics + column * 2, lse_and_d);
#pragma unroll
                    for (u32 at = 0; at < 4; at++) {
                        const bool later = !GENERAL && masked && row + at / 2 * 8 + lane / 4 > column + at % 2;
                        const float exponent = x[n][at] * factor - lse_and_d[at % 2 * 2];
                        x[n][at] = later ? 0.0f : power_of_two(exponent);
                        y[n][at] = x[n][at] * (y[n][at] - lse_and_d[at % 2 * 2 + 1]);
                    }
                    if (n % 2 == 1) {
                        pack_left(p[n / 2], x[n - 1], x[n]);
                        pack_left(ds[n / 2], y[n - 1], y[n]);
                    }
                }
                accumulate<DKV_COLUMNS>(dv_sums, p, current + ROWS * W, query);
                accumulate<DKV_COLUMNS>(dk_sums, ds, current, query);
            }
        }
        wait_for_copies<0>();
        __syncthreads();
        const float scales[2] = {scale, scale}, ones[2] = {1.0f, 1.0f};
        put_rows<W>(tiles, row, dk_sums, scales);
        put_rows<W>(tiles + ROWS * W, row, dv_sums, ones);
        dk = results_of_block(dk, rows.first_stride, key_rows, width);
        dv = results_of_block(dv, rows.second_stride, key_rows, width);
        store_rows<W, 16>(dk, rows.first_stride, width, tiles, row, first, length);
        store_rows<W, 16>(dv, rows.second_stride, width, tiles + ROWS * W, row, first, length);
    }
};
