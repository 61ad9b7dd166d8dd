// Interpretation of a graph of operations on tensors of four dimensions: sequence, head, row, column.
//
// Elements are kept in f32, rounded where a tensor is bf16. Tensors in memory are read and written by their strides.
#include <cmath>
#include <cstring>
#include "cudnn.h"
#include "gemm.h"

enum { POINTWISE_MODE = 0, POINTWISE_AXIS = 9, REDUCTION_OPERATOR = 1600 };
enum { ADD = 0, MUL = 1, DIV = 6, SUB = 9, EXP = 13, LOG = 15, IDENTITY = 21, CMP_GE = 303, GEN_INDEX = 501, SELECT = 601 };
enum { REDUCE_ADD = 0, REDUCE_MAX = 3 };

struct Ports {
    int kind, x, b, t, y;
};
// Attributes of the operands of each operation.
static Ports ports_of(int kind) {
    switch (kind) {
        case MATMUL_OPERATION: return {kind, 1520, 1521, 0, 1522};
        case POINTWISE_OPERATION: return {kind, 751, 752, 758, 753};
        case REDUCTION_OPERATION: return {kind, 1610, 0, 0, 1611};
        case RESHAPE_OPERATION: return {kind, 2200, 0, 0, 2201};
        default: return {-1, 0, 0, 0, 0};
    }
}

static Sizes sizes_of(const Object& of, int name) {
    Sizes sizes = {1, 1, 1, 1};
    const auto& bytes = of.values.at(name);
    memcpy(sizes.data(), bytes.data(), bytes.size() < 32 ? bytes.size() : 32);
    return sizes;
}

static bool flag(const Object& of, int name) {
    const auto found = of.values.find(name);
    return found != of.values.end() && found->second[0];
}

TensorView::TensorView(const Object& of)
    : id(of.integer(906, -1)), type(of.enumerated(901)), sizes(sizes_of(of, 902)), strides(sizes_of(of, 903)),
      is_virtual(flag(of, 907)), by_value(flag(of, 908)) {}

u64 TensorView::count() const { return u64(sizes[0] * sizes[1] * sizes[2] * sizes[3]); }

u64 TensorView::extent() const {
    int64_t last = 0;
    for (int at = 0; at < 4; at++) last += (sizes[at] - 1) * strides[at];
    return u64(last) + 1;
}

using Values = std::vector<float>;

// Calls `visit` with the coordinates of every element in order.
template <class Visit>
static void each(const Sizes& sizes, Visit visit) {
    Sizes at;
    for (at[0] = 0; at[0] < sizes[0]; at[0]++) {
        for (at[1] = 0; at[1] < sizes[1]; at[1]++) {
            for (at[2] = 0; at[2] < sizes[2]; at[2]++) {
                for (at[3] = 0; at[3] < sizes[3]; at[3]++) visit(at);
            }
        }
    }
}

// Index in a tensor without gaps; of fewer elements in a dimension, those are shared by consecutive coordinates.
static size_t index(const Sizes& sizes, const Sizes& at, const Sizes& within) {
    size_t result = 0;
    for (int d = 0; d < 4; d++) result = result * size_t(sizes[d]) + size_t(at[d] * sizes[d] / within[d]);
    return result;
}

static u64 offset(const TensorView& tensor, const Sizes& at) {
    u64 result = 0;
    for (int d = 0; d < 4; d++) result += u64(at[d] * tensor.strides[d]);
    return result;
}

std::string graph_defect(const Object& graph) {
    std::map<int64_t, bool> known;
    for (const auto& operation : graph.parts.at(GRAPH_OPERATIONS)) {
        const Ports ports = ports_of(operation->kind);
        if (ports.kind < 0) return "an operation is unknown";
        for (int name : {ports.x, ports.b, ports.t}) {
            const Object* part = name ? operation->part(name) : nullptr;
            if (!part) continue;
            const TensorView tensor(*part);
            if (tensor.is_virtual && !known[tensor.id]) return "a tensor is used before it is computed";
            // Those of the engines for attention.
            const bool of_heads = tensor.type == OF_BF16 && !tensor.is_virtual;
            const int64_t features = tensor.strides[3] == 1 ? tensor.sizes[3] : tensor.sizes[2];
            if (of_heads && (features > 128 || features % 8)) return "the head size is not supported";
            if (of_heads && tensor.strides[1] % 8) return "heads are not aligned";
        }
        const Object* y = operation->part(ports.y);
        if (!y) return "an operation has no result";
        known[TensorView(*y).id] = true;
    }
    return "";
}

struct Interpreter {
    const std::map<int64_t, void*>& pointers;
    const std::map<int64_t, float>& scalars;
    int device;
    const std::string& name;
    std::map<int64_t, Values> computed;

    Values read(const TensorView& tensor) {
        if (tensor.by_value) return {scalars.at(tensor.id)};
        const auto found = computed.find(tensor.id);
        if (found != computed.end()) return found->second;
        const void* at = pointers.at(tensor.id);
        const std::string what = "tensor " + std::to_string(tensor.id) + " of " + name;
        Values values(tensor.count());
        if (!fake_cuda::check_range(device, at, tensor.extent() * tensor.width(), what)) return values;
        size_t next = 0;
        each(tensor.sizes, [&](const Sizes& element) {
            const u64 from = offset(tensor, element);
            values[next++] = tensor.type == OF_BF16 ? bf16_to_float(static_cast<const u16*>(at)[from])
                                                    : static_cast<const float*>(at)[from];
        });
        return values;
    }

