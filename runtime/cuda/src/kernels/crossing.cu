// Latent crossings: LayerNorm with activation φ, and the tensor gate. The formulas are those of
// cpu/src/kernels/layer_norm.rs and tensor_gate.rs.
#include "activation.cuh"
#include "reduce.cuh"

struct RowMoments {
    float mean, inverse_deviation;
};

// Mean and 1/√(variance + ε) of a row, in two passes. All threads of the block must call this.
template <class T, int V>
DEVICE RowMoments row_moments(const T* v, bool live, u32 columns, float epsilon) {
    float sum = 0.0f;
    if (live) {
        each<V>(columns, threadIdx.x, blockDim.x, [&](auto size, u32 column) {
            float values[decltype(size)::value];
            load(v + column, values);
#pragma unroll
            for (float value : values) sum += value;
        });
    }
    const float mean = over_row<Sum>(sum) / float(columns);
    float squares = 0.0f;
    if (live) {
        each<V>(columns, threadIdx.x, blockDim.x, [&](auto size, u32 column) {
            float values[decltype(size)::value];
            load(v + column, values);
#pragma unroll
            for (float value : values) squares += (value - mean) * (value - mean);
        });
    }
    return {mean, 1.0f / sqrtf(over_row<Sum>(squares) / float(columns) + epsilon)};
}

// z = φ(γ⊙x̂ + β), with x̂ the normalised row; `weights` is γ followed by β.
template <class T, int V>
DEVICE void layer_norm(const T* v, const T* weights, T* z, u32 rows, u32 columns, float epsilon,
                       u32 phi) {
    const RowTeam team = row_team(rows);
    v += team.row * columns;
    const RowMoments moments = row_moments<T, V>(v, team.live, columns, epsilon);
    if (!team.live) return;
    z += team.row * columns;
    each<V>(columns, team.lane, team.lanes, [&](auto size, u32 column) {
        constexpr int COUNT = decltype(size)::value;
        float values[COUNT], scale[COUNT], bias[COUNT];
        load(v + column, values);
        load(weights + column, scale);
        load(weights + columns + column, bias);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float u = (values[i] - moments.mean) * moments.inverse_deviation * scale[i] + bias[i];
            values[i] = phi ? silu(u) : u;
        }
        store(z + column, values);
    });
}

// dv = (e − mean(e) − x̂·mean(e⊙x̂))/√(variance + ε), with e = γ⊙du. The block's partial sums of dγ and dβ
// go to `parts`, [blocks, 2·columns]. Block b takes rows b, b + blocks, ….
template <class T, int V>
DEVICE void layer_norm_backward(const T* dz, const T* v, const T* weights, T* dv, float* parts,
                            u32 rows, u32 columns, float epsilon, u32 phi) {
    DYNAMIC_SHARED(dscale);
    float* const dbias = dscale + columns;
    const auto zero = [&](auto size, u32 column) {
        const float zeros[decltype(size)::value] = {};
        store(dscale + column, zeros);
        store(dbias + column, zeros);
    };
    each<V>(columns, threadIdx.x, blockDim.x, zero);
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *of_v = v + row * columns, *of_dz = dz + row * columns;
        T* const of_dv = dv + row * columns;
        const RowMoments moments = row_moments<T, V>(of_v, true, columns, epsilon);
        float e_sum = 0.0f, projection = 0.0f;
        // x̂, du and e are computed twice: storing them in dv in between would round them.
        const auto recompute = [&](u32 column, auto& x, auto& du, auto& scale) {
            constexpr int COUNT = sizeof(x) / sizeof(float);
            float bias[COUNT];
            load(of_v + column, x);
            load(of_dz + column, du);
            load(weights + column, scale);
            load(weights + columns + column, bias);
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                x[i] = (x[i] - moments.mean) * moments.inverse_deviation;
                if (phi) du[i] *= silu_derivative(x[i] * scale[i] + bias[i]);
            }
        };
        each<V>(columns, threadIdx.x, blockDim.x, [&](auto size, u32 column) {
            constexpr int COUNT = decltype(size)::value;
            float x[COUNT], du[COUNT], scale[COUNT], sums[COUNT];
            recompute(column, x, du, scale);
            load(dbias + column, sums);
#pragma unroll
            for (int i = 0; i < COUNT; i++) sums[i] += du[i];
            store(dbias + column, sums);
            load(dscale + column, sums);
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                sums[i] += du[i] * x[i];
                e_sum += du[i] * scale[i];
                projection += du[i] * scale[i] * x[i];
            }
            store(dscale + column, sums);
        });
        const float e_mean = over_row<Sum>(e_sum) / float(columns);
        projection = over_row<Sum>(projection) / float(columns);
        each<V>(columns, threadIdx.x, blockDim.x, [&](auto size, u32 column) {
            constexpr int COUNT = decltype(size)::value;
            float x[COUNT], du[COUNT], scale[COUNT];
            recompute(column, x, du, scale);
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                du[i] = (du[i] * scale[i] - e_mean - x[i] * projection) * moments.inverse_deviation;
            }
            store(of_dv + column, du);
        });
    }
    parts += u64(blockIdx.x) * 2 * columns;
    each<V>(columns, threadIdx.x, blockDim.x, [&](auto size, u32 column) {
        float sums[decltype(size)::value];
        load(dscale + column, sums);
        store(parts + column, sums);
        load(dbias + column, sums);
        store(parts + columns + column, sums);
    });
}

