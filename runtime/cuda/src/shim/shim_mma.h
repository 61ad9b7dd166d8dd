// mma.cuh on processors.
#pragma once
#include "shim.h"

namespace shim {

struct Fragments {
    u32 a[4], b[2];
};

// One of the two bf16 in a register.
inline float half_of(u32 pair, u32 which) {
    const u32 bits = which ? pair & 0xffff0000u : pair << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline void load_rows(u32 (&to)[4], const void* row, bool transposed, Barrier at) {
    if (reinterpret_cast<uintptr_t>(row) % 16) fail(at.what, "a row not aligned to 16 bytes", at.file, at.line);
    const auto slots = exchange(row, 0xffffffffu, at);
    const u32 lane = block.current->number % 32;
    for (u32 matrix = 0; matrix < 4; matrix++) {
        u16 pair[2];
        for (u32 which = 0; which < 2; which++) {
            u32 i = lane / 4, j = lane % 4 * 2 + which;
            if (transposed) std::swap(i, j);
            const auto* numbers = lane_of<const u16*>(slots, matrix * 8 + i);
            pair[which] = numbers[j];
        }
        to[matrix] = u32(pair[1]) << 16 | pair[0];
    }
    // Nobody writes to the rows before all have read them.
    wait_for_warp(at);
}

}  // namespace shim

inline void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2], SHIM_SITE) {
    using namespace shim;
    const Fragments mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    const auto slots = exchange(mine, 0xffffffffu, {"mma_m16n8k16", file, line});
    const u32 lane = block.current->number % 32;
    Fragments of[32];
    for (u32 other = 0; other < 32; other++) of[other] = lane_of<Fragments>(slots, other);
    for (u32 at = 0; at < 4; at++) {
        const u32 lower = at / 2, row = lane / 4, column = lane % 4 * 2 + at % 2;
        for (u32 k = 0; k < 16; k++) {
            const u32 pair = k % 8 / 2;
            const float left = half_of(of[row * 4 + pair].a[lower + k / 8 * 2], k % 2);
            c[at] += left * half_of(of[column * 4 + pair].b[k / 8], k % 2);
        }
    }
}

inline void load_matrices(u32 (&to)[4], const void* row, SHIM_SITE) {
    shim::load_rows(to, row, false, {"load_matrices", file, line});
}

inline void load_matrices_transposed(u32 (&to)[4], const void* row, SHIM_SITE) {
    shim::load_rows(to, row, true, {"load_matrices_transposed", file, line});
}

// What is copied arrives when it is waited for, and not before.
inline void begin_copy(void* to, const void* from, bool there, SHIM_SITE) {
    const auto misaligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 != 0; };
    if (misaligned(to) || (there && misaligned(from))) {
        shim::fail("begin_copy", "an address not aligned to 16 bytes", file, line);
    }
    shim::Copy copy{to, {}};
    if (there) memcpy(copy.of, from, 16);
    shim::block.current->copies.push_back(copy);
}

inline void end_copy_group() {
    auto& me = *shim::block.current;
    me.groups.push_back(std::move(me.copies));
    me.copies.clear();
}

template <int PENDING>
void wait_for_copies() {
    auto& groups = shim::block.current->groups;
    while (groups.size() > PENDING) {
        for (const shim::Copy& copy : groups.front()) memcpy(copy.to, copy.of, 16);
        groups.pop_front();
    }
}
