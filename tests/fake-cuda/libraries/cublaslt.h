// Descriptors of the fake cuBLASLt.
#pragma once
#include "gemm.h"

enum {
    STATUS_SUCCESS = 0,
    STATUS_INVALID_VALUE = 7,
    STATUS_EXECUTION_FAILED = 13,
    STATUS_NOT_SUPPORTED = 15,
};
enum { REAL_32 = 0, REAL_BF16 = 14 };
enum { COMPUTE_32 = 68, COMPUTE_32_PEDANTIC = 69, COMPUTE_32_FAST_BF16 = 75, COMPUTE_32_FAST_TF32 = 77 };
enum { SCHEME_NONE = 0, SCHEME_COMPUTE_TYPE = 2, SCHEME_OUTPUT_TYPE = 4, SCHEME_MASK = 7 };

// cublasLtMatmulAlgo_t: bindings store it by value.
struct Algorithm {
    u64 data[8];
};

struct Heuristic {
    Algorithm algorithm;
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

struct Layout {
    u32 type;
    u64 rows, columns;
    int64_t leading;
    int order = 0;
    int batch = 1;
    int64_t stride = 0;

    u64 width() const { return type == REAL_BF16 ? 2 : 4; }
    // Bytes from the first element to the end of the last.
    u64 bytes() const {
        return (u64(batch - 1) * u64(stride) + (columns - 1) * u64(leading) + rows) * width();
    }
};

struct Description {
    int compute;
    int scale;
    int pointer_mode = 0;
    int transpose_a = 0, transpose_b = 0;
};

struct Preference {
    u64 workspace_bytes = 0;
    u32 schemes = SCHEME_MASK;
    // Guaranteed alignment of A, B, C and D, with cuBLASLt's default.
    u32 alignment[4] = {256, 256, 256, 256};
};

// Contents of an algorithm's 64 bytes.
struct Choice {
    int id;
    u32 splits, scheme, alignment;

    static bool decode(const Algorithm& from, Choice& to);
    Algorithm encode() const;
    // Workspace that it needs for a matmul.
    u64 workspace_bytes(const Layout& d) const;
};

// Why a matmul is not supported; null if it is.
const char* defect(const Description& of, const Layout& a, const Layout& b, const Layout& c,
                   const Layout& d);
