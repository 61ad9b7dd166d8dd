// Sums and copies of ring attention around its steps: rows of matrices that may be columns of wider ones, so that each
// has a row stride of its own. T is the format of the inputs, in which a step has its results; sums are in T or f32.
// Of each sequence, `sequence_rows` rows are written; those of the next one begin `sequence_stride` rows later.
#include "device.cuh"

// The threads of a row, and the row in the matrices.
DEVICE RowTeam sequence_row_team(u32 rows, u32 sequence_rows, u32 sequence_stride) {
    RowTeam team = row_team(rows);
    const u32 row = u32(team.row);
    team.row = u64(row / sequence_rows) * sequence_stride + row % sequence_rows;
    return team;
}

// out = sums + step. A null pointer counts as zeros.
template <class T, class Sums, class Out, int V>
DEVICE void add_rows(const Sums* sums, const T* step, Out* out, const RowTeam& team, u32 columns,
                     u32 sums_stride, u32 step_stride, u32 out_stride) {
    if (!team.live) return;
    each<V>(columns, team.lane, team.lanes, [&](auto size, u32 column) {
        constexpr int COUNT = decltype(size)::value;
        float total[COUNT] = {}, more[COUNT] = {};
        if (sums) load(sums + team.row * sums_stride + column, total);
        if (step) load(step + team.row * step_stride + column, more);
#pragma unroll
        for (int i = 0; i < COUNT; i++) total[i] += more[i];
        store(out + team.row * out_stride + column, total);
    });
}

// Log of the sum of two exponentials.
DEVICE float merged_lse(float a, float b) {
    const float maximum = fmaxf(a, b);
    return maximum + logf(expf(a - maximum) + expf(b - maximum));
}

// Merges the outputs of a step into those of earlier ones: each is weighted by its part of the sum of exponentials. `lse`
// becomes that of all keys so far. V divides `width`, so that a vector lies within one head.
template <class T, class Sums, class Out, int V>
DEVICE void merge_rows(const Sums* sums, const T* step, Out* out, float* lse, const float* step_lse,
                       const RowTeam& team, u32 heads, u32 width, u32 sums_stride,
                       u32 step_stride, u32 out_stride) {
    lse += team.row * heads;
    step_lse += team.row * heads;
    if (team.live) {
        each<V>(heads * width, team.lane, team.lanes, [&](auto size, u32 column) {
            constexpr int COUNT = decltype(size)::value;
            const u32 head = column / width;
            const float merged = merged_lse(lse[head], step_lse[head]);
            const float scale = expf(lse[head] - merged), more_scale = expf(step_lse[head] - merged);
            float total[COUNT], more[COUNT];
            load(sums + team.row * sums_stride + column, total);
            load(step + team.row * step_stride + column, more);
#pragma unroll
            for (int i = 0; i < COUNT; i++) total[i] = total[i] * scale + more[i] * more_scale;
            store(out + team.row * out_stride + column, total);
        });
    }
    // All threads of the row have read its sums.
    __syncthreads();
    if (!team.live) return;
    for (u32 head = team.lane; head < heads; head += team.lanes) {
        lse[head] = merged_lse(lse[head], step_lse[head]);
    }
}

#define RING(T, Sums, Out, V, ending)                                                             \
    KERNEL(256, 4, ring_add_##ending, const Sums* sums, const T* step, Out* out, u32 rows,        \
           u32 sequence_rows, u32 sequence_stride, u32 columns, u32 sums_stride, u32 step_stride, \
           u32 out_stride) {                                                                      \
        const RowTeam team = sequence_row_team(rows, sequence_rows, sequence_stride);             \
        add_rows<T, Sums, Out, V>(sums, step, out, team, columns, sums_stride, step_stride,       \
                                  out_stride);                                                    \
    }                                                                                             \
    KERNEL(256, 4, ring_merge_##ending, const Sums* sums, const T* step, Out* out, float* lse,    \
           const float* step_lse, u32 rows, u32 sequence_rows, u32 sequence_stride, u32 heads,    \
           u32 width, u32 sums_stride, u32 step_stride, u32 out_stride) {                         \
        const RowTeam team = sequence_row_team(rows, sequence_rows, sequence_stride);             \
        merge_rows<T, Sums, Out, V>(sums, step, out, lse, step_lse, team, heads, width,           \
                                    sums_stride, step_stride, out_stride);                        \
    }

// The suffix names the formats of the step, the sums and the result.
#define EACH_RING(V)                                   \
    RING(float, float, float, V, f32_f32_f32_v##V)     \
    RING(bf16, bf16, bf16, V, bf16_bf16_bf16_v##V)     \
    RING(bf16, bf16, float, V, bf16_bf16_f32_v##V)     \
    RING(bf16, float, bf16, V, bf16_f32_bf16_v##V)     \
    RING(bf16, float, float, V, bf16_f32_f32_v##V)
EACH_RING(4)
EACH_RING(1)
