// Sums and maxima, number by number, in the order of ranks: the same bits on every rank. bf16 is
// rounded after every addition, as it is where a ring passes it on.
#include <cstring>
#include "nccl.h"

enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, TYPES };
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE };

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
    const T* more = static_cast<const T*>(from);
    for (u64 at = 0; at < count; at++) {
        const T a = sum[at], b = more[at];
        switch (operation) {
            case PRODUCT: sum[at] = T(a * b); break;
            case MAXIMUM: sum[at] = a < b || b != b ? b : a; break;
            case MINIMUM: sum[at] = b < a || b != b ? b : a; break;
            default: sum[at] = T(a + b);
        }
    }
}

void reduce(void* sum, const void* more, u64 count, u32 type, u32 operation) {
    switch (type) {
        case INT8: return reduce_all<signed char>(sum, more, count, operation);
        case UINT8: return reduce_all<u8>(sum, more, count, operation);
        case INT32: return reduce_all<int>(sum, more, count, operation);
        case UINT32: return reduce_all<u32>(sum, more, count, operation);
        case INT64: return reduce_all<long long>(sum, more, count, operation);
        case UINT64: return reduce_all<u64>(sum, more, count, operation);
        case FLOAT32: return reduce_all<float>(sum, more, count, operation);
        case FLOAT64: return reduce_all<double>(sum, more, count, operation);
        case BFLOAT16: return reduce_all<Bf16>(sum, more, count, operation);
    }
}

template <class T>
static void divide_all(void* of, u64 count, int by) {
    T* numbers = static_cast<T*>(of);
    for (u64 at = 0; at < count; at++) numbers[at] = T(numbers[at] / T(float(by)));
}

void divide(void* sum, u64 count, u32 type, int by) {
    switch (type) {
        case FLOAT32: return divide_all<float>(sum, count, by);
        case FLOAT64: return divide_all<double>(sum, count, by);
        case BFLOAT16: return divide_all<Bf16>(sum, count, by);
    }
}
