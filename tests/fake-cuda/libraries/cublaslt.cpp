// The fake cuBLASLt: descriptors, and the choice of algorithms.
//
// There are three algorithms, the most demanding first: one that splits k and adds the parts in its workspace, in f32 or,
// where allowed, in the result's type; one that needs aligned operands; one without requirements.
#include "cublaslt.h"
#include <cstring>
#include <vector>

constexpr u64 MAGIC = 0x6e6172726f777331;
enum { SPLIT = 21, ALIGNED = 22, ANY = 23 };
constexpr u32 VECTOR_BYTES = 16, SPLITS_MAX = 4;

bool Choice::decode(const Algorithm& from, Choice& to) {
    if (from.data[0] != MAGIC) return false;
    to = {int(from.data[1]), u32(from.data[2]), u32(from.data[3]), u32(from.data[4])};
    return to.id >= SPLIT && to.id <= ANY && to.splits >= 1;
}

Algorithm Choice::encode() const {
    return {{MAGIC, u64(id), splits, scheme, alignment, 0, 0, 0}};
}

u64 Choice::workspace_bytes(const Layout& d) const {
    if (splits == 1) return 0;
    return (splits * d.rows * d.columns * u64(d.batch) * 4 + 255) / 256 * 256;
}

static bool is_known(u32 type) { return type == REAL_32 || type == REAL_BF16; }

const char* defect(const Description& of, const Layout& a, const Layout& b, const Layout& c,
                   const Layout& d) {
    const bool sums = of.compute == COMPUTE_32 || of.compute == COMPUTE_32_PEDANTIC ||
                      of.compute == COMPUTE_32_FAST_TF32 || of.compute == COMPUTE_32_FAST_BF16;
    if (!sums || of.scale != REAL_32) return "only accumulation and scaling in f32 are supported";
    if (of.pointer_mode) return "only scaling factors in host memory are supported";
    if (!is_known(a.type) || a.type != b.type || !is_known(c.type) || c.type != d.type) {
        return "the combination of types is not supported";
    }
    if (a.type == REAL_32 && d.type != REAL_32) return "cuBLASLt does not support f32 into bf16";
    for (const Layout* layout : {&a, &b, &c, &d}) {
        if (layout->order) return "only column-major layouts are supported";
        if (!layout->rows || !layout->columns) return "a dimension is 0";
        if (layout->leading < int64_t(layout->rows)) return "a leading dimension is smaller than the rows";
        if (layout->batch != d.batch || layout->batch < 1) return "the batch counts differ";
        if (layout->rows > 0x7fffffff || layout->columns > 0x7fffffff) return "a dimension exceeds 32 bits";
    }
    const u64 m = of.transpose_a ? a.columns : a.rows, k = of.transpose_a ? a.rows : a.columns;
    const u64 k_of_b = of.transpose_b ? b.columns : b.rows, n = of.transpose_b ? b.rows : b.columns;
    if (k_of_b != k || d.rows != m || d.columns != n || c.rows != m || c.columns != n) {
        return "the shapes do not match";
    }
    return nullptr;
}

static int refused(const char* reason) {
    fake_cuda::report(std::string("a matmul is not supported: ") + reason);
    return STATUS_INVALID_VALUE;
}

template <class T>
static int read(T& to, const void* from, size_t bytes) {
    if (!from || bytes != sizeof(T)) return STATUS_INVALID_VALUE;
    memcpy(&to, from, sizeof(T));
    return STATUS_SUCCESS;
}

EXPORT int cublasLtCreate(void** handle) {
    fake_cuda::Guard guard(fake_cuda::lock());
    if (fake_cuda::current_device() < 0) return 1;  // CUBLAS_STATUS_NOT_INITIALIZED
    *handle = new int(0);
    return STATUS_SUCCESS;
}
EXPORT int cublasLtDestroy(void* handle) {
    delete static_cast<int*>(handle);
    return STATUS_SUCCESS;
}
EXPORT size_t cublasLtGetVersion() { return 120900; }
EXPORT const char* cublasLtGetStatusString(int status) {
    switch (status) {
        case STATUS_SUCCESS: return "success";
        case STATUS_INVALID_VALUE: return "an unsupported value or parameter was passed";
        case STATUS_NOT_SUPPORTED: return "the functionality requested is not supported";
        default: return "the matmul failed";
    }
}

EXPORT int cublasLtMatmulDescCreate(Description** descriptor, int compute, int scale) {
    *descriptor = new Description{compute, scale};
    return STATUS_SUCCESS;
}
EXPORT int cublasLtMatmulDescDestroy(Description* of) {
    delete of;
    return STATUS_SUCCESS;
}
EXPORT int cublasLtMatmulDescSetAttribute(Description* of, int which, const void* from, size_t bytes) {
    switch (which) {
        case 2: return read(of->pointer_mode, from, bytes);
        case 3: return read(of->transpose_a, from, bytes);
        case 4: return read(of->transpose_b, from, bytes);
        default: return STATUS_NOT_SUPPORTED;
    }
}

EXPORT int cublasLtMatrixLayoutCreate(Layout** descriptor, u32 type, u64 rows, u64 columns, int64_t leading) {
    *descriptor = new Layout{type, rows, columns, leading};
    return STATUS_SUCCESS;
}
EXPORT int cublasLtMatrixLayoutDestroy(Layout* of) {
    delete of;
    return STATUS_SUCCESS;
}
EXPORT int cublasLtMatrixLayoutSetAttribute(Layout* of, int which, const void* from, size_t bytes) {
    switch (which) {
        case 0: return read(of->type, from, bytes);
        case 1: return read(of->order, from, bytes);
        case 2: return read(of->rows, from, bytes);
        case 3: return read(of->columns, from, bytes);
        case 4: return read(of->leading, from, bytes);
        case 5: return read(of->batch, from, bytes);
        case 6: return read(of->stride, from, bytes);
        default: return STATUS_NOT_SUPPORTED;
    }
}

