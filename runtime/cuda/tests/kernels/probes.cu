// Kernels that test the shim: correct ones, and ones with one mistake each.
#include "mma.cuh"
#include "reduce.cuh"

KERNEL(256, 1, last_warp_misses_a_barrier, u32* out) {
    if (threadIdx.x < 96) __syncthreads();
    out[threadIdx.x] = 1;
}

KERNEL(256, 1, waits_in_two_places, u32* out) {
    if (threadIdx.x < 40) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    out[threadIdx.x] = 1;
}

KERNEL(256, 1, half_a_warp_shuffles, u32* out) {
    u32 value = threadIdx.x;
    if (threadIdx.x % 32 < 16) value = __shfl_xor_sync(EVERY_LANE, value, 1);
    out[threadIdx.x] = value;
}

KERNEL(256, 1, leaves_lanes_out, u32* out) {
    out[threadIdx.x] = __shfl_xor_sync(0xffffu, threadIdx.x, 1);
}

// Lacks a barrier: a thread reads a value that its neighbour may not have written.
KERNEL(256, 1, reads_too_early, u32* out) {
    SHARED(u32[256], values);
    values[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = values[(threadIdx.x + 1) % blockDim.x];
}

// Has one barrier where two are needed: the second value may overwrite the first before all threads have read it.
KERNEL(256, 1, writes_too_early, u32* out) {
    SHARED(u32[256], values);
    u32 sum = 0;
    for (u32 round = 0; round < 2; round++) {
        values[threadIdx.x] = threadIdx.x + 1000 * round;
        __syncthreads();
        sum += values[(threadIdx.x + 37) % blockDim.x];
    }
    out[threadIdx.x] = sum;
}

KERNEL(256, 1, reads_after_a_barrier, u32* out) {
    SHARED(u32[256], values);
    values[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = values[(threadIdx.x + 1) % blockDim.x];
}

KERNEL(256, 1, shuffles, u32* out) {
    const u32 lane = threadIdx.x % 32;
    u32* mine = out + 4 * threadIdx.x;
    mine[0] = __shfl_sync(EVERY_LANE, threadIdx.x, 5);
    mine[1] = __shfl_xor_sync(EVERY_LANE, threadIdx.x, 3);
    mine[2] = __shfl_down_sync(EVERY_LANE, threadIdx.x, 4);
    __syncwarp();
    mine[3] = __shfl_up_sync(EVERY_LANE, threadIdx.x, 2) + 1000 * lane;
}

// c [16, 8] = a [16, 16] · b [16, 8] by one warp, all row-major. a and b are copied asynchronously to shared memory.
KERNEL(32, 1, matmul, const bf16* a, const bf16* b, float* c, u32 waits) {
    SHARED(bf16[16 * 16], left);
    SHARED(bf16[16 * 8], right);
    const u32 lane = threadIdx.x;
    start_copy(left + lane * 8, a + lane * 8, true);
    start_copy(right + lane % 16 * 8, b + lane % 16 * 8, true);
    end_copy_group();
    if (waits) wait_for_copies<0>();
    __syncthreads();
    u32 of_a[4], of_b[4];
    // Lanes 0 to 7 address the upper left quarter, the next ones the lower left, the upper right and the lower right.
    load_matrices(of_a, left + (lane % 16) * 16 + lane / 16 * 8);
    load_matrices_transposed(of_b, right + (lane % 16) * 8);
    const u32 both[2] = {of_b[0], of_b[1]};
    float sums[4] = {};
    mma_m16n8k16(sums, of_a, both);
    const u32 row = lane / 4, column = lane % 4 * 2;
    c[row * 8 + column] = sums[0];
    c[row * 8 + column + 1] = sums[1];
    c[(row + 8) * 8 + column] = sums[2];
    c[(row + 8) * 8 + column + 1] = sums[3];
}

#define CASTS(V, ending)                                                                    \
    KERNEL(256, 4, cast_f32_to_bf16_##ending, const float* from, bf16* to, u64 elements) {  \
        cast_elements<float, bf16, V>(from, to, elements);                                  \
    }                                                                                       \
    KERNEL(256, 4, cast_bf16_to_f32_##ending, const bf16* from, float* to, u64 elements) {  \
        cast_elements<bf16, float, V>(from, to, elements);                                  \
    }
CASTS(8, v8)
CASTS(1, v1)
