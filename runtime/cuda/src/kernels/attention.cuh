// What the attention kernels share: tiles of bf16 in shared memory, and the matrix instructions on
// them.
//
// A tile is rows of W features, a row in pieces of 16 bytes. Heads may be narrower: the features that
// they do not have are zeros in a tile, which no product sees, and are not stored.
//
// Piece c of row r lies at c ^ (r mod 8): the eight rows that an 8×8 matrix is loaded from, and the
// eight pieces that neighbouring threads copy, are then in different banks. Where a row has four
// pieces, two rows fill the banks, and it is c ^ (r/2 mod 4).
#pragma once
#include "mma.cuh"
#include "reduce.cuh"

// Threads of a block of the bf16 kernels: four warps.
constexpr u32 THREADS = 128;

#ifdef NARROWS_SHIM
DEVICE float power_of_two(float x) { return exp2f(x); }
#else
// 2^x, with a relative error of 2^-22; results below the smallest normal number are zero.
DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

constexpr float LOG2_E = 1.44269504088896340736f;

DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

// Over the four lanes that hold a row of a product.
template <class Reduction>
DEVICE float over_quad(float x) {
    x = Reduction::of(x, __shfl_xor_sync(EVERY_LANE, x, 1));
    return Reduction::of(x, __shfl_xor_sync(EVERY_LANE, x, 2));
}

// This thread, of which the compiler knows nothing. What follows from it is made where it is needed:
// carried over a loop from before, all places of pieces would take registers that the sums need.
DEVICE u32 thread_anew() {
    u32 thread = threadIdx.x;
#ifndef NARROWS_SHIM
    asm volatile("" : "+r"(thread));
#endif
    return thread;
}

// Where the results of this block begin: those of head blockIdx.y in sequence blockIdx.z. Made anew,
// for the same reason.
template <class T>
DEVICE T* results_of_block(T* matrix, u32 stride, u32 length, u32 width) {
    u32 sequence = blockIdx.z;
#ifndef NARROWS_SHIM
    asm volatile("" : "+r"(sequence));
#endif
    return matrix + u64(sequence) * length * stride + blockIdx.y * width;
}

// Two matrices of the same tokens.
template <class T>
struct Pair {
    const T *first, *second;
    u32 first_stride, second_stride;

    // So many columns further.
    DEVICE Pair further(u32 columns) const {
        return {first + columns, second + columns, first_stride, second_stride};
    }
};

template <int W>
DEVICE constexpr u32 place_of(u32 row, u32 piece) {
    return row * W + ((piece ^ (W < 64 ? row / 2 % 4 : row % 8)) * 8);
}

// Whether the rows of every 8×8 matrix lie in all banks: one of eight groups of 16 bytes each.
template <int W>
constexpr bool has_no_conflicts() {
    for (u32 piece = 0; piece < u32(W / 8); piece++) {
        u32 groups = 0;
        for (u32 row = 0; row < 8; row++) groups |= 1u << place_of<W>(row, piece) / 8 % 8;
        if (groups != 0xff) return false;
    }
    return true;
}
static_assert(has_no_conflicts<32>() && has_no_conflicts<64>() && has_no_conflicts<128>(),
              "places of pieces");

// Begins to copy rows `first` to `first + ROWS` of a matrix of `width` columns, zeros from row `rows`
// on.
template <int W, int ROWS>
DEVICE void begin_tile(bf16* tile, const bf16* from, u32 stride, u32 width, u32 first, u32 rows) {
    constexpr u32 PIECES = W / 8, AT_ONCE = THREADS / PIECES;
    const u32 thread = thread_anew(), row = thread / PIECES, piece = thread % PIECES;
    const u32 end = piece * 8 < width ? rows : 0;
    bf16* const to = tile + place_of<W>(row, piece);
    const bf16* source = from + u64(first + row) * stride + piece * 8;
#pragma unroll
    for (u32 at = 0; at < u32(ROWS); at += AT_ONCE) {
        begin_copy(to + at * W, source + u64(at) * stride, first + row + at < end);
    }
}

// The left operand of a product: 16 rows from `row`, features 16·step and following.
template <int W>
DEVICE void load_left(u32 (&to)[4], const bf16* tile, u32 row, u32 step,
                      u32 lane) {
    load_matrices(to, tile + place_of<W>(row + lane % 16, step * 2 + lane / 16));
}

// The right operand of a product with the transposed tile: 16 of its rows from `row`, which are
// columns there, in two halves; features 16·step and following.
template <int W>
DEVICE void load_right_transposed(u32 (&to)[4], const bf16* tile, u32 row, u32 step,
                      u32 lane) {
    const u32 mine = row + lane / 16 * 8 + lane % 8;
    load_matrices(to, tile + place_of<W>(mine, step * 2 + lane / 8 % 2));
}

// The right operand of a product with the tile: 16 of its rows from `row`, features 16·step and
// following in two halves.
template <int W>
DEVICE void load_right(u32 (&to)[4], const bf16* tile, u32 row, u32 step,
                      u32 lane) {
    load_matrices_transposed(to, tile + place_of<W>(row + lane % 16, step * 2 + lane / 16));
}

// Both halves of what is loaded to the right: c += a·b, 16 columns of it.
DEVICE void mma_pair(float (&left)[4], float (&right)[4], const u32 (&a)[4], const u32 (&b)[4]) {
    const u32 first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
    mma_m16n8k16(left, a, first);
    mma_m16n8k16(right, a, second);
}

// 16 columns of a product as the left operand of the next.
DEVICE void pack_left(u32 (&to)[4], const float (&left)[4], const float (&right)[4]) {
    to[0] = pair_of_bf16(left[0], left[1]);
    to[1] = pair_of_bf16(left[2], left[3]);
    to[2] = pair_of_bf16(right[0], right[1]);
    to[3] = pair_of_bf16(right[2], right[3]);
}

// 16 rows of a product, row i times scale[i / 8], to the tile from `row` on.
template <int W>
DEVICE void put_rows(bf16* tile, u32 row, const float (&sums)[W / 8][4], const float (&scale)[2]) {
    const u32 lane = threadIdx.x % 32, mine = row + lane / 4;
#pragma unroll
    for (u32 piece = 0; piece < u32(W / 8); piece++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            bf16* const to = tile + place_of<W>(mine + half * 8, piece) + lane % 4 * 2;
            *reinterpret_cast<u32*>(to) = pair_of_bf16(sums[piece][half * 2] * scale[half],
                                                       sums[piece][half * 2 + 1] * scale[half]);
        }
    }
}

// What a warp put into ROWS rows of a tile from `row` on, to those of a matrix from `first + row`
// on, which has `width` columns; none from row `rows` on.
template <int W, int ROWS>
DEVICE void store_rows(bf16* to, u32 stride, u32 width, const bf16* tile, u32 row, u32 first,
                       u32 rows) {
    constexpr u32 PIECES = W / 8, AT_ONCE = 32 / PIECES;
    const u32 lane = threadIdx.x % 32, piece = lane % PIECES;
    __syncwarp();
#pragma unroll
    for (u32 at = 0; at < u32(ROWS); at += AT_ONCE) {
        const u32 mine = row + at + lane / PIECES;
        if (first + mine < rows && piece * 8 < width) {
            copy<bf16, 8>(tile + place_of<W>(mine, piece),
                          to + u64(first + mine) * stride + piece * 8);
        }
    }
}
