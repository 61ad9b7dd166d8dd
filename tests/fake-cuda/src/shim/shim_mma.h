// The instructions of mma.cuh on the CPU.
#pragma once
#include "shim.h"

namespace shim {

// What one lane holds of the matrices of an mma.
struct Fragments {
    u32 a[4], b[2];
    float c[4];
};

struct Accumulators {
    float c[4];
};

// A quarter of an 8×8 matrix from each of four matrices.
struct MatrixRegisters {
    u32 of[4];
};

inline MatrixRegisters load_rows(const void* row, bool transposed, Barrier barrier) {
    if (reinterpret_cast<uintptr_t>(row) % 16) {
        fail(barrier.operation, "a row is not aligned to 16 bytes", barrier.file, barrier.line);
    }
    return warp_operation<MatrixRegisters>(
        row, 0xffffffffu, barrier, [&](const void* const* rows, MatrixRegisters* registers) {
            for (u32 matrix = 0; matrix < 4; matrix++) {
                u16 elements[8][8];
                for (u32 i = 0; i < 8; i++) memcpy(elements[i], rows[matrix * 8 + i], 16);
                for (u32 lane = 0; lane < 32; lane++) {
                    const u32 i = lane / 4, j = lane % 4 * 2;
                    const u16 first = transposed ? elements[j][i] : elements[i][j];
                    const u16 second = transposed ? elements[j + 1][i] : elements[i][j + 1];
                    registers[lane].of[matrix] = u32(second) << 16 | first;
                }
            }
        });
}

// Four floats, or four pairs of bf16.
typedef float Floats __attribute__((vector_size(16)));
typedef u32 Pairs __attribute__((vector_size(16)));

// The lower (even) and the upper (odd) bf16 of four pairs.
inline Floats lower(Pairs pairs) { return Floats(pairs << 16); }
inline Floats upper(Pairs pairs) { return Floats(pairs & 0xffff0000u); }

inline float as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// c += a·b, summed in the order of k. Registers hold pairs of bf16 with consecutive k.
inline void multiply(const Fragments* fragments, Accumulators* results) {
    u32 a[16][8];
    u32 b[8][8];
    float c[16][8];
    for (u32 lane = 0; lane < 32; lane++) {
        const Fragments& of = fragments[lane];
        const u32 row = lane / 4, pair = lane % 4;
        for (u32 half = 0; half < 2; half++) {
            a[row][pair + half * 4] = of.a[half * 2];
            a[row + 8][pair + half * 4] = of.a[half * 2 + 1];
            b[pair + half * 4][row] = of.b[half];
            memcpy(&c[row + half * 8][pair * 2], &of.c[half * 2], 8);
        }
    }
    // The even and the odd rows of b, four columns each.
    Floats even[8][2], odd[8][2];
    for (u32 pair = 0; pair < 8; pair++) {
        for (u32 half = 0; half < 2; half++) {
            Pairs columns;
            memcpy(&columns, &b[pair][half * 4], sizeof columns);
            even[pair][half] = lower(columns);
            odd[pair][half] = upper(columns);
        }
    }
    for (u32 i = 0; i < 16; i++) {
        Floats sums[2];
        memcpy(sums, c[i], sizeof sums);
        for (u32 pair = 0; pair < 8; pair++) {
            const float first = as_float(a[i][pair] << 16), second = as_float(a[i][pair] & 0xffff0000u);
            for (u32 half = 0; half < 2; half++) {
                sums[half] += even[pair][half] * first;
                sums[half] += odd[pair][half] * second;
            }
        }
        memcpy(c[i], sums, sizeof sums);
    }
    for (u32 lane = 0; lane < 32; lane++) {
        const u32 row = lane / 4, pair = lane % 4;
        for (u32 half = 0; half < 2; half++) {
            memcpy(&results[lane].c[half * 2], &c[row + half * 8][pair * 2], 8);
        }
    }
}

}  // namespace shim

inline void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2], SHIM_SITE) {
    const shim::Fragments fragments = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {c[0], c[1], c[2], c[3]}};
    const auto results = shim::warp_operation<shim::Accumulators>(
        fragments, 0xffffffffu, {"mma_m16n8k16", file, line}, shim::multiply);
    memcpy(c, results.c, sizeof c);
}

inline void load_matrices(u32 (&to)[4], const void* row, SHIM_SITE) {
    const auto registers = shim::load_rows(row, false, {"load_matrices", file, line});
    memcpy(to, registers.of, sizeof to);
}

inline void load_matrices_transposed(u32 (&to)[4], const void* row, SHIM_SITE) {
    const auto registers = shim::load_rows(row, true, {"load_matrices_transposed", file, line});
    memcpy(to, registers.of, sizeof to);
}

// The copied bytes are written when they are waited for, and not before.
inline void start_copy(void* to, const void* from, bool in_bounds, SHIM_SITE) {
    const auto misaligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 != 0; };
    if (misaligned(to) || (in_bounds && misaligned(from))) {
        shim::fail("start_copy", "an address is not aligned to 16 bytes", file, line);
    }
    shim::Copy copy{to, {}};
    if (in_bounds) memcpy(copy.bytes, from, 16);
    shim::block.current->copies.push_back(copy);
}

inline void end_copy_group() {
    shim::Thread& self = *shim::block.current;
    self.group_ends.push_back(self.copies.size());
}

template <int PENDING>
void wait_for_copies() {
    auto& copies = shim::block.current->copies;
    auto& group_ends = shim::block.current->group_ends;
    if (group_ends.size() <= PENDING) return;
    const size_t groups = group_ends.size() - PENDING, end = group_ends[groups - 1];
    for (size_t at = 0; at < end; at++) memcpy(copies[at].to, copies[at].bytes, 16);
    copies.erase(copies.begin(), copies.begin() + long(end));
    group_ends.erase(group_ends.begin(), group_ends.begin() + long(groups));
    for (size_t& group_end : group_ends) group_end -= end;
}
