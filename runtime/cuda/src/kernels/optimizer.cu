// The optimizer: the sum of squared gradients, and AdamW fused into one kernel.
#include "reduce.cuh"

// parts[b] = Σ gradient[i]² over the `part_elements` elements i from b·part_elements on.
template <int V>
DEVICE void square_parts(const float* gradient, float* parts, u64 elements, u32 part_elements) {
    const u64 begin = u64(blockIdx.x) * part_elements;
    const u64 remaining = elements - begin;
    const u32 count = remaining < part_elements ? u32(remaining) : part_elements;
    const auto squares = [](const float* values, u32 size) {
        float sum = 0.0f;
        for (u32 i = 0; i < size; i++) sum += values[i] * values[i];
        return sum;
    };
    gradient += begin;
    float sum = 0.0f;
    // The loads of four vectors are in flight at the same time.
    constexpr u32 VECTORS = 4;
    const u32 stride = blockDim.x * V, whole = count / (VECTORS * stride) * VECTORS * stride;
    for (u32 at = threadIdx.x * V; at < whole; at += VECTORS * stride) {
        float values[VECTORS][V];
#pragma unroll
        for (u32 vector = 0; vector < VECTORS; vector++) load(gradient + at + vector * stride, values[vector]);
#pragma unroll
        for (u32 vector = 0; vector < VECTORS; vector++) sum += squares(values[vector], V);
    }
    each<V>(count - whole, threadIdx.x, blockDim.x, [&](auto size, u32 at) {
        float values[decltype(size)::value];
        load(gradient + whole + at, values);
        sum += squares(values, decltype(size)::value);
    });
    sum = over_row<Sum>(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

KERNEL(256, 4, square_sum_f32_v4, const float* gradient, float* parts, u64 elements, u32 part_elements) {
    square_parts<4>(gradient, parts, elements, part_elements);
}

KERNEL(256, 4, square_sum_f32_v1, const float* gradient, float* parts, u64 elements, u32 part_elements) {
    square_parts<1>(gradient, parts, elements, part_elements);
}

// Adds all parts to the total, in f64, in one block.
KERNEL(256, 1, square_total, const float* parts, float* total, u32 count) {
    double sum = 0.0;
#pragma unroll 8
    for (u32 part = threadIdx.x; part < count; part += blockDim.x) sum += double(parts[part]);
    sum = over_block(sum);
    if (threadIdx.x == 0) *total += float(sum);
}

// Scalars of a step, in the layout of launch/optimizer.rs.
struct Coefficients {
    float clip_norm, clip_threshold, gradient_scale, step_size, second_moment_correction, epsilon, beta1, beta2;
    // Of vectors, of matrices that are not factors, and of factors.
    float decay_factors[3];
    // Learning rate of factors over that of other weights.
    float factor_scale, factor_scale_per_rank_ratio;
};

// Updates the moments and weights of elements `begin` to `begin + count` of the gradient, the part of this
// device, and zeroes the whole gradient if `zeroes`. bf16 weights are a rounded copy of the f32 `master`; f32 weights
// have no master. If the sum of squares is not finite, nothing changes.
template <class T, int V>
DEVICE void adamw_update(T* weights, float* gradient, float* first, float* second, float* master,
                         const float* squares, const float* coefficients, u64 begin, u64 count,
                         u64 whole, u32 group, float rank_ratio, u32 zeroes) {
    const float total = *squares;
    if (!(total < __uint_as_float(0x7f800000u))) return;
    const Coefficients c = *reinterpret_cast<const Coefficients*>(coefficients);
    const float norm = sqrtf(total);
    const float clip = norm > c.clip_threshold ? c.clip_norm / norm : c.gradient_scale;
    const float decay = c.decay_factors[group];
    constexpr u32 FACTORS = 2;
    const float scale = group == FACTORS ? c.factor_scale + c.factor_scale_per_rank_ratio * rank_ratio : 1.0f;
    const float step_size = scale * c.step_size;
    each_element<V>(count, [&](auto size, u64 at) {
        constexpr int COUNT = decltype(size)::value;
        float g[COUNT], m[COUNT], v[COUNT], w[COUNT];
        load(gradient + begin + at, g);
        load(first + at, m);
        load(second + at, v);
        if constexpr (sizeof(T) == 2) {
            load(master + at, w);
        } else {
            load(weights + at, w);
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float clipped = clip * g[i];
            m[i] = c.beta1 * m[i] + (1.0f - c.beta1) * clipped;
            v[i] = c.beta2 * v[i] + (1.0f - c.beta2) * clipped * clipped;
            w[i] = decay * w[i] - step_size * m[i] / (sqrtf(v[i]) * c.second_moment_correction + c.epsilon);
            g[i] = 0.0f;
        }
        if (zeroes) store(gradient + begin + at, g);
        store(first + at, m);
        store(second + at, v);
        store(weights + at, w);
        if constexpr (sizeof(T) == 2) store(master + at, w);
    });
    if (!zeroes) return;
    each_element<1>(begin, [&](auto, u64 at) { gradient[at] = 0.0f; });
    float* const after = gradient + begin + count;
    each_element<1>(whole - begin - count, [&](auto, u64 at) { after[at] = 0.0f; });
}

#define ADAMW(T, V, ending)                                                                      \
    KERNEL(256, 4, adamw_##ending, T* weights, float* gradient, float* first, float* second,     \
           float* master, const float* squares, const float* coefficients, u64 begin, u64 count, \
           u64 whole, u32 group, float rank_ratio, u32 zeroes) {                                 \
        adamw_update<T, V>(weights, gradient, first, second, master, squares, coefficients,      \
                           begin, count, whole, group, rank_ratio, zeroes);                      \
    }
ADAMW(bf16, 4, bf16_v4)
ADAMW(bf16, 1, bf16_v1)
ADAMW(float, 4, f32_v4)
ADAMW(float, 1, f32_v1)
