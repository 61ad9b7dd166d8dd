// The fake cuDNN: the backend API for graphs of operations, with one engine.
//
// The engine needs a workspace, which it overwrites. Graphs are interpreted operation by operation.
#include "cudnn.h"
#include <cstring>

struct Handle {
    CUstream stream = nullptr;
};

static thread_local std::string last_error;

static int refused(int status, const std::string& reason) {
    last_error = reason;
    return status;
}

int64_t Object::integer(int name, int64_t otherwise) const {
    const auto found = values.find(name);
    if (found == values.end() || found->second.size() < 8) return otherwise;
    int64_t value;
    memcpy(&value, found->second.data(), 8);
    return value;
}

int Object::enumerated(int name) const {
    const auto found = values.find(name);
    if (found == values.end() || found->second.size() < 4) return -1;
    int value;
    memcpy(&value, found->second.data(), 4);
    return value;
}

const Object* Object::part(int name) const {
    const auto found = parts.find(name);
    return found == parts.end() || found->second.empty() ? nullptr : found->second[0].get();
}

enum { TYPE_HANDLE = 0, TYPE_BOOLEAN = 2, TYPE_INT64 = 3, TYPE_DOUBLE = 5, TYPE_POINTER = 6, TYPE_DESCRIPTOR = 15, TYPE_CHAR = 24 };
enum {
    HEURISTIC_GRAPH = 201,
    HEURISTIC_RESULTS = 202,
    PLAN_CONFIGURATION = 401,
    PLAN_WORKSPACE = 402,
    PACK_IDS = 1000,
    PACK_POINTERS = 1001,
    PACK_WORKSPACE = 1003,
    CONFIGURATION_GRAPH = 1,
};
constexpr int64_t WORKSPACE_BYTES = 1000;

static size_t width(int type) {
    switch (type) {
        case TYPE_BOOLEAN: case TYPE_CHAR: return 1;
        case TYPE_HANDLE: case TYPE_INT64: case TYPE_DOUBLE: case TYPE_POINTER: return 8;
        default: return 4;
    }
}

EXPORT size_t cudnnGetVersion() { return fake_cuda::setting("NARROWS_FAKE_CUDA_CUDNN", 91002); }

EXPORT void cudnnGetLastErrorString(char* message, size_t bytes) {
    if (!bytes) return;
    strncpy(message, last_error.c_str(), bytes);
    message[bytes - 1] = 0;
}

EXPORT int cudnnCreate(Handle** handle) {
    fake_cuda::Guard guard(fake_cuda::lock());
    if (fake_cuda::current_device() < 0) return refused(CUDNN_NOT_INITIALIZED, "there is no context");
    *handle = new Handle;
    return CUDNN_SUCCESS;
}
EXPORT int cudnnDestroy(Handle* handle) {
    delete handle;
    return CUDNN_SUCCESS;
}
EXPORT int cudnnSetStream(Handle* handle, CUstream stream) {
    handle->stream = stream;
    return CUDNN_SUCCESS;
}

EXPORT int cudnnBackendCreateDescriptor(int kind, ObjectPtr** descriptor) {
    *descriptor = new ObjectPtr(std::make_shared<Object>());
    (**descriptor)->kind = kind;
    return CUDNN_SUCCESS;
}
EXPORT int cudnnBackendDestroyDescriptor(ObjectPtr* descriptor) {
    delete descriptor;
    return CUDNN_SUCCESS;
}

EXPORT int cudnnBackendSetAttribute(ObjectPtr* descriptor, int name, int type, int64_t count, const void* from) {
    Object& of = **descriptor;
    if (of.finalized) return refused(CUDNN_BAD_PARAM, "the descriptor is finalized");
    if (count < 1 || !from) return refused(CUDNN_BAD_PARAM, "there is no value");
    if (type != TYPE_DESCRIPTOR) {
        const u8* bytes = static_cast<const u8*>(from);
        of.values[name].assign(bytes, bytes + size_t(count) * width(type));
        return CUDNN_SUCCESS;
    }
    for (int64_t at = 0; at < count; at++) {
        const ObjectPtr& part = *static_cast<ObjectPtr* const*>(from)[at];
        if (!part->finalized) return refused(CUDNN_BAD_PARAM, "a part is not finalized");
        of.parts[name].push_back(part);
    }
    return CUDNN_SUCCESS;
}

