// Causal flash attention: the score matrix is never stored. The formulas are those of
// cpu/src/kernels/attention/mod.rs, with powers of two and scores multiplied by scale·log₂e.
//
// bf16 kernels use tensor cores with f32 accumulation, f32 kernels use FMAs. The suffix of a kernel's name
// is the width of its tiles: it takes heads of as many features or fewer, each aligned to 16 bytes. The
// kernels named `_v1` take any alignment; they access one element at a time and use FMAs also for bf16.
// Rows of all matrices are tokens. A block computes one tile of one head of one sequence: blockIdx is
// (tile, head, sequence), and the tiles with the most work come first.
//
// A query attends to its own key and those before it, at most `window` of them; the window is the length where there is
// none. Keys after a query are masked. That also masks keys beyond the last token, since they come after every query of a
// sequence. In ring attention queries may come after all `keys`, and see each of them.
#include "attention_backward.cuh"
#include "attention_forward.cuh"
#include "attention_scalar.cuh"

// Statistics of each query for the backward pass: the log-sum-exp in base 2, and D = Σ dout⊙out. Shape
// [sequences, heads, padded, 2], where `padded` is the length rounded up to whole tiles. Padding tokens have
// a log-sum-exp of ∞, so that their probabilities are zero.
template <class T, int V, int W>
DEVICE void query_statistics(const T* out, const T* dout, const float* lse, float* sums, u32 length,
                     u32 heads, u32 width, u32 stride, u32 padded) {
    constexpr u32 LANES = W / V < 32 ? W / V : 32;
    const u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / LANES, lane = threadIdx.x % LANES;
    const bool live = row < length;
    const u64 at = (u64(blockIdx.z) * length + row) * stride + blockIdx.y * width;
    float sum = 0.0f;
    for (u32 column = lane * V; live && column < width; column += LANES * V) {
        float x[V], y[V];
        load(out + at + column, x);
        load(dout + at + column, y);
#pragma unroll
        for (int i = 0; i < V; i++) sum += x[i] * y[i];
    }
#pragma unroll
    for (u32 distance = LANES / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(EVERY_LANE, sum, distance);
    }
    if (lane == 0 && row < padded) {
        const u64 token = u64(blockIdx.z) * length + row;
        const float of_row[2] = {live ? lse[token * heads + blockIdx.y] * LOG2_E : -minus_infinity(),
                                 sum};
        store(sums + ((u64(blockIdx.z) * heads + blockIdx.y) * padded + row) * 2, of_row);
    }
}

// `group` query heads share a key head. A device may hold more key heads than its queries attend to: those
// attended to are `heads/group` heads from head `used` on. q, k and v point to the heads attended to, dk and
// dv to all heads of the device. A sequence has `key_rows` rows of k and v, of which the first `keys` are attended to, and
// `query_rows` rows of q in one or two runs of positions.
//
// A launch computes one run of queries, with positions from `first` to `length`. They attend to keys before `length`. The
// row of a query is its position less `skipped`.
#define TO_QUERIES(T, V, Forward, Backward, W, blocks, name)                                   \
    KERNEL(THREADS, blocks, attention_##name, const T* q, const T* k, const T* v, T* out,      \
           float* lse, u32 key_rows, u32 query_rows, u32 keys, u32 first, u32 length,          \
           u32 skipped, u32 window, u32 heads, u32 group, u32 width, u32 q_stride,             \
           u32 k_stride, u32 v_stride, u32 out_stride, float scale) {                          \
        const u64 token = u64(blockIdx.z) * key_rows;                                          \
        const u64 row = u64(blockIdx.z) * query_rows - skipped;                                \
        const u32 query = blockIdx.y * width, key = blockIdx.y / group * width;                \
        const Pair<T> kv = {k + token * k_stride + key, v + token * v_stride + key, k_stride,  \
                            v_stride};                                                         \
        Forward<W> head;                                                                       \
        head.length = length;                                                                  \
        head.keys = keys;                                                                      \
        head.window = window;                                                                  \
        head.width = width;                                                                    \
        head.first_query = first;                                                              \
        head.scale = scale;                                                                    \
        head.forward(q + row * q_stride + query, kv, out + row * out_stride + query,           \
                     lse + row * heads + blockIdx.y, q_stride, out_stride, heads);             \
    }                                                                                          \
    KERNEL(256, 4, attention_sums_##name, const T* out, const T* dout, const float* lse,       \
           float* sums, u32 length, u32 heads, u32 width, u32 stride, u32 padded) {            \
        query_statistics<T, V, W>(out, dout, lse, sums, length, heads, width, stride, padded); \
    }                                                                                          \
    KERNEL(THREADS, blocks, attention_dq_##name, const T* q, const T* k, const T* v,           \
           const T* dout, const float* sums, T* dq, u32 key_rows, u32 query_rows, u32 keys,    \
           u32 first, u32 length, u32 skipped, u32 window, u32 heads, u32 group, u32 width,    \
           u32 padded, u32 q_stride, u32 k_stride, u32 v_stride, u32 out_stride,               \
           u32 dq_stride, float scale) {                                                       \
        const u64 token = u64(blockIdx.z) * key_rows;                                          \
        const u64 row = u64(blockIdx.z) * query_rows - skipped;                                \
        const u32 query = blockIdx.y * width, key = blockIdx.y / group * width;                \
        const Pair<T> rows = {q + row * q_stride + query, dout + row * out_stride + query,     \
                              q_stride, out_stride};                                           \
        const Pair<T> kv = {k + token * k_stride + key, v + token * v_stride + key, k_stride,  \
                            v_stride};                                                         \
        sums += ((u64(blockIdx.z) * heads + blockIdx.y) * padded - skipped) * 2;               \
        Backward<W> head;                                                                      \
        head.length = length;                                                                  \
        head.keys = keys;                                                                      \
        head.window = window;                                                                  \
        head.width = width;                                                                    \
        head.first_query = first;                                                              \
        head.scale = scale;                                                                    \
        head.query_gradients(rows, kv, sums, dq + row * dq_stride + query, dq_stride);         \
    }

