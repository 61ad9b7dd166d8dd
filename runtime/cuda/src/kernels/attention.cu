// Causal flash attention: no matrix of scores is ever in memory. The mathematics are those of
// cpu/kernels/attention/mod.rs; powers are of two, with scores times scale·log₂e.
//
// Kernels for bf16 are on tensor cores with f32 sums, those for f32 are plain sums. A kernel is named
// for the features of its tiles, and takes heads of as many or fewer; rows of all matrices are tokens,
// and every head begins at a multiple of 16 bytes. Where that is not so, the kernels named `_v1` access
// one number at a time, in plain sums also for bf16. A block works on one head of one sequence, blockIdx is (tile, head, sequence), and tiles with the most work
// come first.
//
// Keys later than a query are masked, and with them all that lie beyond the last token: a query
// that exists is before them.
#include "attention_backward.cuh"
#include "attention_forward.cuh"
#include "attention_plain.cuh"

// What backward needs of each query besides: log-sum-exp for powers of two, and D = Σ dout⊙out.
// They are [sequences, heads, padded, 2], with as many tokens of a sequence as whole tiles have; those
// that do not exist have a log-sum-exp of ∞, which makes their probabilities zero.
template <class T, int V, int W>
DEVICE void sum_rows(const T* out, const T* dout, const float* lse, float* sums, u32 length,
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

// Of the keys that a device holds, those of `heads/group` heads are attended to, the first of them
// being `used`. q, k and v begin with what is attended to, dk and dv with what is held.
#define ATTENTION(T, V, Forward, Backward, W, blocks, name)                                    \
    KERNEL(THREADS, blocks, attention_##name, const T* q, const T* k, const T* v, T* out,      \
           float* lse, u32 length, u32 heads, u32 group, u32 width, u32 q_stride,              \
           u32 k_stride, u32 v_stride, u32 out_stride, float scale) {                          \
        const u64 token = u64(blockIdx.z) * length;                                            \
        const u32 query = blockIdx.y * width, key = blockIdx.y / group * width;                \
        const Pair<T> kv = {k + token * k_stride + key, v + token * v_stride + key, k_stride,  \
                            v_stride};                                                         \
        const Forward<W> head = {length, width, scale};                                        \
        head.forward(q + token * q_stride + query, kv, out + token * out_stride + query,       \
                     lse + token * heads + blockIdx.y, q_stride, out_stride, heads);           \
    }                                                                                          \
    KERNEL(256, 4, attention_sums_##name, const T* out, const T* dout, const float* lse,       \
           float* sums, u32 length, u32 heads, u32 width, u32 stride, u32 padded) {            \
        sum_rows<T, V, W>(out, dout, lse, sums, length, heads, width, stride, padded);         \
    }                                                                                          \
    KERNEL(THREADS, blocks, attention_dq_##name, const T* q, const T* k, const T* v,           \
           const T* dout, const float* sums, T* dq, u32 length, u32 heads, u32 group,          \
           u32 width, u32 padded, u32 q_stride, u32 k_stride, u32 v_stride, u32 out_stride,    \
           float scale) {                                                                      \
        const u64 token = u64(blockIdx.z) * length;                                            \
        const u32 query = blockIdx.y * width, key = blockIdx.y / group * width;                \
        const Pair<T> rows = {q + token * q_stride + query, dout + token * out_stride + query, \
                              q_stride, out_stride};                                           \
        const Pair<T> kv = {k + token * k_stride + key, v + token * v_stride + key, k_stride,  \
                            v_stride};                                                         \
        sums += (u64(blockIdx.z) * heads + blockIdx.y) * padded * 2;                           \
        Backward<W> head;                                                                      \
        head.length = length;                                                                  \
        head.width = width;                                                                    \
        head.scale = scale;                                                                    \
        head.queries(rows, kv, sums, dq + token * q_stride + query, q_stride);                 \
    }                                                                                          \
    KERNEL(THREADS, blocks, attention_dkv_##name, const T* q, const T* k, const T* v,          \
           const T* dout, const float* sums, T* dk, T* dv, u32 length, u32 heads, u32 group,   \
           u32 width, u32 used, u32 padded, u32 q_stride, u32 k_stride, u32 v_stride,          \
           u32 out_stride, float scale) {                                                      \
        const u64 token = u64(blockIdx.z) * length;                                            \
        const bool is_used = blockIdx.y >= used && blockIdx.y - used < heads / group;          \
        const u32 key = is_used ? blockIdx.y - used : 0, query = key * group;                  \
        const Pair<T> rows = {k + token * k_stride + key * width,                              \
                              v + token * v_stride + key * width, k_stride, v_stride};         \
        const Pair<T> others = {q + token * q_stride + query * width,                          \
                                dout + token * out_stride + query * width, q_stride,           \
                                out_stride};                                                   \
        sums += (u64(blockIdx.z) * heads + query) * padded * 2;                                \
        Backward<W> head;                                                                      \
        head.length = length;                                                                  \
        head.width = width;                                                                    \
        head.scale = scale;                                                                    \
        head.keys(rows, others, sums, padded, is_used ? group : 0, dk, dv);                    \
    }
template <int W>
using PlainF32 = Plain<float, 4, W>;
template <int W>
using SingleF32 = Plain<float, 1, W>;
template <int W>
using SingleBf16 = Plain<bf16, 1, W>;

ATTENTION(bf16, 8, Forward, Backward, 32, 3, bf16_w32)
ATTENTION(bf16, 8, Forward, Backward, 64, 3, bf16_w64)
ATTENTION(bf16, 8, Forward, Backward, 128, 2, bf16_w128)
ATTENTION(bf16, 1, SingleBf16, SingleBf16, 32, 4, bf16_w32_v1)
ATTENTION(bf16, 1, SingleBf16, SingleBf16, 256, 2, bf16_w256_v1)
ATTENTION(float, 4, PlainF32, PlainF32, 32, 4, f32_w32)
ATTENTION(float, 4, PlainF32, PlainF32, 64, 4, f32_w64)
ATTENTION(float, 4, PlainF32, PlainF32, 128, 3, f32_w128)
ATTENTION(float, 1, SingleF32, SingleF32, 32, 4, f32_w32_v1)
ATTENTION(float, 1, SingleF32, SingleF32, 256, 2, f32_w256_v1)
