// Inner loops of matmuls: op(A) is packed in panels of 8 rows, op(B) in panels of 4 columns, and a tile of 8×4 sums stays
// in registers over a range of k. Sums are in the order of k.
#include "gemm.h"
#include <vector>

constexpr u64 ROWS = 8, COLUMNS = 4, DEPTH = 256;
typedef float Vector __attribute__((vector_size(32)));

static float to_float(u16 value) { return bf16_to_float(value); }
static float to_float(float value) { return value; }

// Packs elements i < count, from_k ≤ k < to_k into panels of WIDTH values of i, padded with zeros. Element (i, k) is at
// i·stride_i + k·stride_k.
template <u64 WIDTH, class T>
static void pack(std::vector<float>& to, u64 count, u64 from_k, u64 to_k, const T* first, u64 stride_i,
                 u64 stride_k) {
    const u64 depth = to_k - from_k, panels = (count + WIDTH - 1) / WIDTH;
    to.assign(panels * WIDTH * depth, 0.0f);
    for (u64 panel = 0; panel < panels; panel++) {
        float* out = to.data() + panel * WIDTH * depth;
        const u64 begin = panel * WIDTH, end = begin + WIDTH < count ? begin + WIDTH : count;
        for (u64 k = from_k; k < to_k; k++) {
            const T* from = first + k * stride_k;
            for (u64 i = begin; i < end; i++) out[(k - from_k) * WIDTH + i - begin] = to_float(from[i * stride_i]);
        }
    }
}

// `transposed`: whether consecutive k are adjacent in memory.
template <u64 WIDTH>
static void pack(std::vector<float>& to, u64 count, u64 from_k, u64 to_k, const Matrix& matrix, bool transposed) {
    const u64 stride_i = transposed ? matrix.leading : 1, stride_k = transposed ? 1 : matrix.leading;
    if (matrix.is_bf16) {
        pack<WIDTH>(to, count, from_k, to_k, static_cast<const u16*>(matrix.first), stride_i, stride_k);
    } else {
        pack<WIDTH>(to, count, from_k, to_k, static_cast<const float*>(matrix.first), stride_i, stride_k);
    }
}

// Also compiled for processors with wider vectors, where the compiler can dispatch between both.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDER __attribute__((target_clones("arch=haswell", "default")))
#else
#define WIDER
#endif

WIDER void tile(const float* a, const float* b, u64 depth, float (&to)[COLUMNS][ROWS]) {
    Vector sums[COLUMNS] = {};
    for (u64 k = 0; k < depth; k++) {
        Vector rows;
        memcpy(&rows, a + k * ROWS, sizeof rows);
        for (u64 j = 0; j < COLUMNS; j++) sums[j] += rows * b[k * COLUMNS + j];
    }
    memcpy(to, sums, sizeof sums);
}

void accumulate_gemm(const GemmExtent& extent, const Matrix& a, const Matrix& b, float* sums) {
    static std::vector<float> left, right;
    for (u64 from = extent.from_k; from < extent.to_k; from += DEPTH) {
        const u64 to = from + DEPTH < extent.to_k ? from + DEPTH : extent.to_k, depth = to - from;
        pack<ROWS>(left, extent.m, from, to, a, a.transposed);
        pack<COLUMNS>(right, extent.n, from, to, b, !b.transposed);
        for (u64 j = 0; j < extent.n; j += COLUMNS) {
            for (u64 i = 0; i < extent.m; i += ROWS) {
                float partial[COLUMNS][ROWS];
                tile(left.data() + i * depth, right.data() + j * depth, depth, partial);
                for (u64 column = j; column < j + COLUMNS && column < extent.n; column++) {
                    float* out = sums + column * extent.m;
                    for (u64 row = i; row < i + ROWS && row < extent.m; row++) {
                        out[row] += partial[column - j][row - i];
                    }
                }
            }
        }
    }
}