EXPORT int cublasLtMatmulPreferenceCreate(Preference** descriptor) {
    *descriptor = new Preference;
    return STATUS_SUCCESS;
}
EXPORT int cublasLtMatmulPreferenceDestroy(Preference* of) {
    delete of;
    return STATUS_SUCCESS;
}
EXPORT int cublasLtMatmulPreferenceSetAttribute(Preference* of, int which, const void* from,
                                                size_t bytes) {
    switch (which) {
        case 1: return read(of->workspace_bytes, from, bytes);
        case 3: return read(of->schemes, from, bytes);
        case 5: case 6: case 7: case 8: return read(of->alignment[which - 5], from, bytes);
        // The number of waves and the implementation mask have no effect here.
        case 9: case 12: return STATUS_SUCCESS;
        default: return STATUS_NOT_SUPPORTED;
    }
}

static Heuristic heuristic(const Choice& choice, const Layout& d) {
    Heuristic result = {};
    result.algorithm = choice.encode();
    result.workspace_bytes = choice.workspace_bytes(d);
    result.state = STATUS_SUCCESS;
    result.waves = 1.0f;
    return result;
}

EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, Description* of, Layout* a, Layout* b, Layout* c,
                                          Layout* d, Preference* preference, int requested,
                                          Heuristic* results, int* count) {
    *count = 0;
    if (const char* why = defect(*of, *a, *b, *c, *d)) return refused(why);
    u32 alignment = 256;
    for (u32 promised : preference->alignment) alignment = promised < alignment ? promised : alignment;
    std::vector<Choice> choices;
    const u64 k = of->transpose_a ? a->rows : a->columns;
    const u32 allowed = preference->schemes & (SCHEME_COMPUTE_TYPE | SCHEME_OUTPUT_TYPE);
    // Adding parts in the result's type is the least exact, so it is preferred where allowed.
    const u32 scheme = allowed & SCHEME_OUTPUT_TYPE ? u32(SCHEME_OUTPUT_TYPE) : allowed;
    const u32 splits = u32(k < SPLITS_MAX ? k : SPLITS_MAX);
    if (scheme && splits > 1) choices.push_back({SPLIT, splits, scheme, 1});
    if (alignment >= VECTOR_BYTES) choices.push_back({ALIGNED, 1, SCHEME_NONE, VECTOR_BYTES});
    choices.push_back({ANY, 1, SCHEME_NONE, 1});
    for (const Choice& choice : choices) {
        if (choice.workspace_bytes(*d) > preference->workspace_bytes) continue;
        if (*count < requested) results[(*count)++] = heuristic(choice, *d);
    }
    return STATUS_SUCCESS;
}

EXPORT int cublasLtMatmulAlgoCheck(void*, Description* of, Layout* a, Layout* b, Layout* c, Layout* d,
                                   const Algorithm* algorithm, Heuristic* result) {
    if (const char* why = defect(*of, *a, *b, *c, *d)) return refused(why);
    Choice choice;
    if (!Choice::decode(*algorithm, choice)) return STATUS_INVALID_VALUE;
    if (choice.splits > (of->transpose_a ? a->rows : a->columns)) return STATUS_NOT_SUPPORTED;
    *result = heuristic(choice, *d);
    return STATUS_SUCCESS;
}

EXPORT int cublasLtMatmulAlgoGetIds(void*, int, int, int, int, int, int, int requested, int* ids, int* count) {
    *count = 0;
    for (int id = SPLIT; id <= ANY && *count < requested; id++) ids[(*count)++] = id;
    return STATUS_SUCCESS;
}

EXPORT int cublasLtMatmulAlgoInit(void*, int, int, int, int, int, int, int id, Algorithm* algorithm) {
    if (id < SPLIT || id > ANY) return STATUS_INVALID_VALUE;
    const Choice choice = {id, id == SPLIT ? 2u : 1u, u32(id == SPLIT ? SCHEME_COMPUTE_TYPE : SCHEME_NONE),
                           id == ALIGNED ? VECTOR_BYTES : 1};
    *algorithm = choice.encode();
    return STATUS_SUCCESS;
}

// Attributes: algorithm id, number of splits of k, and reduction scheme.
EXPORT int cublasLtMatmulAlgoConfigGetAttribute(const Algorithm* algorithm, int which, void* to,
                                                size_t bytes, size_t* written) {
    Choice choice;
    if (!Choice::decode(*algorithm, choice) || bytes < 4) return STATUS_INVALID_VALUE;
    const u32 value = which == 0 ? u32(choice.id) : which == 2 ? choice.splits : which == 3 ? choice.scheme : 0;
    memcpy(to, &value, 4);
    if (written) *written = 4;
    return STATUS_SUCCESS;
}

EXPORT int cublasLtMatmulAlgoConfigSetAttribute(Algorithm* algorithm, int which, const void* from,
                                                size_t bytes) {
    Choice choice;
    if (!Choice::decode(*algorithm, choice)) return STATUS_INVALID_VALUE;
    if (choice.id != SPLIT || (which != 2 && which != 3)) return STATUS_NOT_SUPPORTED;
    const int status = read(which == 2 ? choice.splits : choice.scheme, from, bytes);
    if (status || !choice.splits) return STATUS_INVALID_VALUE;
    *algorithm = choice.encode();
    return STATUS_SUCCESS;
}
