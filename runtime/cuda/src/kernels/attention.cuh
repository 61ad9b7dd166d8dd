// Shared by the attention kernels: bf16 tiles in shared memory and matrix instructions on them.
//
// A tile has rows of W features, in chunks of 16 bytes. Heads may be narrower than W: the missing features
// are zeros in the tile, contribute nothing to a matmul, and are not stored.
//
// Swizzle: chunk c of row r is stored at position c ^ (r mod 8), so that the eight rows of an 8×8 matrix,
// and the eight chunks that neighbouring threads copy, are in different banks. Where a row has four
// chunks, two rows span all banks, and the position is c ^ (r/2 mod 4).
#pragma once
#include "mma.cuh"
#include "reduce.cuh"

// Threads per block of the tiled kernels: four warps.
constexpr u32 THREADS = 128;

#ifdef NARROWS_SHIM
DEVICE float power_of_two(float x) { return exp2f(x); }
#else
// 2^x with a relative error of 2^-22; denormal results are flushed to zero.
DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

constexpr float LOG2_E = 1.44269504088896340736f;

// Score of a masked key. It is finite, so that rows without a visible key in their first tiles have no difference of
// infinities: what they sum there is multiplied by zero when the first visible key raises their maximum.
constexpr float MASKED = -1e30f;

DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

// Reduces over the four lanes that hold one row of an accumulator.
template <class Reduction>
DEVICE float over_quad(float x) {
    x = Reduction::of(x, __shfl_xor_sync(EVERY_LANE, x, 1));
    return Reduction::of(x, __shfl_xor_sync(EVERY_LANE, x, 2));
}

// threadIdx.x, opaque to the compiler. Addresses derived from it are recomputed where they are needed:
// hoisted out of a loop, they would occupy registers that the accumulators need.
DEVICE u32 opaque_thread_index() {
    u32 thread = threadIdx.x;
#ifndef NARROWS_SHIM
    asm volatile("" : "+r"(thread));
#endif
    return thread;
}

// Start of this block's results: head blockIdx.y of sequence blockIdx.z. The sequence is opaque to the
// compiler for the same reason.
template <class T>
DEVICE T* results_of_block(T* matrix, u32 stride, u32 rows, u32 width) {
    u32 sequence = blockIdx.z;
#ifndef NARROWS_SHIM
    asm volatile("" : "+r"(sequence));
#endif
    return matrix + u64(sequence) * rows * stride + blockIdx.y * width;
}

// Positions of the queries of a sequence, in the order of their rows: a run of consecutive positions and, from row
// `second_row` on, another, `gap` positions further. In a single run, `second_row` is the number of rows.
struct QueryRuns {
    u32 rows, first, second_row, gap;

    DEVICE u32 position(u32 row) const { return first + row + (row < second_row ? 0 : gap); }

    // Number of rows with a lower position.
    DEVICE u32 rows_before(u32 end) const {
        const u32 second = first + second_row + gap;
        if (end > second) return min(end - first - gap, rows);
        return end < first ? 0 : min(end - first, second_row);
    }
};

// Two matrices with the same rows (tokens).
template <class T>
struct Pair {
    const T *first, *second;
    u32 first_stride, second_stride;

    DEVICE Pair advanced_by(u32 columns) const {
        return {first + columns, second + columns, first_stride, second_stride};
    }
};

template <int W>
DEVICE constexpr u32 chunk_offset(u32 row, u32 chunk) {
    return row * W + ((chunk ^ (W < 64 ? row / 2 % 4 : row % 8)) * 8);
}

// Whether the rows of every 8×8 matrix cover all eight bank groups of 16 bytes.
template <int W>
constexpr bool is_conflict_free() {
    for (u32 chunk = 0; chunk < u32(W / 8); chunk++) {
        u32 groups = 0;
        for (u32 row = 0; row < 8; row++) groups |= 1u << chunk_offset<W>(row, chunk) / 8 % 8;
        if (groups != 0xff) return false;
    }
    return true;
}
static_assert(is_conflict_free<32>() && is_conflict_free<64>() && is_conflict_free<128>(),
              "bank conflicts in the swizzle");

