// Element-wise reductions in the order of ranks, so that every rank obtains the same bits. bf16 is rounded after every
// addition, as in a ring.
#include <cstring>
#include "nccl.h"

enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, TYPES };

struct Bf16 {
    u16 bits;
    Bf16() = default;
    Bf16(float value) {
        u32 whole;
        memcpy(&whole, &value, 4);
        bits = value != value ? u16(whole >> 16 | 0x40)
                              : u16((whole + 0x7fff + (whole >> 16 & 1)) >> 16);
    }
    operator float() const {
        const u32 whole = u32(bits) << 16;
        float value;
        memcpy(&value, &whole, 4);
        return value;
    }
};

u64 width_of(u32 type) {
    constexpr u64 widths[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return type < TYPES ? widths[type] : 0;
}

bool can_reduce(u32 type, u32 operation) {
    const bool whole = type < FLOAT16;
    return type < TYPES && type != FLOAT16 && operation <= AVERAGE && !(whole && operation == AVERAGE);
}

template <class T>
static void reduce_all(void* to, const void* from, u64 count, u32 operation) {
    T* sum = static_cast<T*>(to);
    const T* other = static_cast<const T*>(from);
    for (u64 at = 0; at < count; at++) {
        const T a = sum[at], b = other[at];
        switch (operation) {
            case PRODUCT: sum[at] = T(a * b); break;
            case MAXIMUM: sum[at] = a < b || b != b ? b : a; break;
            case MINIMUM: sum[at] = b < a || b != b ? b : a; break;
            default: sum[at] = T(a + b);
        }
    }
}

void reduce(void* sum, const void* other, u64 count, u32 type, u32 operation) {
    switch (type) {
        case INT8: return reduce_all<signed char>(sum, other, count, operation);
        case UINT8: return reduce_all<u8>(sum, other, count, operation);
        case INT32: return reduce_all<int>(sum, other, count, operation);
        case UINT32: return reduce_all<u32>(sum, other, count, operation);
        case INT64: return reduce_all<long long>(sum, other, count, operation);
        case UINT64: return reduce_all<u64>(sum, other, count, operation);
        case FLOAT32: return reduce_all<float>(sum, other, count, operation);
        case FLOAT64: return reduce_all<double>(sum, other, count, operation);
        case BFLOAT16: return reduce_all<Bf16>(sum, other, count, operation);
    }
}

template <class T>
static void divide_all(void* of, u64 count, int by) {
    T* elements = static_cast<T*>(of);
    for (u64 at = 0; at < count; at++) elements[at] = T(elements[at] / T(float(by)));
}

void divide(void* sum, u64 count, u32 type, int by) {
    switch (type) {
        case FLOAT32: return divide_all<float>(sum, count, by);
        case FLOAT64: return divide_all<double>(sum, count, by);
        case BFLOAT16: return divide_all<Bf16>(sum, count, by);
    }
}
