// RMSNorm in the variants of DESIGN §3.3. The formulas are those of cpu/src/kernels/rms_norm.rs.
//
// Shapes: x, y and their gradients [rows, columns], gamma [columns], s, t, ds [rows], all contiguous.
// A row that is read twice is read from cache the second time: it has a few KiB at most.
#include "reduce.cuh"

// This lane's part of s = Σ x² over the row.
template <class T, int V>
DEVICE float lane_squares(const T* x, u32 columns) {
    float s = 0.0f;
    each<V>(columns, threadIdx.x, blockDim.x, [&](auto count, u32 column) {
        float of_x[decltype(count)::value];
        load(x + column, of_x);
#pragma unroll
        for (float value : of_x) s += value * value;
    });
    return s;
}

// STATISTIC: s = Σ x². NORMALIZE: y = ρ·x⊙gamma with ρ from s, or from `known_s` without STATISTIC; otherwise
// y = x⊙gamma. Without OUTPUT there is no y.
template <class T, int V, bool STATISTIC, bool NORMALIZE, bool OUTPUT>
DEVICE void norm_forward(const T* x, const T* gamma, T* y, const float* known_s, float* s, u32 rows,
                         u32 columns, float width, float epsilon) {
    const RowTeam team = row_team(rows);
    x += team.row * columns;
    float squares = 0.0f;
    if constexpr (STATISTIC) {
        squares = over_row<Sum>(team.live ? lane_squares<T, V>(x, columns) : 0.0f);
        if (team.live && team.lane == 0) s[team.row] = squares;
    }
    if (!OUTPUT || !team.live) return;
    if constexpr (NORMALIZE && !STATISTIC) squares = known_s[team.row];
    const float rho = NORMALIZE ? inverse_rms(squares, width, epsilon) : 1.0f;
    y += team.row * columns;
    each<V>(columns, team.lane, team.lanes, [&](auto count, u32 column) {
        constexpr int COUNT = decltype(count)::value;
        float of_x[COUNT], scale[COUNT];
        load(x + column, of_x);
        load(gamma + column, scale);
#pragma unroll
        for (int i = 0; i < COUNT; i++) of_x[i] = of_x[i] * rho * scale[i];
        store(y + column, of_x);
    });
}

// This lane's part of t = Σ dy·gamma·x over the row.
template <class T, int V>
DEVICE float lane_dot(const T* dy, const T* x, const T* gamma, u32 columns) {
    float t = 0.0f;
    each<V>(columns, threadIdx.x, blockDim.x, [&](auto count, u32 column) {
        constexpr int COUNT = decltype(count)::value;
        float of_dy[COUNT], of_x[COUNT], scale[COUNT];
        load(dy + column, of_dy);
        load(x + column, of_x);
        load(gamma + column, scale);
#pragma unroll
        for (int i = 0; i < COUNT; i++) t += of_dy[i] * of_x[i] * scale[i];
    });
    return t;
}

enum BackwardVariant { WHOLE, APPLY, ONLINE };

struct RowFactors {
    float of_dy, of_x;
};

// The factors of γ·dy and of x in the gradient of a row. `lane_dot()` is this lane's part of t, which WHOLE sums.
template <BackwardVariant VARIANT, class LaneDot>
DEVICE RowFactors row_factors(const float* s, const float* t, u64 row, float width, float epsilon,
                              LaneDot lane_dot) {
    if constexpr (VARIANT == ONLINE) {
        return {1.0f, 2.0f * s[row]};
    } else {
        const float rho = inverse_rms(s[row], width, epsilon);
        float whole;
        if constexpr (VARIANT == WHOLE) {
            whole = over_row<Sum>(lane_dot());
        } else {
            whole = t[row];
        }
        return {rho, -rho * rho * rho * whole / width};
    }
}

// dx += of_dy·gamma·dy + of_x·x, and sums += of_dy·dy·x.
template <int COUNT>
DEVICE void add_row_gradients(RowFactors factors, const float (&dy)[COUNT], const float (&x)[COUNT],
                              const float (&scale)[COUNT], float (&dx)[COUNT], float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const float moved = factors.of_dy * dy[i];
        dx[i] += moved * scale[i] + factors.of_x * x[i];
        sums[i] += moved * x[i];
    }
}

