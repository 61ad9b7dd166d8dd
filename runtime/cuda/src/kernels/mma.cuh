// Tensor-core instructions of a warp, bf16 operands with f32 accumulation (sm_80 and later), and
// asynchronous copies from global to shared memory. The PTX manual, "Matrix fragments for
// mma.m16n8k16", defines which lane holds which elements; the shim implements the same on the CPU.
#pragma once
#include "device.cuh"

// Packs two values as bf16, the first in the lower half.
DEVICE u32 pair_of_bf16(float first, float second) {
#ifdef NARROWS_SHIM
    return u32(round_to_bf16(second)) << 16 | round_to_bf16(first);
#else
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#endif
}

#ifdef NARROWS_SHIM
#include "shim_mma.h"
#else

// c += a·b with a [16, 16] row-major, b [16, 8] column-major, c [16, 8].
DEVICE void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four 8×8 matrices of 16-bit elements from shared memory. Lanes 8i to 8i + 7 pass the addresses
// of the rows of matrix i, each aligned to 16 bytes.
DEVICE void load_matrices(u32 (&to)[4], const void* row) {
    const u32 address = u32(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// Loads four 8×8 matrices as `load_matrices` does, each transposed.
DEVICE void load_matrices_transposed(u32 (&to)[4], const void* row) {
    const u32 address = u32(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// Starts an asynchronous copy of 16 bytes to shared memory; writes zeros where `in_bounds` is false.
DEVICE void start_copy(void* to, const void* from, bool in_bounds) {
    const u32 address = u32(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(in_bounds ? 16 : 0)
                 : "memory");
}

// Closes the group of copies that this thread has started since the last call.
DEVICE void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups, the latest, are in flight. Other threads see the
// copied data after a barrier.
template <int PENDING>
DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#endif
