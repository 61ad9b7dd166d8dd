// Element-wise sums, casts and fills of flat arrays, biases, and the reduction of the partial sums of blocks.
#include "reduce.cuh"

// sum[i] = x[i] + y[i], where x may have another format.
template <class X, class T, int V>
DEVICE void add_elements(const X* x, const T* y, T* sum, u64 elements) {
    each_element<V>(elements, [&](auto count, u64 at) {
        constexpr int COUNT = decltype(count)::value;
        float of_x[COUNT], of_y[COUNT];
        load(x + at, of_x);
        load(y + at, of_y);
#pragma unroll
        for (int i = 0; i < COUNT; i++) of_x[i] += of_y[i];
        store(sum + at, of_x);
    });
}

#define SUMS(T, V, ending)                                                              \
    KERNEL(256, 4, add_##ending, const T* x, const T* y, T* sum, u64 elements) {        \
        add_elements<T, T, V>(x, y, sum, elements);                                     \
    }                                                                                   \
    KERNEL(256, 4, add_into_##ending, const T* x, T* sum, u64 elements) {               \
        add_elements<T, T, V>(x, sum, sum, elements);                                   \
    }                                                                                   \
    KERNEL(256, 4, fill_##ending, T* to, u64 elements) {                                \
        each_element<V>(elements, [&](auto count, u64 at) {                              \
            const float zeros[decltype(count)::value] = {};                             \
            store(to + at, zeros);                                                      \
        });                                                                             \
    }
EACH_FORMAT(SUMS)

// y = x + b in every row.
template <class T, int V>
DEVICE void add_bias(const T* x, const T* bias, T* y, u32 rows, u32 columns) {
    const RowTeam team = row_team(rows);
    if (!team.live) return;
    x += team.row * columns;
    y += team.row * columns;
    each<V>(columns, team.lane, team.lanes, [&](auto size, u32 column) {
        constexpr int COUNT = decltype(size)::value;
        float values[COUNT], of_bias[COUNT];
        load(x + column, values);
        load(bias + column, of_bias);
#pragma unroll
        for (int i = 0; i < COUNT; i++) values[i] += of_bias[i];
        store(y + column, values);
    });
}

// The block's sum of rows goes to `parts`, [blocks, columns]. Block b takes rows b, b + blocks, ….
template <class T, int V>
DEVICE void sum_rows(const T* dy, float* parts, u32 rows, u32 columns) {
    parts += u64(blockIdx.x) * columns;
    each<V>(columns, threadIdx.x, blockDim.x, [&](auto size, u32 column) {
        constexpr int COUNT = decltype(size)::value;
        float sums[COUNT] = {};
        for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
            float values[COUNT];
            load(dy + row * columns + column, values);
#pragma unroll
            for (int i = 0; i < COUNT; i++) sums[i] += values[i];
        }
        store(parts + column, sums);
    });
}

#define BIASES(T, V, ending)                                                                  \
    KERNEL(256, 4, bias_##ending, const T* x, const T* bias, T* y, u32 rows, u32 columns) {   \
        add_bias<T, V>(x, bias, y, rows, columns);                                            \
    }                                                                                         \
    KERNEL(256, 4, bias_backward_##ending, const T* dy, float* parts, u32 rows, u32 columns) { \
        sum_rows<T, V>(dy, parts, rows, columns);                                             \
    }
EACH_FORMAT(BIASES)

#define MIXED(V)                                                                                  \
    KERNEL(256, 4, cast_to_bf16_v##V, const float* from, bf16* to, u64 elements) {                \
        cast_elements<float, bf16, V>(from, to, elements);                                        \
    }                                                                                             \
    KERNEL(256, 4, cast_to_f32_v##V, const bf16* from, float* to, u64 elements) {                 \
        cast_elements<bf16, float, V>(from, to, elements);                                        \
    }                                                                                             \
    KERNEL(256, 4, add_bf16_into_f32_v##V, const bf16* x, float* sum, u64 elements) {             \
        add_elements<bf16, float, V>(x, sum, sum, elements);                                      \
    }
MIXED(4)
MIXED(1)

// into[c] += Σ_p parts[p, c]. The order of additions is by p mod 8, then p. A block is (32, 8).
KERNEL(256, 4, sum_parts, const float* parts, float* into, u32 count, u32 columns) {
    SHARED(float[8][32], sums);
    const u32 column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (u32 part = threadIdx.y; part < count; part += 8) {
            sum += parts[u64(part) * columns + column];
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < columns) {
        float all = 0.0f;
#pragma unroll
        for (int y = 0; y < 8; y++) all += sums[y][threadIdx.x];
        into[column] += all;
    }
}
