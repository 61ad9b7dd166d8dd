// Matmuls as operations on streams.
//
// An algorithm that splits k takes two steps: parts into the workspace, then their sum. Other operations may run in
// between, and changes they make to the workspace or the operands show in the result. Every algorithm overwrites the
// whole workspace it receives.
#include <algorithm>
#include <cstring>
#include <vector>
#include "cublaslt.h"

using fake_cuda::Step;

struct Matmul {
    Description description;
    Layout a, b, c, d;
    const void *at_a, *at_b, *at_c;
    void* at_d;
    float alpha, beta;
    Choice choice;
    char* workspace;
    u64 workspace_bytes;
    std::string name;

    u64 depth() const { return description.transpose_a ? a.rows : a.columns; }

    bool within(int device) const {
        using fake_cuda::check_range;
        return check_range(device, at_a, a.bytes(), "A of " + name) &&
               check_range(device, at_b, b.bytes(), "B of " + name) &&
               (beta == 0 || check_range(device, at_c, c.bytes(), "C of " + name)) &&
               check_range(device, at_d, d.bytes(), "D of " + name) &&
               (!workspace_bytes || check_range(device, workspace, workspace_bytes, "workspace of " + name));
    }

    Matrix matrix(const Layout& layout, const void* at, int transposed, u64 member) const {
        const char* first = static_cast<const char*>(at) + member * u64(layout.stride) * layout.width();
        return {first, layout.type == REAL_BF16, transposed != 0, u64(layout.leading)};
    }

    // Computes one split of the sum over k for one batch member.
    void part(u64 member, u64 split, float* sums) const {
        const u64 k = depth(), each = (k + choice.splits - 1) / choice.splits;
        const u64 from = split * each < k ? split * each : k, to = from + each < k ? from + each : k;
        std::fill_n(sums, d.rows * d.columns, 0.0f);
        accumulate_gemm({d.rows, d.columns, from, to}, matrix(a, at_a, description.transpose_a, member),
                    matrix(b, at_b, description.transpose_b, member), sums);
    }

    // D = α·sums + β·C for one batch member.
    void finish(u64 member, const float* sums) const {
        for (u64 j = 0; j < d.columns; j++) {
            const u64 from = member * u64(c.stride) + j * u64(c.leading);
            const u64 to = member * u64(d.stride) + j * u64(d.leading);
            for (u64 i = 0; i < d.rows; i++) {
                float value = alpha * sums[j * d.rows + i];
                if (beta != 0) {
                    value += beta * (c.type == REAL_BF16 ? bf16_to_float(static_cast<const u16*>(at_c)[from + i])
                                                         : static_cast<const float*>(at_c)[from + i]);
                }
                if (d.type == REAL_BF16) static_cast<u16*>(at_d)[to + i] = float_to_bf16(value);
                else static_cast<float*>(at_d)[to + i] = value;
            }
        }
    }

    // Whether A is zero in all elements of the first batch member.
    bool is_of_zeros() const {
        const Matrix first = matrix(a, at_a, 0, 0);
        for (u64 column = 0; column < a.columns; column++) {
            for (u64 row = 0; row < a.rows; row++) {
                const u64 at = column * first.leading + row;
                if (first.is_bf16 ? static_cast<const u16*>(first.first)[at] != 0
                                  : static_cast<const float*>(first.first)[at] != 0) {
                    return false;
                }
            }
        }
        return true;
    }

    // Overwrites the workspace: its first pages densely, then a few places.
    void overwrite_workspace() const {
        constexpr u64 DENSE = 64 << 10, PLACES = 256, PIECE = 64;
        const u64 stride = (workspace_bytes / PLACES + PIECE) / PIECE * PIECE;
        for (u64 at = 0; at < workspace_bytes; at += at < DENSE ? PIECE : stride) {
            const u64 left = workspace_bytes - at;
            memset(workspace + at, 0xff, left < PIECE ? left : PIECE);
        }
        if (workspace_bytes) workspace[workspace_bytes - 1] = char(0xff);
    }
};

struct MatmulRun : fake_cuda::Run {
    std::shared_ptr<const Matmul> matmul;
    bool parts_done = false;

    float* partial(u64 member, u64 split) {
        const Matmul& of = *matmul;
        const u64 each = of.d.rows * of.d.columns;
        return reinterpret_cast<float*>(of.workspace) + (member * of.choice.splits + split) * each;
    }

