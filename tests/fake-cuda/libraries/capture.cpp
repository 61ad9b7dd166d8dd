// Stream capture, and graphs.
//
// Calls on a capturing stream become graph nodes, which depend on the stream's frontier. An event recorded on it stores
// the frontier, and a stream that waits for that event joins the capture. Calls that captures forbid return the
// driver's error and invalidate the capture.
#include <algorithm>
#include "state.h"

namespace fake_cuda {

void push_graph(CUstream stream, CUgraphExec_st& exec);

void invalidate(Capture& capture) { capture.invalid = true; }

CUresult check_not_capturing() {
    if (thread_mode == CAPTURE_RELAXED) return CUDA_SUCCESS;
    bool forbidden = false;
    for (CapturePtr& capture : state().captures) {
        const bool own_thread = capture->thread == std::this_thread::get_id();
        const bool counts = capture->mode == CAPTURE_GLOBAL ||
                            (capture->mode == CAPTURE_THREAD_LOCAL && own_thread);
        if (!counts) continue;
        invalidate(*capture);
        forbidden = true;
    }
    return forbidden ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult capture_node(CUstream stream, std::shared_ptr<const Operation> operation) {
    Capture& capture = *stream->capture;
    if (capture.invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    auto& nodes = capture.graph->nodes;
    std::vector<u32> after(stream->frontier.begin(), stream->frontier.end());
    nodes.push_back({std::move(operation), std::move(after)});
    stream->frontier = {u32(nodes.size() - 1)};
    return CUDA_SUCCESS;
}

CUresult capture_wait(CUstream stream, CUevent event) {
    if (event->capture) {
        if (event->capture->ended) return CUDA_ERROR_CAPTURED_EVENT;
        if (event->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (!stream->number) {
            invalidate(*event->capture);
            return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
        if (stream->capture && stream->capture != event->capture) {
            invalidate(*stream->capture);
            invalidate(*event->capture);
            return CUDA_ERROR_STREAM_CAPTURE_MERGE;
        }
        if (!stream->capture) stream->frontier.clear();
        stream->capture = event->capture;
        stream->frontier.insert(event->frontier.begin(), event->frontier.end());
        return CUDA_SUCCESS;
    }
    if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    report("a capturing stream waits for an event from outside of the capture");
    invalidate(*stream->capture);
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
}

// Whether the nodes of a frontier precede the end of the capture.
static bool is_joined(const Graph& graph, const std::set<u32>& frontier, const std::set<u32>& end) {
    std::vector<bool> before(graph.nodes.size());
    for (u32 node : end) before[node] = true;
    for (u32 at = u32(graph.nodes.size()); at-- > 0;) {
        if (!before[at]) continue;
        for (u32 node : graph.nodes[at].after) before[node] = true;
    }
    return std::all_of(frontier.begin(), frontier.end(), [&](u32 node) { return bool(before[node]); });
}

}  // namespace fake_cuda

using namespace fake_cuda;

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    if (CUresult result = resolve(*device, stream)) return result;
    if (!stream->number) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    auto capture = std::make_shared<Capture>();
    capture->graph = std::make_shared<Graph>();
    capture->graph->number = ++state().last_graph;
    capture->origin = stream;
    capture->mode = CaptureMode(mode);
    capture->thread = std::this_thread::get_id();
    state().captures.push_back(capture);
    stream->capture = capture;
    stream->frontier.clear();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    Guard guard(lock());
    *graph = nullptr;
    Device* device;
    if (CUresult result = working_device(device)) return result;
    if (CUresult result = resolve(*device, stream)) return result;
    CapturePtr capture = stream->capture;
    if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream) {
        invalidate(*capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    if (capture->mode != CAPTURE_RELAXED && capture->thread != std::this_thread::get_id()) {
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    bool joined = true;
    for (CUstream other : state().streams) {
        if (other->capture != capture) continue;
        joined = joined && is_joined(*capture->graph, other->frontier, stream->frontier);
        if (other != stream) other->capture = nullptr;
    }
    stream->capture = nullptr;
    capture->ended = true;
    // Events recorded in the capture keep it alive, but not its graph.
    std::shared_ptr<Graph> graph_data = std::move(capture->graph);
    auto& captures = state().captures;
    captures.erase(std::find(captures.begin(), captures.end(), capture));
    if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!joined) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    log("host captures graph=" + std::to_string(graph_data->number) +
        " nodes=" + std::to_string(graph_data->nodes.size()));
    *graph = new CUgraph_st{std::move(graph_data)};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, int* status) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = context_device(device)) return result;
    if (CUresult result = resolve(*device, stream)) return result;
    *status = !stream->capture           ? CAPTURE_NONE
              : stream->capture->invalid ? CAPTURE_INVALIDATED
                                         : CAPTURE_ACTIVE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
    Guard guard(lock());
    const CaptureMode before = thread_mode;
    thread_mode = CaptureMode(*mode);
    *mode = before;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphGetNodes(CUgraph graph, void** nodes, size_t* count) {
    Guard guard(lock());
    // Only the count is supported.
    if (nodes) return CUDA_ERROR_NOT_SUPPORTED;
    *count = graph->graph->nodes.size();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, u64 flags) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    // The flag for launches from the device excludes all other flags.
    if ((flags & 4) && flags != 4) return CUDA_ERROR_INVALID_VALUE;
    *exec = new CUgraphExec_st{device->ordinal, graph->graph, nullptr};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphUpload(CUgraphExec, CUstream stream) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    return resolve(*device, stream);
}

EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    if (CUresult result = resolve(*device, stream)) return result;
    if (stream->capture) {
        invalidate(*stream->capture);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (exec->device != device->ordinal) return CUDA_ERROR_INVALID_CONTEXT;
    log("host launches graph=" + std::to_string(exec->graph->number) +
        " device=" + std::to_string(device->ordinal));
    push_graph(stream, *exec);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(CUgraph graph) {
    Guard guard(lock());
    delete graph;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec) {
    Guard guard(lock());
    delete exec;
    return CUDA_SUCCESS;
}
