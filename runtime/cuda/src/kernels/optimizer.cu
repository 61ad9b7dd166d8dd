// The optimizer: the sum of squared gradients, and AdamW in one pass.
#include "reduce.cuh"

// parts[b] is the sum of the squares of gradient[b·each], …, gradient[(b + 1)·each − 1].
template <int V>
DEVICE void square_parts(const float* gradient, float* parts, u64 elements, u32 each_part) {
    const u64 begin = u64(blockIdx.x) * each_part;
    const u64 left = elements - begin;
    float sum = 0.0f;
    each<V>(left < each_part ? u32(left) : each_part, threadIdx.x, blockDim.x,
            [&](auto number, u32 at) {
                float values[decltype(number)::value];
                load(gradient + begin + at, values);
#pragma unroll
                for (float value : values) sum += value * value;
            });
    sum = over_row<Sum>(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

KERNEL(256, 4, square_sum_f32_v4, const float* gradient, float* parts, u64 elements, u32 each_part) {
    square_parts<4>(gradient, parts, elements, each_part);
}

KERNEL(256, 4, square_sum_f32_v1, const float* gradient, float* parts, u64 elements, u32 each_part) {
    square_parts<1>(gradient, parts, elements, each_part);
}

// One block adds all parts, in f64, to the total.
KERNEL(256, 1, square_total, const float* parts, float* total, u32 count) {
    double sum = 0.0;
    for (u32 part = threadIdx.x; part < count; part += blockDim.x) sum += double(parts[part]);
    sum = over_block(sum);
    if (threadIdx.x == 0) *total += float(sum);
}

// The numbers of a step, as launch/step.rs lays them out.
struct Coefficients {
    float clip_norm, step_size, root, epsilon, beta1, beta2, keep, unused;
};

// Elements `begin` to `begin + count` of the gradient are this device's: their moments and weights
// are updated. All of the gradient is zeroed. In bf16 the weights are a copy of `master`, which is
// updated in f32; in f32 they are their own master. A total that is not finite changes nothing.
template <class T, int V>
DEVICE void adamw_all(T* weights, float* gradient, float* first, float* second, float* master,
                      const float* squares, const float* numbers, u64 begin, u64 count, u64 whole,
                      u32 decays) {
    const float total = *squares;
    if (!(total < __uint_as_float(0x7f800000u))) return;
    const Coefficients by = *reinterpret_cast<const Coefficients*>(numbers);
    const float norm = sqrtf(total);
    const float clip = norm > by.clip_norm ? by.clip_norm / norm : 1.0f;
    const float keep = decays ? by.keep : 1.0f;
    each_of_all<V>(count, [&](auto number, u64 at) {
        constexpr int COUNT = decltype(number)::value;
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
            m[i] = by.beta1 * m[i] + (1.0f - by.beta1) * clipped;
            v[i] = by.beta2 * v[i] + (1.0f - by.beta2) * clipped * clipped;
            w[i] = keep * w[i] - by.step_size * m[i] / (sqrtf(v[i]) * by.root + by.epsilon);
            g[i] = 0.0f;
        }
        store(gradient + begin + at, g);
        store(first + at, m);
        store(second + at, v);
        store(weights + at, w);
        if constexpr (sizeof(T) == 2) store(master + at, w);
    });
    each_of_all<1>(begin, [&](auto, u64 at) { gradient[at] = 0.0f; });
    float* const after = gradient + begin + count;
    each_of_all<1>(whole - begin - count, [&](auto, u64 at) { after[at] = 0.0f; });
}

#define ADAMW(T, V, ending)                                                                      \
    KERNEL(256, 4, adamw_##ending, T* weights, float* gradient, float* first, float* second,     \
           float* master, const float* squares, const float* numbers, u64 begin, u64 count,      \
           u64 whole, u32 decays) {                                                              \
        adamw_all<T, V>(weights, gradient, first, second, master, squares, numbers, begin,       \
                        count, whole, decays);                                                   \
    }
ADAMW(bf16, 4, bf16_v4)
ADAMW(bf16, 1, bf16_v1)
ADAMW(float, 4, f32_v4)
ADAMW(float, 1, f32_v1)