    Step step(int device) override {
        const Matmul& of = *matmul;
        if (!of.within(device)) return Step::done;
        if (!parts_done && of.is_of_zeros()) fake_cuda::log("zeros in " + of.name);
        const u64 each = of.d.rows * of.d.columns, members = u64(of.d.batch);
        if (of.choice.splits == 1) {
            of.overwrite_workspace();
            std::vector<float> sums(each);
            for (u64 member = 0; member < members; member++) {
                of.part(member, 0, sums.data());
                of.finish(member, sums.data());
            }
            return Step::done;
        }
        if (!parts_done) {
            of.overwrite_workspace();
            for (u64 member = 0; member < members; member++) {
                for (u64 split = 0; split < of.choice.splits; split++) {
                    of.part(member, split, partial(member, split));
                }
            }
            parts_done = true;
            return Step::moved;
        }
        const bool narrow = of.choice.scheme == SCHEME_OUTPUT_TYPE && of.d.type == REAL_BF16;
        std::vector<float> sums(each);
        for (u64 member = 0; member < members; member++) {
            std::fill(sums.begin(), sums.end(), 0.0f);
            for (u64 split = 0; split < of.choice.splits; split++) {
                const float* from = partial(member, split);
                for (u64 at = 0; at < each; at++) {
                    const float part = narrow ? bf16_to_float(float_to_bf16(from[at])) : from[at];
                    sums[at] = narrow ? bf16_to_float(float_to_bf16(sums[at] + part)) : sums[at] + part;
                }
            }
            of.finish(member, sums.data());
        }
        of.overwrite_workspace();
        return Step::done;
    }
};

struct MatmulOperation : fake_cuda::Operation {
    std::shared_ptr<const Matmul> matmul;
    explicit MatmulOperation(std::shared_ptr<const Matmul> matmul)
        : Operation(matmul->name), matmul(std::move(matmul)) {}
    std::unique_ptr<fake_cuda::Run> start() const override {
        auto run = std::make_unique<MatmulRun>();
        run->matmul = matmul;
        return run;
    }
};

static int refused(const std::string& reason) {
    fake_cuda::report("a matmul is rejected: " + reason);
    return STATUS_INVALID_VALUE;
}

static bool is_aligned(const void* at, u64 to) { return reinterpret_cast<u64>(at) % to == 0; }

EXPORT int cublasLtMatmul(void*, Description* description, const float* alpha, const void* at_a, Layout* a,
                          const void* at_b, Layout* b, const float* beta, const void* at_c, Layout* c,
                          void* at_d, Layout* d, const Algorithm* algorithm, void* workspace,
                          size_t workspace_bytes, CUstream stream) {
    if (const char* why = defect(*description, *a, *b, *c, *d)) return refused(why);
    // Without an algorithm cuBLASLt chooses one: here, the one without requirements.
    Choice choice = {23, 1, SCHEME_NONE, 1};
    if (algorithm && !Choice::decode(*algorithm, choice)) return refused("its algorithm is invalid");
    if (choice.splits > (description->transpose_a ? a->rows : a->columns)) {
        return refused("its algorithm splits k into more parts than k");
    }
    if (choice.workspace_bytes(*d) > workspace_bytes) return refused("its algorithm needs more workspace");
    if (workspace_bytes && !is_aligned(workspace, 256)) {
        return refused("its workspace is not aligned to 256 bytes");
    }
    for (const auto& [at, layout] : {std::pair{at_a, a}, {at_b, b}, {at_c, c}, {(const void*)at_d, d}}) {
        const u64 required = choice.alignment > layout->width() ? choice.alignment : layout->width();
        const u64 stride = u64(layout->stride) * layout->width();
        if (!is_aligned(at, required) || (layout->batch > 1 && stride % required)) {
            return refused("an operand is not aligned to the " + std::to_string(required) +
                           " bytes that its algorithm needs");
        }
    }
    auto matmul = std::make_shared<Matmul>();
    *matmul = {*description, *a, *b, *c, *d, at_a, at_b, at_c, at_d, *alpha, *beta, choice,
                static_cast<char*>(workspace), workspace_bytes, ""};
    matmul->name = "matmul " + std::to_string(d->rows) + "x" + std::to_string(d->columns) + "x" +
                    std::to_string(matmul->depth()) + " batch=" + std::to_string(d->batch) +
                    " algorithm=" + std::to_string(choice.id);
    fake_cuda::Guard guard(fake_cuda::lock());
    const int result = fake_cuda::queue(stream, std::make_shared<MatmulOperation>(matmul));
    return result ? STATUS_EXECUTION_FAILED : STATUS_SUCCESS;
}
