// The embedding: gather of table rows, and scatter-add of their gradients.
//
// The table is [table_rows, columns] and begins at token id `first`; other tokens belong to another device.
// The row of the token `padding` gets no gradient.
// The scatter-add is deterministic: tokens are sorted first, and one row of blocks sums all gradient rows of
// one token in the order of their positions. Each thread finds the rank of its token by counting the tokens
// before it: tokens² comparisons of a few instructions each.
#include "reduce.cuh"

template <class T, int V>
DEVICE void gather_rows(const u32* tokens, const T* table, T* out, u32 rows, u32 columns, u32 first,
                        u32 table_rows) {
    const RowTeam team = row_team(rows);
    if (!team.live) return;
    const u32 at = tokens[team.row] - first;  // Wraps around below `first`, beyond every table.
    const T* from = table + u64(at) * columns;
    out += team.row * columns;
    each<V>(columns, team.lane, team.lanes, [&](auto size, u32 column) {
        constexpr int COUNT = decltype(size)::value;
        if (at < table_rows) {
            copy<T, COUNT>(from + column, out + column);
        } else {
            const float zeros[COUNT] = {};
            store(out + column, zeros);
        }
    });
}

// order[k] is the position of the k-th token, sorted by id, then position. runs[k] is the length of the run
// of equal tokens that begins at k, or 0 where no run begins.
KERNEL(256, 4, scatter_order, const u32* tokens, u32* order, u32* runs, u32 count) {
    SHARED(u32[1024], window);
    const u32 position = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 token = position < count ? tokens[position] : 0;
    u32 before = 0, equal_before = 0, equal_after = 0;
    for (u32 begin = 0; begin < count; begin += 1024) {
        const u32 end = min(count - begin, 1024u);
        __syncthreads();
        for (u32 at = threadIdx.x; at < end; at += blockDim.x) window[at] = tokens[begin + at];
        __syncthreads();
        // How many tokens of the window precede this thread's.
        const u32 earlier = position > begin ? min(position - begin, end) : 0;
        for (u32 at = 0; at < earlier; at++) {
            before += window[at] < token;
            equal_before += window[at] == token;
        }
        for (u32 at = earlier; at < end; at++) {
            before += window[at] < token;
            equal_after += window[at] == token;
        }
    }
    if (position < count) {
        const u32 rank = before + equal_before;
        order[rank] = position;
        runs[rank] = equal_before == 0 ? equal_after : 0;
    }
}

// Block (k, y) sums the y-th slice of the columns for the run of tokens that begins at k.
template <class T, int V>
DEVICE void scatter_rows(const u32* tokens, const u32* order, const u32* runs, const T* dy,
                         float* dtable, u32 columns, u32 first, u32 table_rows, u32 padding) {
    const u32 length = runs[blockIdx.x];
    if (length == 0) return;
    order += blockIdx.x;
    const u32 token_id = tokens[order[0]], at = token_id - first;
    if (at >= table_rows || token_id == padding) return;
    dtable += u64(at) * columns;
    const u32 lanes = gridDim.y * blockDim.x, lane = blockIdx.y * blockDim.x + threadIdx.x;
    each<V>(columns, lane, lanes, [&](auto size, u32 column) {
        constexpr int COUNT = decltype(size)::value;
        float sums[COUNT] = {}, row[COUNT];
#pragma unroll 8
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
           const T* dy, float* dtable, u32 columns, u32 first, u32 table_rows, u32 padding) {   \
        scatter_rows<T, V>(tokens, order, runs, dy, dtable, columns, first, table_rows,         \
                           padding);                                                            \
    }
EACH_FORMAT(EMBEDDING)
