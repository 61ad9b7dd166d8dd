// Streams and events.
#include "state.h"

namespace fake_cuda {

CUresult capture_wait(CUstream stream, CUevent event);

bool is_valid(CUevent event) {
    if (state().events.count(event)) return true;
    report("a call uses an event that does not exist");
    return false;
}

static CUresult resolve_event(Device*& device, CUevent event) {
    if (CUresult result = working_device(device)) return result;
    return is_valid(event) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult resolve_stream(Device*& device, CUstream& stream) {
    if (CUresult result = working_device(device)) return result;
    return resolve(*device, stream);
}

// Checks a query or synchronisation, which captures forbid.
static CUresult check_query(CUstream stream) {
    if (stream->capture) {
        invalidate(*stream->capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return check_not_capturing();
}

static CUresult check_query(CUevent event) {
    if (event->capture) {
        invalidate(*event->capture);
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    return check_not_capturing();
}

// The stream whose queue contains a marker.
static CUstream stream_of(const MarkerPtr& marker) {
    for (CUstream stream : state().streams) {
        for (const QueuedOperation& item : stream->queue) {
            if (item.done == marker) return stream;
        }
    }
    return nullptr;
}

static std::string stream_name(Device& device, CUstream stream) {
    return "device=" + std::to_string(device.ordinal) + " stream=" + std::to_string(stream->number);
}

}  // namespace fake_cuda

using namespace fake_cuda;

EXPORT CUresult cuStreamCreateWithPriority(CUstream* stream, u32 flags, int) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    *stream = new CUstream_st();
    (*stream)->device = device->ordinal;
    (*stream)->number = ++state().last_stream;
    (*stream)->blocking = !(flags & CU_STREAM_NON_BLOCKING);
    state().streams.insert(*stream);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreate(CUstream* stream, u32 flags) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}

// Queued operations still run.
EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = context_device(device)) return result;
    if (CUresult result = resolve(*device, stream)) return result;
    if (!stream->number) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) invalidate(*stream->capture);
    stream->destroyed = true;
    if (stream->queue.empty() && !stream->capture) {
        state().streams.erase(stream);
        delete stream;
    }
    return device->error;
}

EXPORT CUresult cuStreamSynchronize(CUstream stream) {
    std::unique_lock<std::mutex> guard(lock());
    Device* device;
    if (CUresult result = resolve_stream(device, stream)) return result;
    if (CUresult result = check_query(stream)) return result;
    log("host synchronises " + stream_name(*device, stream));
    // Operations that other threads queue meanwhile are not waited for.
    const MarkerPtr tail = stream->tail;
    return wait_for(*device, stream, [&] { return !tail || tail->done; }, guard);
}

EXPORT CUresult cuStreamQuery(CUstream stream) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = resolve_stream(device, stream)) return result;
    if (CUresult result = check_query(stream)) return result;
    const MarkerPtr tail = stream->tail;
    advance_a_little(stream);
    if (device->error) return device->error;
    return !tail || tail->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, u32 flags) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = resolve_stream(device, stream)) return result;
    if (!is_valid(event)) return CUDA_ERROR_INVALID_HANDLE;
    static const auto wait = at_once("wait", [](int) {});
    if (stream->capture && (flags & CU_EVENT_EXTERNAL)) return CUDA_ERROR_NOT_SUPPORTED;
    if (stream->capture || event->capture) return capture_wait(stream, event);
    if (!event->marker) return CUDA_SUCCESS;
    push(stream, wait, wait->start(), {event->marker});
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventCreate(CUevent* event, u32 flags) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working_device(device)) return result;
    *event = new CUevent_st{device->ordinal, !(flags & CU_EVENT_DISABLE_TIMING), nullptr, nullptr, {}};
    state().events.insert(*event);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent event) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = context_device(device)) return result;
    if (!is_valid(event)) return CUDA_ERROR_INVALID_HANDLE;
    state().events.erase(event);
    delete event;
    return device->error;
}

// A graph node that records an event for waits outside of the graph.
struct RecordNode : Operation {
    CUevent event;
    explicit RecordNode(CUevent event) : Operation("record"), event(event) {}
    struct Execution : Run {
        MarkerPtr marker = std::make_shared<Marker>();
        Step step(int) override {
            marker->done = true;
            marker->milliseconds = now_ms();
            return Step::done;
        }
    };
    std::unique_ptr<Run> start() const override {
        auto run = std::make_unique<Execution>();
        if (is_valid(event)) event->marker = run->marker;
        return run;
    }
};

EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, u32 flags) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = resolve_stream(device, stream)) return result;
    if (!is_valid(event) || event->device != stream->device) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) {
        if (flags & CU_EVENT_EXTERNAL) return capture_node(stream, std::make_shared<RecordNode>(event));
        if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        event->capture = stream->capture;
        event->frontier = stream->frontier;
        event->marker = nullptr;
        return CUDA_SUCCESS;
    }
    if (flags & CU_EVENT_EXTERNAL) return CUDA_ERROR_ILLEGAL_STATE;
    static const auto record = at_once("record", [](int) {});
    event->capture = nullptr;
    event->marker = push(stream, record, record->start(), {});
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
    return cuEventRecordWithFlags(event, stream, 0);
}

EXPORT CUresult cuEventQuery(CUevent event) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = resolve_event(device, event)) return result;
    if (CUresult result = check_query(event)) return result;
    const MarkerPtr marker = event->marker;
    if (!marker) return CUDA_SUCCESS;
    if (!marker->done) advance_a_little(stream_of(marker));
    if (device->error) return device->error;
    return marker->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuEventSynchronize(CUevent event) {
    std::unique_lock<std::mutex> guard(lock());
    Device* device;
    if (CUresult result = resolve_event(device, event)) return result;
    if (CUresult result = check_query(event)) return result;
    const MarkerPtr marker = event->marker;
    log("host synchronises device=" + std::to_string(device->ordinal) + " event");
    if (!marker) return CUDA_SUCCESS;
    return wait_for(*device, stream_of(marker), [&] { return marker->done; }, guard);
}

EXPORT CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = resolve_event(device, start)) return result;
    if (!is_valid(end) || !start->timed || !end->timed) return CUDA_ERROR_INVALID_HANDLE;
    if (!start->marker || !end->marker) return CUDA_ERROR_INVALID_HANDLE;
    if (!start->marker->done || !end->marker->done) return CUDA_ERROR_NOT_READY;
    *milliseconds = float(end->marker->milliseconds - start->marker->milliseconds);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime_v2(milliseconds, start, end);
}
