// Rotary position embedding, in place. Of the first w features of a head, the pair (i, i + w/2) is rotated by
// the angle of pair i at the position of the row; further features of the head keep their values.
//
// x is the first `heads` heads of rows with stride `stride`. The table is [positions, w], f32: w/2 cosines
// followed by w/2 sines. Of the `count` rows of a sequence, those before
// `second_row` have consecutive positions from `first` on, and the others positions that are `gap` further.
// The backward pass has sign −1.
#include "device.cuh"

template <class T, int V>
DEVICE void rotate_rows(T* x, const float* table, u32 rows, u32 heads, u32 stride, u32 head_dim,
                        u32 rotated, u32 first, u32 count, u32 second_row, u32 gap, float sign) {
    const RowTeam team = row_team(rows);
    if (!team.live) return;
    const u32 half = rotated / 2;
    const u32 row = team.row % count;
    const u32 position = first + row + (row < second_row ? 0 : gap);
    const float* cosines = table + u64(position) * rotated;
    x += team.row * stride;
    // V divides `half` and `head_dim`, so that a vector of pairs lies within one head and is aligned.
    each<V>(heads * half, team.lane, team.lanes, [&](auto size, u32 pair) {
        constexpr int COUNT = decltype(size)::value;
        const u32 head = pair / half, i = pair - head * half;
        T* lower = x + head * head_dim + i;
        float a[COUNT], b[COUNT], cosine[COUNT], sine[COUNT];
        load(lower, a);
        load(lower + half, b);
        load(cosines + i, cosine);
        load(cosines + half + i, sine);
#pragma unroll
        for (int at = 0; at < COUNT; at++) {
            const float lower_value = a[at] * cosine[at] - b[at] * sign * sine[at];
            b[at] = b[at] * cosine[at] + a[at] * sign * sine[at];
            a[at] = lower_value;
        }
        store(lower, a);
        store(lower + half, b);
    });
}

#define ROTARY(T, V, ending)                                                                  \
    KERNEL(256, 4, rope_##ending, T* x, const float* table, u32 rows, u32 heads, u32 stride,  \
           u32 head_dim, u32 rotated, u32 first, u32 count, u32 second_row, u32 gap,          \
           float sign) {                                                                      \
        rotate_rows<T, V>(x, table, rows, heads, stride, head_dim, rotated, first, count,     \
                          second_row, gap, sign);                                             \
    }
EACH_FORMAT(ROTARY)