#define LAYER_NORM(T, V, ending)                                                               \
    KERNEL(256, 4, latent_norm_##ending, const T* v, const T* weights, T* z, u32 rows,         \
           u32 columns, float epsilon, u32 phi) {                                              \
        layer_norm<T, V>(v, weights, z, rows, columns, epsilon, phi);                          \
    }                                                                                          \
    KERNEL(256, 4, latent_norm_backward_##ending, const T* dz, const T* v, const T* weights,   \
           T* dv, float* parts, u32 rows, u32 columns, float epsilon, u32 phi) {               \
        layer_norm_backward<T, V>(dz, v, weights, dv, parts, rows, columns, epsilon, phi);         \
    }
EACH_FORMAT(LAYER_NORM)

// The tensor gate processes four tokens at a time: in shared memory each matrix element is a float4 with one
// value per token, so that one access serves four multiplications.
DEVICE float4 multiply_add(float4 sum, float factor, float4 x) {
    return {sum.x + factor * x.x, sum.y + factor * x.y, sum.z + factor * x.z, sum.w + factor * x.w};
}

DEVICE float dot(float4 x, float4 y) { return x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w; }

// Loads elements [0, count) of four tokens; zeros beyond the last token.
template <class T>
DEVICE void load_tokens(const T* from, float4* to, u64 first, u32 tokens, u32 count) {
    const u32 remaining = tokens - u32(first);
    from += first * count;
    for (u32 at = threadIdx.x; at < count; at += blockDim.x) {
        const T* element = from + at;
        to[at] = {widen(element[0]), remaining > 1 ? widen(element[count]) : 0.0f,
                  remaining > 2 ? widen(element[2 * count]) : 0.0f,
                  remaining > 3 ? widen(element[3 * count]) : 0.0f};
    }
}

// Stores `element(at)` for the elements of four tokens; with `add` it is added to the previous value.
template <class T, class Element>
DEVICE void store_tokens(T* to, u64 first, u32 tokens, u32 count, u32 add, Element element) {
    const u32 remaining = tokens - u32(first);
    to += first * count;
    for (u32 at = threadIdx.x; at < count; at += blockDim.x) {
        const float4 four = element(at);
        const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (u32 token = 0; token < 4; token++) {
            if (token < remaining) {
                T* target = to + at + token * count;
                *target = narrow<T>(add ? widen(*target) + values[token] : values[token]);
            }
        }
    }
}

// T = H·V.
DEVICE void times_right(const float4* h, const float* v, float4* t, u32 a, u32 b) {
    for (u32 at = threadIdx.x; at < a * b; at += blockDim.x) {
        const u32 i = at / b, n = at - i * b;
        float4 sum = {};
        for (u32 j = 0; j < b; j++) sum = multiply_add(sum, v[j * b + n], h[i * b + j]);
        t[at] = sum;
    }
}

// g = Uᵀ·H·V for each token; `weights` is U [a, a] followed by V [b, b].
template <class T>
DEVICE void tensor_gate(const T* h, const T* weights, T* g, u32 tokens, u32 a, u32 b) {
    DYNAMIC_SHARED(memory);
    const u32 features = a * b, parameters = a * a + b * b;
    float4* const h_tile = reinterpret_cast<float4*>(memory);
    float4* const t = h_tile + features;
    float* const u = reinterpret_cast<float*>(t + features);
    const float* const v = u + a * a;
    for (u32 at = threadIdx.x; at < parameters; at += blockDim.x) u[at] = widen(weights[at]);
    for (u64 first = u64(blockIdx.x) * 4; first < tokens; first += u64(gridDim.x) * 4) {
        __syncthreads();
        load_tokens(h, h_tile, first, tokens, features);
        __syncthreads();
        times_right(h_tile, v, t, a, b);
        __syncthreads();
        store_tokens(g, first, tokens, features, 0, [&](u32 at) {
            const u32 m = at / b, n = at - m * b;
            float4 sum = {};
            for (u32 i = 0; i < a; i++) sum = multiply_add(sum, u[i * a + m], t[i * b + n]);
            return sum;
        });
    }
}