// norm_backward where a row has at most one vector for each thread: γ and the sums stay in registers, and all of a row is
// loaded before its sum is known.
template <class T, int V, BackwardVariant VARIANT>
DEVICE void norm_backward_in_registers(const T* dy, const T* x, const T* gamma, const float* s,
                                       const float* t, T* dx, float* parts, u32 rows, u32 columns,
                                       float width, float epsilon, u32 add) {
    const u32 column = threadIdx.x * V;
    const bool live = column < columns;
    float scale[V] = {}, sums[V] = {};
    if (live) load(gamma + column, scale);
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const u64 at = row * columns + column;
        float of_dy[V] = {}, of_x[V] = {}, of_dx[V] = {};
        if (live) {
            load(dy + at, of_dy);
            load(x + at, of_x);
            if (add) load(dx + at, of_dx);
        }
        const RowFactors factors = row_factors<VARIANT>(s, t, row, width, epsilon, [&] {
            float dot = 0.0f;
#pragma unroll
            for (int i = 0; i < V; i++) dot += of_dy[i] * of_x[i] * scale[i];
            return dot;
        });
        add_row_gradients(factors, of_dy, of_x, scale, of_dx, sums);
        if (live) store(dx + at, of_dx);
    }
    if (live) store(parts + u64(blockIdx.x) * columns + column, sums);
}

// dx (+)= of_dy·gamma·dy + of_x·x with the factors of the row, and the block's partial sum of dgamma = Σ of_dy·dy·x.
// Block b takes rows b, b + blocks, …; `parts` is [blocks, columns].
template <class T, int V, BackwardVariant VARIANT>
DEVICE void norm_backward(const T* dy, const T* x, const T* gamma, const float* s, const float* t,
                           T* dx, float* parts, u32 rows, u32 columns, float width, float epsilon,
                           u32 add) {
    if (columns % V == 0 && columns / V <= blockDim.x) {
        norm_backward_in_registers<T, V, VARIANT>(dy, x, gamma, s, t, dx, parts, rows, columns, width,
                                                  epsilon, add);
        return;
    }
    DYNAMIC_SHARED(dgamma);
    each<V>(columns, threadIdx.x, blockDim.x, [&](auto count, u32 column) {
        const float zeros[decltype(count)::value] = {};
        store(dgamma + column, zeros);
    });
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *row_dy = dy + row * columns, *row_x = x + row * columns;
        T* row_dx = dx + row * columns;
        const RowFactors factors = row_factors<VARIANT>(s, t, row, width, epsilon, [&] {
            return lane_dot<T, V>(row_dy, row_x, gamma, columns);
        });
        each<V>(columns, threadIdx.x, blockDim.x, [&](auto count, u32 column) {
            constexpr int COUNT = decltype(count)::value;
            float of_dy[COUNT], of_x[COUNT], scale[COUNT], of_dx[COUNT] = {}, sums[COUNT];
            load(row_dy + column, of_dy);
            load(row_x + column, of_x);
            load(gamma + column, scale);
            load(dgamma + column, sums);
            if (add) load(row_dx + column, of_dx);
            add_row_gradients(factors, of_dy, of_x, scale, of_dx, sums);
            store(row_dx + column, of_dx);
            store(dgamma + column, sums);
        });
    }
    parts += u64(blockIdx.x) * columns;
    each<V>(columns, threadIdx.x, blockDim.x, [&](auto count, u32 column) {
        float sums[decltype(count)::value];
        load(dgamma + column, sums);
        store(parts + column, sums);
    });
}

// Every head of queries and keys normed; heads behind them are copied. A row is one head of one token, and `heads` of them
// make a token: first those of queries, and `normed` with those of keys. `gamma` has the scales of queries and of keys side
// by side, where there are any. The formulas are those of cpu/src/kernels/qk_norm.rs.
struct QkHead {
    bool normed;
    u32 first_scale;
};

DEVICE QkHead qk_head(u64 row, u32 columns, u32 heads, u32 queries, u32 normed) {
    const u32 head = u32(row % heads);
    return {head < normed, head >= queries && queries > 0 ? columns : 0};
}

