// The product's inner loops: op(A) is packed in panels of 8 rows, op(B) in panels of 4 columns, and a
// tile of 8×4 sums stays in registers over a part of k. The sum over k is in the order of k.
#include "product.h"
#include <cstring>
#include <vector>

constexpr u64 ROWS = 8, COLUMNS = 4, DEPTH = 256;
typedef float Vector __attribute__((vector_size(32)));

float widened(u16 bits) {
    const u32 whole = u32(bits) << 16;
    float value;
    memcpy(&value, &whole, 4);
    return value;
}

u16 rounded(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    if (value != value) return u16(bits >> 16 | 0x40);
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float Matrix::at(u64 i, u64 k) const {
    const u64 place = transposed ? i * leading + k : k * leading + i;
    if (narrow) return widened(static_cast<const u16*>(first)[place]);
    return static_cast<const float*>(first)[place];
}

// Panels of `width` rows or columns side by side; what is beyond the matrix is zero.
template <class At>
static void pack(std::vector<float>& to, u64 count, u64 width, u64 from_k, u64 to_k, At at) {
    const u64 depth = to_k - from_k, panels = (count + width - 1) / width;
    to.assign(panels * width * depth, 0.0f);
    for (u64 panel = 0; panel < panels; panel++) {
        float* out = to.data() + panel * width * depth;
        const u64 first = panel * width, last = first + width < count ? first + width : count;
        for (u64 k = from_k; k < to_k; k++) {
            for (u64 i = first; i < last; i++) out[(k - from_k) * width + i - first] = at(i, k);
        }
    }
}

// Also for processors with wider vectors, where the compiler can make both.
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

void add_product(const Extent& of, const Matrix& a, const Matrix& b, float* sums) {
    static std::vector<float> left, right;
    for (u64 from = of.from_k; from < of.to_k; from += DEPTH) {
        const u64 to = from + DEPTH < of.to_k ? from + DEPTH : of.to_k, depth = to - from;
        pack(left, of.m, ROWS, from, to, [&](u64 i, u64 k) { return a.at(i, k); });
        pack(right, of.n, COLUMNS, from, to, [&](u64 j, u64 k) { return b.at(k, j); });
        for (u64 j = 0; j < of.n; j += COLUMNS) {
            for (u64 i = 0; i < of.m; i += ROWS) {
                float made[COLUMNS][ROWS];
                tile(left.data() + i * depth, right.data() + j * depth, depth, made);
                for (u64 column = j; column < j + COLUMNS && column < of.n; column++) {
                    float* out = sums + column * of.m;
                    for (u64 row = i; row < i + ROWS && row < of.m; row++) {
                        out[row] += made[column - j][row - i];
                    }
                }
            }
        }
    }
}