// With T = H·V and dT = U·dg: dh (+)= dT·Vᵀ, dU = Σ T·dgᵀ, dV = Σ Hᵀ·dT. The block's partial sums of dU and
// dV go to `parts`, [blocks, a² + b²]. Where neighbouring lanes would read the same bank, each starts its
// sum at another index.
template <class T>
DEVICE void tensor_gate_backward(const T* dg, const T* h, const T* weights, T* dh, float* parts,
                              u32 tokens, u32 a, u32 b, u32 add) {
    DYNAMIC_SHARED(memory);
    const u32 features = a * b, parameters = a * a + b * b;
    float4* const h_tile = reinterpret_cast<float4*>(memory);
    float4* const dg_tile = h_tile + features;
    float4* const t = dg_tile + features;  // T, then dT.
    float* const u = reinterpret_cast<float*>(t + features);
    const float* const v = u + a * a;
    float* const sums = u + parameters;
    for (u32 at = threadIdx.x; at < parameters; at += blockDim.x) {
        u[at] = widen(weights[at]);
        sums[at] = 0.0f;
    }
    for (u64 first = u64(blockIdx.x) * 4; first < tokens; first += u64(gridDim.x) * 4) {
        __syncthreads();
        load_tokens(h, h_tile, first, tokens, features);
        load_tokens(dg, dg_tile, first, tokens, features);
        __syncthreads();
        times_right(h_tile, v, t, a, b);
        __syncthreads();
        for (u32 at = threadIdx.x; at < a * a; at += blockDim.x) {
            const u32 i = at / a, m = at - i * a;
            float sum = 0.0f;
            for (u32 step = 0, n = m % b; step < b; step++, n = n + 1 < b ? n + 1 : 0) {
                sum += dot(t[i * b + n], dg_tile[m * b + n]);
            }
            sums[at] += sum;
        }
        __syncthreads();
        for (u32 at = threadIdx.x; at < features; at += blockDim.x) {
            const u32 i = at / b, n = at - i * b;
            float4 sum = {};
            for (u32 m = 0; m < a; m++) sum = multiply_add(sum, u[i * a + m], dg_tile[m * b + n]);
            t[at] = sum;
        }
        __syncthreads();
        for (u32 at = threadIdx.x; at < b * b; at += blockDim.x) {
            const u32 j = at / b, n = at - j * b;
            float sum = 0.0f;
            for (u32 i = 0; i < a; i++) sum += dot(h_tile[i * b + j], t[i * b + n]);
            sums[a * a + at] += sum;
        }
        store_tokens(dh, first, tokens, features, add, [&](u32 at) {
            const u32 i = at / b, j = at - i * b;
            float4 sum = {};
            for (u32 step = 0, n = j; step < b; step++, n = n + 1 < b ? n + 1 : 0) {
                sum = multiply_add(sum, v[j * b + n], t[i * b + n]);
            }
            return sum;
        });
    }
    __syncthreads();
    parts += u64(blockIdx.x) * parameters;
    for (u32 at = threadIdx.x; at < parameters; at += blockDim.x) parts[at] = sums[at];
}

#define TENSOR_GATE(T, ending)                                                                 \
    KERNEL(256, 4, tensor_gate_##ending, const T* h, const T* weights, T* g, u32 tokens,       \
           u32 a, u32 b) {                                                                     \
        tensor_gate<T>(h, weights, g, tokens, a, b);                                           \
    }                                                                                          \
    KERNEL(256, 4, tensor_gate_backward_##ending, const T* dg, const T* h, const T* weights,   \
           T* dh, float* parts, u32 tokens, u32 a, u32 b, u32 add) {                           \
        tensor_gate_backward<T>(dg, h, weights, dh, parts, tokens, a, b, add);                 \
    }
TENSOR_GATE(bf16, bf16_v1)
TENSOR_GATE(float, f32_v1)