// Gradients of keys and values.
#define KEY_VALUE_GRADIENTS(T, Backward, W, blocks, name)                                      \
    KERNEL(THREADS, blocks, attention_##name, const T* q, const T* k, const T* v,              \
           const T* dout, const float* sums, T* dk, T* dv, u32 key_rows, u32 query_rows,       \
           u32 keys, u32 queries, u32 first, u32 second_row, u32 gap, u32 window, u32 heads,   \
           u32 group, u32 width, u32 used, u32 padded, u32 q_stride, u32 k_stride,             \
           u32 v_stride, u32 out_stride, float scale) {                                        \
        const u64 token = u64(blockIdx.z) * key_rows, row = u64(blockIdx.z) * query_rows;      \
        const bool is_used = blockIdx.y >= used && blockIdx.y - used < heads / group;          \
        const u32 key = is_used ? blockIdx.y - used : 0, query = key * group;                  \
        const Pair<T> rows = {k + token * k_stride + key * width,                              \
                              v + token * v_stride + key * width, k_stride, v_stride};         \
        const Pair<T> inner = {q + row * q_stride + query * width,                             \
                               dout + row * out_stride + query * width, q_stride,              \
                               out_stride};                                                    \
        sums += (u64(blockIdx.z) * heads + query) * padded * 2;                                \
        Backward<W> head;                                                                      \
        head.length = keys;                                                                    \
        head.key_rows = key_rows;                                                              \
        head.window = window;                                                                  \
        head.width = width;                                                                    \
        head.queries = {queries, first, second_row, gap};                                      \
        head.scale = scale;                                                                    \
        head.key_value_gradients(rows, inner, sums, padded, is_used ? group : 0, dk, dv);      \
    }

#define ATTENTION(T, V, Forward, Backward, W, blocks, name) \
    TO_QUERIES(T, V, Forward, Backward, W, blocks, name)    \
    KEY_VALUE_GRADIENTS(T, Backward, W, blocks, dkv_##name)

template <int W>
using GeneralBackward = Backward<W, true>;
template <int W>
using AlignedF32 = ScalarAttention<float, 4, W>;
template <int W>
using UnalignedF32 = ScalarAttention<float, 1, W>;
template <int W>
using UnalignedBf16 = ScalarAttention<bf16, 1, W>;

ATTENTION(bf16, 8, Forward, Backward, 64, 3, bf16_w64)
ATTENTION(bf16, 8, Forward, Backward, 128, 2, bf16_w128)
KEY_VALUE_GRADIENTS(bf16, GeneralBackward, 64, 3, general_dkv_bf16_w64)
KEY_VALUE_GRADIENTS(bf16, GeneralBackward, 128, 2, general_dkv_bf16_w128)
ATTENTION(bf16, 1, UnalignedBf16, UnalignedBf16, 32, 4, bf16_w32_v1)
ATTENTION(bf16, 1, UnalignedBf16, UnalignedBf16, 256, 2, bf16_w256_v1)
ATTENTION(float, 4, AlignedF32, AlignedF32, 128, 4, f32_w128)
ATTENTION(float, 1, UnalignedF32, UnalignedF32, 32, 4, f32_w32_v1)
ATTENTION(float, 1, UnalignedF32, UnalignedF32, 256, 2, f32_w256_v1)