EXPORT int cudnnBackendFinalize(ObjectPtr* descriptor) {
    Object& of = **descriptor;
    if (of.finalized) return refused(CUDNN_BAD_PARAM, "the descriptor is finalized");
    if (of.kind == OPERATION_GRAPH && !of.part(GRAPH_OPERATIONS)) {
        return refused(CUDNN_BAD_PARAM, "the graph has no operations");
    }
    if (of.kind == PLAN && !of.part(PLAN_CONFIGURATION)) {
        return refused(CUDNN_BAD_PARAM, "the plan has no engine");
    }
    of.finalized = true;
    return CUDNN_SUCCESS;
}

EXPORT int cudnnBackendGetAttribute(ObjectPtr* descriptor, int name, int, int64_t requested, int64_t* count,
                                    void* to) {
    const Object& of = **descriptor;
    if (!of.finalized || requested < 1) return refused(CUDNN_BAD_PARAM, "it is not finalized");
    if (of.kind == PLAN && name == PLAN_WORKSPACE) {
        *count = 1;
        memcpy(to, &WORKSPACE_BYTES, 8);
        return CUDNN_SUCCESS;
    }
    if (of.kind != HEURISTIC || name != HEURISTIC_RESULTS) {
        return refused(CUDNN_NOT_SUPPORTED, "the attribute is unknown");
    }
    const auto& graph = of.parts.at(HEURISTIC_GRAPH)[0];
    const std::string defect = graph_defect(*graph);
    if (!defect.empty()) return refused(CUDNN_NOT_SUPPORTED, defect);
    Object& configuration = **static_cast<ObjectPtr**>(to)[0];
    configuration.parts[CONFIGURATION_GRAPH] = {graph};
    configuration.finalized = true;
    *count = 1;
    return CUDNN_SUCCESS;
}

EXPORT int cudnnBackendExecute(Handle* handle, ObjectPtr* plan, ObjectPtr* pack) {
    const auto& configuration = (*plan)->parts.at(PLAN_CONFIGURATION)[0];
    const ObjectPtr graph = configuration->parts.at(CONFIGURATION_GRAPH)[0];
    const Object& of = **pack;
    if (!of.finalized) return refused(CUDNN_BAD_PARAM, "the variant pack is not finalized");
    std::map<int64_t, void*> pointers;
    const auto &ids = of.values.at(PACK_IDS), &addresses = of.values.at(PACK_POINTERS);
    if (ids.size() != addresses.size()) return refused(CUDNN_BAD_PARAM, "pointers are missing");
    for (size_t at = 0; at < ids.size(); at += 8) {
        int64_t id;
        void* pointer;
        memcpy(&id, &ids[at], 8);
        memcpy(&pointer, &addresses[at], 8);
        pointers[id] = pointer;
    }
    void* workspace;
    memcpy(&workspace, of.values.at(PACK_WORKSPACE).data(), 8);
    // Values in host memory are read now; memory of the device when the operation runs.
    std::map<int64_t, float> scalars;
    std::map<int64_t, bool> used;
    for (const auto& operation : graph->parts.at(GRAPH_OPERATIONS)) {
        for (const auto& [name, parts] : operation->parts) {
            if (parts[0]->kind != TENSOR) continue;
            const TensorView tensor(*parts[0]);
            if (tensor.is_virtual) continue;
            used[tensor.id] = true;
            if (!pointers.count(tensor.id)) {
                return refused(CUDNN_BAD_PARAM, "tensor " + std::to_string(tensor.id) + " has no pointer");
            }
            if (tensor.by_value) scalars[tensor.id] = *static_cast<const float*>(pointers[tensor.id]);
        }
    }
    if (used.size() != pointers.size()) return refused(CUDNN_BAD_PARAM, "a pointer is for no tensor");
    const std::string name =
        "attention by cuDNN, operations=" + std::to_string(graph->parts.at(GRAPH_OPERATIONS).size());
    auto action = [=](int device) {
        if (!fake_cuda::check_range(device, workspace, WORKSPACE_BYTES, "workspace of " + name)) return;
        memset(workspace, 0xff, WORKSPACE_BYTES);
        execute_graph(*graph, pointers, scalars, device, name);
    };
    fake_cuda::Guard guard(fake_cuda::lock());
    const int result = fake_cuda::queue(handle->stream, fake_cuda::at_once(name, action));
    return result ? refused(CUDNN_EXECUTION_FAILED, "the stream accepts no work") : CUDNN_SUCCESS;
}
