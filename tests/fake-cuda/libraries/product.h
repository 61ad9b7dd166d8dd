// C (m×n) += op(A)·op(B) over a part of k, column by column, in f32.
#pragma once
#include "work.h"

struct Matrix {
    const void* first;
    // bf16, or f32.
    bool narrow;
    bool transposed;
    u64 leading;
    // The number in row i and column k of op(…).
    float at(u64 i, u64 k) const;
};

struct Extent {
    u64 m, n, from_k, to_k;
};

float widened(u16 bits);
u16 rounded(float value);

// `sums` is m×n without gaps.
void add_product(const Extent& of, const Matrix& a, const Matrix& b, float* sums);
