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

// The two bf16 of a register as floats.
inline void unpack(u32 pair, float& lower, float& upper) {
    const u32 low = pair << 16, high = pair & 0xffff0000u;
    memcpy(&lower, &low, 4);
    memcpy(&upper, &high, 4);
}

inline MatrixRegisters load_rows(const void* row, bool transposed, Barrier barrier) {
    if (reinterpret_cast<uintptr_t>(row) % 16) {
        fail(barrier.operation, "a row is not aligned to 16 bytes", barrier.file, barrier.line);
    }
    return exchange<MatrixRegisters>(
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

// c += a·b, summed in the order of k.
inline void multiply(const Fragments* fragments, Accumulators* results) {
    float a[16][16], b[16][8], c[16][8];
    for (u32 lane = 0; lane < 32; lane++) {
        const Fragments& of = fragments[lane];
        const u32 row = lane / 4, column = lane % 4 * 2;
        for (u32 half = 0; half < 2; half++) {
            for (u32 part = 0; part < 2; part++) {
                float* to = &a[row + part * 8][column + half * 8];
                unpack(of.a[part + half * 2], to[0], to[1]);
            }
            unpack(of.b[half], b[column + half * 8][row], b[column + half * 8 + 1][row]);
            c[row + half * 8][column] = of.c[half * 2];
            c[row + half * 8][column + 1] = of.c[half * 2 + 1];
        }
    }
    typedef float Row __attribute__((vector_size(32)));
    for (u32 i = 0; i < 16; i++) {
        Row sum, factor;
        memcpy(&sum, c[i], sizeof sum);
        for (u32 k = 0; k < 16; k++) {
            memcpy(&factor, b[k], sizeof factor);
            sum += factor * a[i][k];
        }
        memcpy(c[i], &sum, sizeof sum);
    }
    for (u32 lane = 0; lane < 32; lane++) {
        const u32 row = lane / 4, column = lane % 4 * 2;
        for (u32 at = 0; at < 4; at++) results[lane].c[at] = c[row + at / 2 * 8][column + at % 2];
    }
}

}  // namespace shim

inline void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2], SHIM_SITE) {
    const shim::Fragments fragments = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {c[0], c[1], c[2], c[3]}};
    const auto results = shim::exchange<shim::Accumulators>(
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
