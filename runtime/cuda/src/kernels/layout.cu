// Packing and unpacking around a reshard: the parts of a tensor, gathered one after the other or scattered
// back to their places.
//
// A tensor is rows of sections side by side, and each part has an equal share of every section of every
// row: part p of section s is the columns p·count_s to (p + 1)·count_s of s. Where `mirrored`, the parts of
// section 1 are in reverse order: of two equal sections, each part has a share from either end. The row stride is
// `whole_row` in the tensor and `part_row` in a part; parts are `part_elements` apart. Block (x, y, z) copies
// columns z·chunk to (z + 1)·chunk of every share of part first + y in some rows.
#include "device.cuh"

constexpr int SECTIONS = 8;

template <class T, int V, bool PACK>
DEVICE void copy_parts(const T* from, T* to, const u32 (&counts)[SECTIONS], u32 rows, u32 parts,
                       u32 first, u32 mirrored, u32 chunk, u64 whole_row, u64 part_row,
                       u64 part_elements) {
    const RowTeam team = row_team(rows);
    if (!team.live) return;
    u64 of_whole = team.row * whole_row;
    u64 of_part = blockIdx.y * part_elements + team.row * part_row;
    const u32 part = first + blockIdx.y, begin = blockIdx.z * chunk;
#pragma unroll
    for (int section = 0; section < SECTIONS; section++) {
        const u32 count = counts[section];
        if (begin < count) {
            const u32 place = section == 1 && mirrored ? parts - 1 - part : part;
            const u64 in_whole = of_whole + u64(place) * count + begin, in_part = of_part + begin;
            const T* source = from + (PACK ? in_whole : in_part);
            T* target = to + (PACK ? in_part : in_whole);
            each<V>(min(count - begin, chunk), team.lane, team.lanes, [&](auto size, u32 column) {
                copy<T, decltype(size)::value>(source + column, target + column);
            });
        }
        of_whole += u64(count) * parts;
        of_part += count;
    }
}

#define LAYOUT(T, V, ending)                                                                      \
    KERNEL(256, 4, pack_##ending, const T* from, T* to, u32 c0, u32 c1, u32 c2, u32 c3, u32 c4,   \
           u32 c5, u32 c6, u32 c7, u32 rows, u32 parts, u32 first, u32 mirrored, u32 chunk,       \
           u64 whole_row, u64 part_row, u64 part_elements) {                                      \
        copy_parts<T, V, true>(from, to, {c0, c1, c2, c3, c4, c5, c6, c7}, rows, parts, first,    \
            mirrored, chunk, whole_row, part_row, part_elements);                                 \
    }                                                                                             \
    KERNEL(256, 4, unpack_##ending, const T* from, T* to, u32 c0, u32 c1, u32 c2, u32 c3, u32 c4, \
           u32 c5, u32 c6, u32 c7, u32 rows, u32 parts, u32 first, u32 mirrored, u32 chunk,       \
           u64 whole_row, u64 part_row, u64 part_elements) {                                      \
        copy_parts<T, V, false>(from, to, {c0, c1, c2, c3, c4, c5, c6, c7}, rows, parts, first,   \
            mirrored, chunk, whole_row, part_row, part_elements);                                 \
    }
EACH_FORMAT(LAYOUT)