    void write(const TensorView& tensor, Values values) {
        if (tensor.type == OF_BF16) {
            for (float& value : values) value = bf16_to_float(float_to_bf16(value));
        }
        if (!tensor.is_virtual) {
            void* at = pointers.at(tensor.id);
            const std::string what = "tensor " + std::to_string(tensor.id) + " of " + name;
            if (!fake_cuda::check_range(device, at, tensor.extent() * tensor.width(), what)) return;
            size_t next = 0;
            each(tensor.sizes, [&](const Sizes& element) {
                const u64 to = offset(tensor, element);
                const float value = values[next++];
                if (tensor.type == OF_BF16) static_cast<u16*>(at)[to] = float_to_bf16(value);
                else static_cast<float*>(at)[to] = value;
            });
        }
        computed[tensor.id] = std::move(values);
    }

    static float apply(int mode, float x, float b, float t) {
        switch (mode) {
            case ADD: return x + b;
            case SUB: return x - b;
            case MUL: return x * b;
            case DIV: return x / b;
            case EXP: return std::exp(x);
            case LOG: return std::log(x);
            case CMP_GE: return x >= b ? 1.0f : 0.0f;
            case SELECT: return t != 0 ? x : b;
            case IDENTITY: return x;
            default: return NAN;
        }
    }

    void pointwise(const Object& operation, const Ports& ports) {
        const Object& pointwise = *operation.part(750);
        const int mode = pointwise.enumerated(POINTWISE_MODE);
        const TensorView x(*operation.part(ports.x)), y(*operation.part(ports.y));
        Values result(y.count());
        size_t next = 0;
        if (mode == GEN_INDEX) {
            const int64_t axis = pointwise.integer(POINTWISE_AXIS, -1);
            each(y.sizes, [&](const Sizes& at) { result[next++] = float(at[size_t(axis)]); });
            return write(y, result);
        }
        const Object *part_b = operation.part(ports.b), *part_t = operation.part(ports.t);
        const TensorView b(part_b ? *part_b : *operation.part(ports.x)), t(part_t ? *part_t : *operation.part(ports.x));
        const Values of_x = read(x), of_b = part_b ? read(b) : of_x, of_t = part_t ? read(t) : of_x;
        each(y.sizes, [&](const Sizes& at) {
            result[next++] = apply(mode, of_x[index(x.sizes, at, y.sizes)], of_b[index(b.sizes, at, y.sizes)],
                                   of_t[index(t.sizes, at, y.sizes)]);
        });
        write(y, result);
    }

    void matmul(const Object& operation, const Ports& ports) {
        const TensorView a(*operation.part(ports.x)), b(*operation.part(ports.b)), c(*operation.part(ports.y));
        const Values of_a = read(a), of_b = read(b);
        Values result(c.count());
        const int64_t depth = a.sizes[3];
        size_t next = 0;
        each(c.sizes, [&](const Sizes& at) {
            float sum = 0;
            const size_t row = index(a.sizes, {at[0], at[1], at[2], 0}, {c.sizes[0], c.sizes[1], c.sizes[2], 1});
            const size_t first = index(b.sizes, {at[0], at[1], 0, at[3]}, {c.sizes[0], c.sizes[1], b.sizes[2], c.sizes[3]});
            for (int64_t k = 0; k < depth; k++) sum += of_a[row + size_t(k)] * of_b[first + size_t(k * b.sizes[3])];
            result[next++] = sum;
        });
        write(c, result);
    }

    void reduction(const Object& operation, const Ports& ports) {
        const TensorView x(*operation.part(ports.x)), y(*operation.part(ports.y));
        const bool maximum = operation.part(1612)->enumerated(REDUCTION_OPERATOR) == REDUCE_MAX;
        const Values of_x = read(x);
        Values result(y.count(), maximum ? -INFINITY : 0.0f);
        size_t next = 0;
        each(x.sizes, [&](const Sizes& at) {
            float& to = result[index(y.sizes, at, x.sizes)];
            const float value = of_x[next++];
            to = maximum ? std::fmax(to, value) : to + value;
        });
        write(y, result);
    }

    // The same elements, at other coordinates.
    void reshape(const Object& operation, const Ports& ports) {
        const TensorView x(*operation.part(ports.x)), y(*operation.part(ports.y));
        const Values of_x = read(x);
        Values flat(x.extent()), result(y.count());
        size_t next = 0;
        each(x.sizes, [&](const Sizes& at) { flat[offset(x, at)] = of_x[next++]; });
        next = 0;
        each(y.sizes, [&](const Sizes& at) { result[next++] = flat.at(offset(y, at)); });
        write(y, result);
    }
};

void execute_graph(const Object& graph, const std::map<int64_t, void*>& pointers,
                   const std::map<int64_t, float>& scalars, int device, const std::string& name) {
    Interpreter interpreter = {pointers, scalars, device, name, {}};
    for (const auto& operation : graph.parts.at(GRAPH_OPERATIONS)) {
        const Ports ports = ports_of(operation->kind);
        switch (operation->kind) {
            case MATMUL_OPERATION: interpreter.matmul(*operation, ports); break;
            case POINTWISE_OPERATION: interpreter.pointwise(*operation, ports); break;
            case REDUCTION_OPERATION: interpreter.reduction(*operation, ports); break;
            default: interpreter.reshape(*operation, ports); break;
        }
    }
}
