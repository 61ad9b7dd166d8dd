// The optimizer: the sum of squared gradients, and AdamW fused into one kernel. A launch is for many parameters.
#include "reduce.cuh"

// As in launch/optimizer.rs: parameters of one launch, which with 80 bytes each fit in the 4 KB of a kernel's parameters, and
// elements of one of them in a block.
constexpr u32 TENSORS = 48, BLOCK_ELEMENTS = 4096;

// Whether a pointer is a multiple of `bytes`, a power of two.
DEVICE bool is_aligned(const void* pointer, u32 bytes) {
    return reinterpret_cast<u64>(pointer) % bytes == 0;
}

// The sum of this block: Σ gradient[i]² over the elements i of a part of the gradient.
template <int V>
DEVICE void square_part(const float* gradient, float* parts, u64 elements, u32 part) {
    const u64 begin = u64(part) * BLOCK_ELEMENTS;
    const u64 remaining = elements - begin;
    const u32 count = remaining < BLOCK_ELEMENTS ? u32(remaining) : BLOCK_ELEMENTS;
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

// Gradients whose squares one launch sums, in the layout of launch/optimizer.rs.
struct Gradients {
    struct Gradient {
        const float* elements;
        u64 count;
        // Number of parts of this gradient and of those before it.
        u64 part_end;
    } of[TENSORS];
};

// One part is a block; the parts of a gradient follow those of the gradient before it.
KERNEL(256, 4, square_sum, float* parts, __grid_constant__ const Gradients gradients) {
    u32 tensor = 0, first_part = 0;
    while (blockIdx.x >= u32(gradients.of[tensor].part_end)) first_part = u32(gradients.of[tensor++].part_end);
    const float* const elements = gradients.of[tensor].elements;
    const u64 count = gradients.of[tensor].count;
    const u32 part = blockIdx.x - first_part;
    if (is_aligned(elements, 16)) {
        square_part<4>(elements, parts, count, part);
    } else {
        square_part<1>(elements, parts, count, part);
    }
}

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

// A parameter that AdamW updates, in the layout of launch/optimizer.rs: each field has a word of 8 bytes. The gradient
// has `begin` elements before those of this device's `count` weights. Its `zeroed` elements from the first on become zero,
// all or none. bf16 weights are a rounded copy of the f32 `master`; f32 weights have no master.
template <class T>
struct Parameter {
    T* weights;
    float *gradient, *first, *second, *master;
    u64 begin, count, zeroed;
    alignas(8) u32 group;
    alignas(8) float rank_ratio;
};

template <class T>
struct Parameters {
    Parameter<T> of[TENSORS];
};

template <class T>
DEVICE u32 block_count(const Parameter<T>& parameter) {
    const u64 elements = parameter.zeroed > parameter.count ? parameter.zeroed : parameter.count;
    return u32((elements + BLOCK_ELEMENTS - 1) / BLOCK_ELEMENTS);
}

// Scalars of a parameter's update.
struct Update {
    float clip, decay, step_size, beta1, beta2, correction, epsilon;
};

DEVICE Update update_of(u32 group, float rank_ratio, float squares, const Coefficients& c) {
    const float norm = sqrtf(squares);
    const float clip = norm > c.clip_threshold ? c.clip_norm / norm : c.gradient_scale;
    constexpr u32 FACTORS = 2;
    const float scale = group == FACTORS ? c.factor_scale + c.factor_scale_per_rank_ratio * rank_ratio : 1.0f;
    return {clip, c.decay_factors[group], scale * c.step_size, c.beta1, c.beta2, c.second_moment_correction, c.epsilon};
}

// Updates the moments and weights of a parameter and zeroes its gradient, in the blocks of a team.
template <class T, int V>
DEVICE void update_parameter(const Parameter<T>& parameter, const Update& u, Team team) {
    T* const weights = parameter.weights;
    float *const gradient = parameter.gradient, *const first = parameter.first;
    float *const second = parameter.second, *const master = parameter.master;
    const u64 begin = parameter.begin, count = parameter.count, zeroed = parameter.zeroed;
    each_element<V>(count, team, [&](auto size, u64 at) {
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
            const float clipped = u.clip * g[i];
            m[i] = u.beta1 * m[i] + (1.0f - u.beta1) * clipped;
            v[i] = u.beta2 * v[i] + (1.0f - u.beta2) * clipped * clipped;
            w[i] = u.decay * w[i] - u.step_size * m[i] / (sqrtf(v[i]) * u.correction + u.epsilon);
            g[i] = 0.0f;
        }
        if (zeroed) store(gradient + begin + at, g);
        store(first + at, m);
        store(second + at, v);
        store(weights + at, w);
        if constexpr (sizeof(T) == 2) store(master + at, w);
    });
    if (!zeroed) return;
    each_element<1>(begin, team, [&](auto, u64 at) { gradient[at] = 0.0f; });
    float* const after = gradient + begin + count;
    each_element<1>(zeroed - begin - count, team, [&](auto, u64 at) { after[at] = 0.0f; });
}

// Whether the elements of a parameter can be accessed as vectors of four.
template <class T>
DEVICE bool has_quads(const Parameter<T>& parameter) {
    return is_aligned(parameter.weights, 4 * sizeof(T)) && is_aligned(parameter.gradient + parameter.begin, 16) &&
           is_aligned(parameter.first, 16) && is_aligned(parameter.second, 16) && is_aligned(parameter.master, 16);
}

// The blocks of a parameter follow those of the parameter before it. If the sum of squares is not finite, nothing changes.
template <class T>
DEVICE void adamw(const float* squares, const float* coefficients, const Parameters<T>& parameters) {
    if (!(*squares < __uint_as_float(0x7f800000u))) return;
    u32 block = blockIdx.x, tensor = 0, blocks;
    while (block >= (blocks = block_count(parameters.of[tensor]))) {
        block -= blocks;
        tensor++;
    }
    const Parameter<T>& parameter = parameters.of[tensor];
    const Coefficients& c = *reinterpret_cast<const Coefficients*>(coefficients);
    const Update update = update_of(parameter.group, parameter.rank_ratio, *squares, c);
    const Team team = {u64(block) * blockDim.x + threadIdx.x, u64(blocks) * blockDim.x};
    if (has_quads(parameter)) {
        update_parameter<T, 4>(parameter, update, team);
    } else {
        update_parameter<T, 1>(parameter, update, team);
    }
}

KERNEL(256, 4, adamw_bf16, const float* squares, const float* coefficients,
       __grid_constant__ const Parameters<bf16> parameters) {
    adamw(squares, coefficients, parameters);
}

KERNEL(256, 4, adamw_f32, const float* squares, const float* coefficients,
       __grid_constant__ const Parameters<float> parameters) {
    adamw(squares, coefficients, parameters);
}