// Starts copying rows `first` to `first + ROWS` of a matrix of `width` columns to a tile; rows from `rows`
// on become zeros.
template <int W, int ROWS>
DEVICE void start_tile_copy(bf16* tile, const bf16* from, u32 stride, u32 width, u32 first, u32 rows) {
    constexpr u32 CHUNKS = W / 8, ROWS_AT_ONCE = THREADS / CHUNKS;
    const u32 thread = opaque_thread_index(), row = thread / CHUNKS, chunk = thread % CHUNKS;
    const u32 end = chunk * 8 < width ? rows : 0;
    bf16* const to = tile + chunk_offset<W>(row, chunk);
    const bf16* source = from + u64(first + row) * stride + chunk * 8;
#pragma unroll
    for (u32 at = 0; at < u32(ROWS); at += ROWS_AT_ONCE) {
        start_copy(to + at * W, source + u64(at) * stride, first + row + at < end);
    }
}

// Loads the left operand of an mma: rows `row` to `row + 16`, features from 16·step.
template <int W>
DEVICE void load_left(u32 (&to)[4], const bf16* tile, u32 row, u32 step, u32 lane) {
    load_matrices(to, tile + chunk_offset<W>(row + lane % 16, step * 2 + lane / 16));
}

// Loads the right operand of an mma with the transposed tile: tile rows `row` to `row + 16`, which are
// columns of the operand, in two halves; features from 16·step.
template <int W>
DEVICE void load_right_transposed(u32 (&to)[4], const bf16* tile, u32 row, u32 step, u32 lane) {
    const u32 lane_row = row + lane / 16 * 8 + lane % 8;
    load_matrices(to, tile + chunk_offset<W>(lane_row, step * 2 + lane / 8 % 2));
}

// Loads the right operand of an mma with the tile: rows `row` to `row + 16`, features from 16·step in two
// halves.
template <int W>
DEVICE void load_right(u32 (&to)[4], const bf16* tile, u32 row, u32 step, u32 lane) {
    load_matrices_transposed(to, tile + chunk_offset<W>(row + lane % 16, step * 2 + lane / 16));
}

// c += a·b for both halves of a loaded right operand: 16 columns of c.
DEVICE void mma_pair(float (&left)[4], float (&right)[4], const u32 (&a)[4], const u32 (&b)[4]) {
    const u32 first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
    mma_m16n8k16(left, a, first);
    mma_m16n8k16(right, a, second);
}

// Converts 16 columns of an accumulator to the left operand of the next mma.
DEVICE void pack_left(u32 (&to)[4], const float (&left)[4], const float (&right)[4]) {
    to[0] = pair_of_bf16(left[0], left[1]);
    to[1] = pair_of_bf16(left[2], left[3]);
    to[2] = pair_of_bf16(right[0], right[1]);
    to[3] = pair_of_bf16(right[2], right[3]);
}

// Writes 16 rows of an accumulator to the tile from `row` on, row i multiplied by scale[i / 8].
template <int W>
DEVICE void put_rows(bf16* tile, u32 row, const float (&sums)[W / 8][4], const float (&scale)[2]) {
    const u32 lane = threadIdx.x % 32, lane_row = row + lane / 4;
#pragma unroll
    for (u32 chunk = 0; chunk < u32(W / 8); chunk++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            bf16* const to = tile + chunk_offset<W>(lane_row + half * 8, chunk) + lane % 4 * 2;
            *reinterpret_cast<u32*>(to) = pair_of_bf16(sums[chunk][half * 2] * scale[half],
                                                       sums[chunk][half * 2 + 1] * scale[half]);
        }
    }
}

// Copies ROWS rows that a warp put into a tile from `row` on to the rows of a matrix from `first + row` on.
// The matrix has `width` columns; rows from `rows` on are not written.
template <int W, int ROWS>
DEVICE void store_rows(bf16* to, u32 stride, u32 width, const bf16* tile, u32 row, u32 first,
                       u32 rows) {
    constexpr u32 CHUNKS = W / 8, ROWS_AT_ONCE = 32 / CHUNKS;
    const u32 lane = threadIdx.x % 32, chunk = lane % CHUNKS;
    __syncwarp();
#pragma unroll
    for (u32 at = 0; at < u32(ROWS); at += ROWS_AT_ONCE) {
        const u32 lane_row = row + at + lane / CHUNKS;
        if (first + lane_row < rows && chunk * 8 < width) {
            copy<bf16, 8>(tile + chunk_offset<W>(lane_row, chunk),
                          to + u64(first + lane_row) * stride + chunk * 8);
        }
    }
}