template <class T, int V>
DEVICE void qk_norm(const T* x, const T* gamma, T* y, u32 rows, u32 columns, u32 heads, u32 queries,
                    u32 normed, float epsilon) {
    const RowTeam team = row_team(rows);
    const QkHead head = qk_head(team.row, columns, heads, queries, normed);
    x += team.row * columns;
    y += team.row * columns;
    gamma += head.first_scale;
    const float squares = team.live && head.normed ? lane_squares<T, V>(x, columns) : 0.0f;
    const float rho = inverse_rms(over_row<Sum>(squares), float(columns), epsilon);
    if (!team.live) return;
    each<V>(columns, team.lane, team.lanes, [&](auto count, u32 column) {
        constexpr int COUNT = decltype(count)::value;
        float of_x[COUNT], scale[COUNT];
        load(x + column, of_x);
        if (head.normed) {
            load(gamma + column, scale);
#pragma unroll
            for (int i = 0; i < COUNT; i++) of_x[i] = of_x[i] * rho * scale[i];
        }
        store(y + column, of_x);
    });
}

// Block b takes blockDim.y rows at a time, from b·blockDim.y on. Each row of threads has sums of its own in shared memory,
// [blockDim.y, scales], which are added in a fixed order to `parts`, [blocks, scales].
template <class T, int V>
DEVICE void qk_norm_backward(const T* dy, const T* x, const T* gamma, T* dx, float* parts, u32 rows,
                             u32 columns, u32 heads, u32 queries, u32 normed, u32 scales,
                             float epsilon) {
    DYNAMIC_SHARED(sums);
    float* const own_sums = sums + threadIdx.y * scales;
    for (u32 first = 0; first < scales; first += columns) {
        each<V>(columns, threadIdx.x, blockDim.x, [&](auto count, u32 column) {
            const float zeros[decltype(count)::value] = {};
            store(own_sums + first + column, zeros);
        });
    }
    const u64 stride = u64(gridDim.x) * blockDim.y;
    for (u64 first = u64(blockIdx.x) * blockDim.y; first < rows; first += stride) {
        const u64 row = first + threadIdx.y;
        const bool live = row < rows;
        const QkHead head = qk_head(row, columns, heads, queries, normed);
        const T *row_dy = dy + row * columns, *row_x = x + row * columns;
        const T* const scale_of_head = gamma + head.first_scale;
        T* const row_dx = dx + row * columns;
        float squares = 0.0f, projection = 0.0f;
        if (live && head.normed) {
            each<V>(columns, threadIdx.x, blockDim.x, [&](auto count, u32 column) {
                constexpr int COUNT = decltype(count)::value;
                float of_dy[COUNT], of_x[COUNT], scale[COUNT];
                load(row_dy + column, of_dy);
                load(row_x + column, of_x);
                load(scale_of_head + column, scale);
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    squares += of_x[i] * of_x[i];
                    projection += of_dy[i] * of_x[i] * scale[i];
                }
            });
        }
        const float rho = inverse_rms(over_row<Sum>(squares), float(columns), epsilon);
        const float x_factor =
            -rho * rho * rho * over_row<Sum>(projection) / float(columns);
        if (!live) continue;
        each<V>(columns, threadIdx.x, blockDim.x, [&](auto count, u32 column) {
            constexpr int COUNT = decltype(count)::value;
            float of_dy[COUNT], of_x[COUNT], scale[COUNT], of_sums[COUNT];
            load(row_dy + column, of_dy);
            if (head.normed) {
                float* const of_head = own_sums + head.first_scale + column;
                load(row_x + column, of_x);
                load(scale_of_head + column, scale);
                load(of_head, of_sums);
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    const float moved = rho * of_dy[i];
                    of_sums[i] += moved * of_x[i];
                    of_dy[i] = moved * scale[i] + x_factor * of_x[i];
                }
                store(of_head, of_sums);
            }
            store(row_dx + column, of_dy);
        });
    }
    __syncthreads();
    parts += u64(blockIdx.x) * scales;
    const u32 threads = blockDim.x * blockDim.y;
    for (u32 at = threadIdx.y * blockDim.x + threadIdx.x; at < scales; at += threads) {
        float sum = 0.0f;
        for (u32 team = 0; team < blockDim.y; team++) sum += sums[team * scales + at];
        parts[at] = sum;
    }
}

