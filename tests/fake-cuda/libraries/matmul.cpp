// A product, on its stream.
//
// One that splits k takes two steps: parts into the workspace, then their sum. Others may run in
// between, and what they do to the workspace or the operands is seen in the result. Whatever the
// algorithm, all of the workspace that is handed over may be written to.
#include <algorithm>
#include <cstring>
#include <vector>
#include "cublaslt.h"

using stand_in::Step;

struct Product {
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
        using stand_in::inside;
        return inside(device, at_a, a.bytes(), "A of " + name) &&
               inside(device, at_b, b.bytes(), "B of " + name) &&
               (beta == 0 || inside(device, at_c, c.bytes(), "C of " + name)) &&
               inside(device, at_d, d.bytes(), "D of " + name) &&
               (!workspace_bytes || inside(device, workspace, workspace_bytes, "workspace of " + name));
    }

    Matrix matrix(const Layout& layout, const void* at, int transposed, u64 member) const {
        const char* first = static_cast<const char*>(at) + member * u64(layout.stride) * layout.width();
        return {first, layout.type == REAL_BF16, transposed != 0, u64(layout.leading)};
    }

    // A part of the sum over k, of one member.
    void part(u64 member, u64 split, float* sums) const {
        const u64 k = depth(), each = (k + choice.splits - 1) / choice.splits;
        const u64 from = split * each < k ? split * each : k, to = from + each < k ? from + each : k;
        std::fill_n(sums, d.rows * d.columns, 0.0f);
        // op(A) is m×k as it lies unless it is transposed, op(B) k×n likewise.
        add_product({d.rows, d.columns, from, to}, matrix(a, at_a, description.transpose_a, member),
                    matrix(b, at_b, description.transpose_b, member), sums);
    }

    void finish(u64 member, const float* sums) const {
        const auto place = [&](const Layout& layout, u64 i, u64 j) {
            return member * u64(layout.stride) + j * u64(layout.leading) + i;
        };
        for (u64 j = 0; j < d.columns; j++) {
            for (u64 i = 0; i < d.rows; i++) {
                float value = alpha * sums[j * d.rows + i];
                if (beta != 0) {
                    const u64 from = place(c, i, j);
                    value += beta * (c.type == REAL_BF16 ? widened(static_cast<const u16*>(at_c)[from])
                                                         : static_cast<const float*>(at_c)[from]);
                }
                const u64 to = place(d, i, j);
                if (d.type == REAL_BF16) static_cast<u16*>(at_d)[to] = rounded(value);
                else static_cast<float*>(at_d)[to] = value;
            }
        }
    }

    // Something everywhere: all of the first pages, then a little of each.
    void scribble() const {
        constexpr u64 ALL = 64 << 10, EACH = 64 << 10, LITTLE = 64;
        for (u64 at = 0; at < workspace_bytes; at += at < ALL ? LITTLE : EACH) {
            const u64 left = workspace_bytes - at;
            memset(workspace + at, 0xff, left < LITTLE ? left : LITTLE);
        }
        if (workspace_bytes) workspace[workspace_bytes - 1] = char(0xff);
    }
};

struct ProductRun : stand_in::Run {
    std::shared_ptr<const Product> product;
    bool parts_done = false;

    float* partial(u64 member, u64 split) {
        const Product& of = *product;
        const u64 each = of.d.rows * of.d.columns;
        return reinterpret_cast<float*>(of.workspace) + (member * of.choice.splits + split) * each;
    }

    Step step(int device) override {
        const Product& of = *product;
        if (!of.within(device)) return Step::done;
        const u64 each = of.d.rows * of.d.columns, members = u64(of.d.batch);
        if (of.choice.splits == 1) {
            of.scribble();
            std::vector<float> sums(each);
            for (u64 member = 0; member < members; member++) {
                of.part(member, 0, sums.data());
                of.finish(member, sums.data());
            }
            return Step::done;
        }
        if (!parts_done) {
            of.scribble();
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
                    const float part = narrow ? widened(rounded(from[at])) : from[at];
                    sums[at] = narrow ? widened(rounded(sums[at] + part)) : sums[at] + part;
                }
            }
            of.finish(member, sums.data());
        }
        of.scribble();
        return Step::done;
    }
};

struct ProductOperation : stand_in::Operation {
    std::shared_ptr<const Product> product;
    explicit ProductOperation(std::shared_ptr<const Product> product)
        : Operation(product->name), product(std::move(product)) {}
    std::unique_ptr<stand_in::Run> start() const override {
        auto run = std::make_unique<ProductRun>();
        run->product = product;
        return run;
    }
};

static int refused(const std::string& why) {
    stand_in::say("a product is refused: " + why);
    return STATUS_INVALID_VALUE;
}

static bool is_aligned(const void* at, u64 to) { return reinterpret_cast<u64>(at) % to == 0; }

EXPORT int cublasLtMatmul(void*, Description* description, const float* alpha, const void* at_a, Layout* a,
                          const void* at_b, Layout* b, const float* beta, const void* at_c, Layout* c,
                          void* at_d, Layout* d, const Algorithm* algorithm, void* workspace,
                          size_t workspace_bytes, CUstream stream) {
    if (const char* why = defect(*description, *a, *b, *c, *d)) return refused(why);
    // Without an algorithm cuBLASLt chooses one: here, the one that needs nothing.
    Choice choice = {23, 1, SCHEME_NONE, 1};
    if (algorithm && !Choice::read(*algorithm, choice)) return refused("its algorithm is none");
    if (choice.splits > (description->transpose_a ? a->rows : a->columns)) {
        return refused("its algorithm splits k into more parts than there are");
    }
    if (choice.workspace_bytes(*d) > workspace_bytes) return refused("its algorithm needs more workspace");
    if (workspace_bytes && !is_aligned(workspace, 256)) {
        return refused("its workspace is not aligned to 256 bytes");
    }
    for (const auto& [at, layout] : {std::pair{at_a, a}, {at_b, b}, {at_c, c}, {(const void*)at_d, d}}) {
        const u64 wanted = choice.alignment > layout->width() ? choice.alignment : layout->width();
        const u64 stride = u64(layout->stride) * layout->width();
        if (!is_aligned(at, wanted) || (layout->batch > 1 && stride % wanted)) {
            return refused("an operand is not aligned to the " + std::to_string(wanted) +
                           " bytes that its algorithm needs");
        }
    }
    auto product = std::make_shared<Product>();
    *product = {*description, *a, *b, *c, *d, at_a, at_b, at_c, at_d, *alpha, *beta, choice,
                static_cast<char*>(workspace), workspace_bytes, ""};
    product->name = "product " + std::to_string(d->rows) + "x" + std::to_string(d->columns) + "x" +
                    std::to_string(product->depth()) + " batch=" + std::to_string(d->batch) +
                    " algorithm=" + std::to_string(choice.id);
    stand_in::Guard guard(stand_in::lock());
    const int result = stand_in::queue(stream, std::make_shared<ProductOperation>(product));
    return result ? STATUS_EXECUTION_FAILED : STATUS_SUCCESS;
}
