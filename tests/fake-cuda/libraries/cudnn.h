// Objects of the fake cuDNN, and the execution of a graph of operations.
#pragma once
#include <array>
#include <map>
#include <memory>
#include <vector>
#include "operation.h"

enum {
    CUDNN_SUCCESS = 0,
    CUDNN_NOT_INITIALIZED = 1001,
    CUDNN_BAD_PARAM = 2000,
    CUDNN_NOT_SUPPORTED = 3000,
    CUDNN_EXECUTION_FAILED = 5000,
};

// Kinds of descriptors.
enum {
    POINTWISE = 0,
    ENGINE_CONFIGURATION = 3,
    HEURISTIC = 4,
    PLAN = 5,
    POINTWISE_OPERATION = 13,
    OPERATION_GRAPH = 15,
    VARIANT_PACK = 16,
    TENSOR = 17,
    MATMUL = 18,
    MATMUL_OPERATION = 19,
    REDUCTION = 21,
    REDUCTION_OPERATION = 22,
    RESHAPE_OPERATION = 31,
};

// The attribute of a graph that lists its operations.
constexpr int GRAPH_OPERATIONS = 801;

// Types of elements.
enum { OF_F32 = 0, OF_I32 = 4, OF_BF16 = 9, OF_BOOL = 11 };

// A descriptor: attributes by their number, as bytes or as other descriptors.
struct Object {
    int kind;
    bool finalized = false;
    std::map<int, std::vector<u8>> values;
    std::map<int, std::vector<std::shared_ptr<Object>>> parts;

    int64_t integer(int name, int64_t otherwise) const;
    int enumerated(int name) const;
    // The first descriptor of an attribute; null if it is not set.
    const Object* part(int name) const;
};
using ObjectPtr = std::shared_ptr<Object>;

using Sizes = std::array<int64_t, 4>;

// A tensor descriptor.
struct TensorView {
    int64_t id;
    int type;
    Sizes sizes, strides;
    bool is_virtual, by_value;

    explicit TensorView(const Object& of);
    u64 count() const;
    // Elements from the first to the end of the last.
    u64 extent() const;
    u64 width() const { return type == OF_BF16 ? 2 : type == OF_BOOL ? 1 : 4; }
};

// Why a graph of operations is not supported; empty if it is.
std::string graph_defect(const Object& graph);

// Executes a graph with these pointers.
void execute_graph(const Object& graph, const std::map<int64_t, void*>& pointers,
                   const std::map<int64_t, float>& scalars, int device, const std::string& name);