#define NORMS(T, V, ending)                                                                        \
    KERNEL(256, 4, qk_norm_##ending, const T* x, const T* gamma, T* y, u32 rows, u32 columns,      \
           u32 heads, u32 queries, u32 normed, float epsilon) {                                    \
        qk_norm<T, V>(x, gamma, y, rows, columns, heads, queries, normed, epsilon);                \
    }                                                                                              \
    KERNEL(256, 4, qk_norm_backward_##ending, const T* dy, const T* x, const T* gamma, T* dx,      \
           float* parts, u32 rows, u32 columns, u32 heads, u32 queries, u32 normed, u32 scales,    \
           float epsilon) {                                                                        \
        qk_norm_backward<T, V>(dy, x, gamma, dx, parts, rows, columns, heads, queries, normed,     \
                               scales, epsilon);                                                   \
    }                                                                                              \
    KERNEL(256, 4, norm_##ending, const T* x, const T* gamma, T* y, float* s, u32 rows,            \
           u32 columns, float width, float epsilon) {                                              \
        norm_forward<T, V, true, true, true>(x, gamma, y, nullptr, s, rows, columns, width, epsilon); \
    }                                                                                              \
    KERNEL(256, 4, norm_statistic_##ending, const T* x, float* s, u32 rows, u32 columns) {         \
        norm_forward<T, V, true, false, false>(x, x, nullptr, nullptr, s, rows, columns, 1, 0);       \
    }                                                                                              \
    KERNEL(256, 4, norm_apply_##ending, const T* x, const T* gamma, const float* s, T* y,          \
           u32 rows, u32 columns, float width, float epsilon) {                                    \
        norm_forward<T, V, false, true, true>(x, gamma, y, s, nullptr, rows, columns, width, epsilon);\
    }                                                                                              \
    KERNEL(256, 4, norm_online_##ending, const T* x, const T* gamma, T* y, float* s, u32 rows,     \
           u32 columns) {                                                                          \
        norm_forward<T, V, true, false, true>(x, gamma, y, nullptr, s, rows, columns, 1, 0);          \
    }                                                                                              \
    KERNEL(256, 4, norm_scale_##ending, const T* x, const T* gamma, T* y, u32 rows, u32 columns) { \
        norm_forward<T, V, false, false, true>(x, gamma, y, nullptr, nullptr, rows, columns, 1, 0);   \
    }                                                                                              \
    KERNEL(256, 4, norm_backward_statistic_##ending, const T* dy, const T* x, const T* gamma,      \
           float* t, u32 rows, u32 columns) {                                                      \
        const RowTeam team = row_team(rows);                                                       \
        const u64 at = team.row * columns;                                                         \
        float sum = team.live ? lane_dot<T, V>(dy + at, x + at, gamma, columns) : 0.0f;           \
        sum = over_row<Sum>(sum);                                                                  \
        if (team.live && team.lane == 0) t[team.row] = sum;                                        \
    }                                                                                              \
    KERNEL(256, 4, norm_backward_##ending, const T* dy, const T* x, const T* gamma,                \
           const float* s, T* dx, float* parts, u32 rows, u32 columns, float width, float epsilon, \
           u32 add) {                                                                              \
        norm_backward<T, V, WHOLE>(dy, x, gamma, s, nullptr, dx, parts, rows, columns, width,     \
                                    epsilon, add);                                                 \
    }                                                                                              \
    KERNEL(256, 4, norm_backward_apply_##ending, const T* dy, const T* x, const T* gamma,          \
           const float* s, const float* t, T* dx, float* parts, u32 rows, u32 columns,             \
           float width, float epsilon, u32 add) {                                                  \
        norm_backward<T, V, APPLY>(dy, x, gamma, s, t, dx, parts, rows, columns, width, epsilon,  \
                                    add);                                                          \
    }                                                                                              \
    KERNEL(256, 4, norm_online_backward_##ending, const T* dy, const T* x, const T* gamma,         \
           const float* ds, T* dx, float* parts, u32 rows, u32 columns, u32 add) {                 \
        norm_backward<T, V, ONLINE>(dy, x, gamma, ds, nullptr, dx, parts, rows, columns, 1, 0,    \
                                     add);                                                         \
    }
EACH_FORMAT(NORMS)
