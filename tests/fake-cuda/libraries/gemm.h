// C (m×n) += op(A)·op(B) over a range of k, column-major, in f32.
#pragma once
#include <cstring>
#include "operation.h"

struct Matrix {
    const void* first;
    // bf16; otherwise f32.
    bool is_bf16;
    bool transposed;
    u64 leading;
};

struct GemmExtent {
    u64 m, n, from_k, to_k;
};

inline float bf16_to_float(u16 bits) {
    const u32 whole = u32(bits) << 16;
    float value;
    memcpy(&value, &whole, 4);
    return value;
}

// Rounds to nearest, ties to even.
inline u16 float_to_bf16(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    if (value != value) return u16(bits >> 16 | 0x40);
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// `sums` is m×n without gaps.
void accumulate_gemm(const GemmExtent& extent, const Matrix& a, const Matrix& b, float* sums);
