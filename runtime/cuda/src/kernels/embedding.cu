// The embedding: rows of the table, and the sum of gradients into them.
//
// The table is [table_rows, columns], from token id `first`; other tokens are another device's.
// Gradients are added token by token in the order of their places, whatever the device does: the
// tokens are sorted first, and one row of blocks sums all rows of one token. A thread sorts by
// counting how many tokens belong before its own: tokens² comparisons of a few instructions each.
#include "reduce.cuh"

template <class T, int V>
DEVICE void gather_rows(const u32* tokens, const T* table, T* out, u32 rows, u32 columns, u32 first,
                        u32 table_rows) {
    const RowTeam team = row_team(rows);
    if (!team.live) return;
    const u32 at = tokens[team.row] - first;  // Below `first` this is beyond every table.
    const T* from = table + u64(at) * columns;
    out += team.row * columns;
    each<V>(columns, team.lane, team.lanes, [&](auto number, u32 column) {
        constexpr int COUNT = decltype(number)::value;
        if (at < table_rows) {
            copy<T, COUNT>(from + column, out + column);
        } else {
            const float zeros[COUNT] = {};
            store(out + column, zeros);
        }
    });
}

// order[k] is the k-th token's place, sorted by id, then place; runs[k] is how many tokens are equal
// to it from there on if it is the first of them, else 0.
KERNEL(256, 4, scatter_order, const u32* tokens, u32* order, u32* runs, u32 count) {
    SHARED(u32[1024], some);
    const u32 mine = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 token = mine < count ? tokens[mine] : 0;
    u32 before = 0, equal_before = 0, equal_after = 0;
    for (u32 begin = 0; begin < count; begin += 1024) {
        const u32 end = min(count - begin, 1024u);
        __syncthreads();
        for (u32 at = threadIdx.x; at < end; at += blockDim.x) some[at] = tokens[begin + at];
        __syncthreads();
        // How many of these come before mine.
        const u32 earlier = mine > begin ? min(mine - begin, end) : 0;
        for (u32 at = 0; at < earlier; at++) {
            before += some[at] < token;
            equal_before += some[at] == token;
        }
        for (u32 at = earlier; at < end; at++) {
            before += some[at] < token;
            equal_after += some[at] == token;
        }
    }
    if (mine < count) {
        const u32 place = before + equal_before;
        order[place] = mine;
        runs[place] = equal_before == 0 ? equal_after : 0;
    }
}

// Block (k, y): the y-th piece of the columns for the tokens that are equal to the k-th in order.
template <class T, int V>
DEVICE void scatter_rows(const u32* tokens, const u32* order, const u32* runs, const T* dy,
                         float* dtable, u32 columns, u32 first, u32 table_rows) {
    const u32 length = runs[blockIdx.x];
    if (length == 0) return;
    order += blockIdx.x;
    const u32 at = tokens[order[0]] - first;
    if (at >= table_rows) return;
    dtable += u64(at) * columns;
    const u32 lanes = gridDim.y * blockDim.x, lane = blockIdx.y * blockDim.x + threadIdx.x;
    each<V>(columns, lane, lanes, [&](auto number, u32 column) {
        constexpr int COUNT = decltype(number)::value;
        float sums[COUNT] = {}, row[COUNT];
#pragma unroll 4
        for (u32 token = 0; token < length; token++) {
            load(dy + u64(order[token]) * columns + column, row);
#pragma unroll
            for (int i = 0; i < COUNT; i++) sums[i] += row[i];
        }
        load(dtable + column, row);
#pragma unroll
        for (int i = 0; i < COUNT; i++) row[i] += sums[i];
        store(dtable + column, row);
    });
}

#define EMBEDDING(T, V, ending)                                                                 \
    KERNEL(256, 4, gather_##ending, const u32* tokens, const T* table, T* out, u32 rows,        \
           u32 columns, u32 first, u32 table_rows) {                                            \
        gather_rows<T, V>(tokens, table, out, rows, columns, first, table_rows);                \
    }                                                                                           \
    KERNEL(256, 4, scatter_add_##ending, const u32* tokens, const u32* order, const u32* runs,  \
           const T* dy, float* dtable, u32 columns, u32 first, u32 table_rows) {                \
        scatter_rows<T, V>(tokens, order, runs, dy, dtable, columns, first, table_rows);        \
    }
EACH_FORMAT(EMBEDDING)
