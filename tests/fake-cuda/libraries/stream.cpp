// Streams and events.
#include "state.h"

namespace stand_in {

CUresult capture_wait(CUstream stream, CUevent event);

bool known(CUevent event) {
    if (state().events.count(event)) return true;
    say("an event is used that there is none of, or no longer");
    return false;
}

static CUresult resolved(Device*& device, CUevent event) {
    if (CUresult result = working(device)) return result;
    return known(event) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult resolved(Device*& device, CUstream& stream) {
    if (CUresult result = working(device)) return result;
    return resolve(*device, stream);
}

// A question about a stream that is captured, or one that a capture elsewhere does not allow.
static CUresult unasked(Device& device, CUstream stream) {
    if (stream->capture) {
        invalidate(*stream->capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return forbidden(device);
}

static CUresult unasked(Device& device, CUevent event) {
    if (event->capture) {
        invalidate(*event->capture);
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    return forbidden(device);
}

// Where an event is still queued.
static CUstream holder(const MarkerPtr& marker) {
    for (CUstream stream : state().streams) {
        for (const Item& item : stream->queue) {
            if (item.done == marker) return stream;
        }
    }
    return nullptr;
}

static std::string named(Device& device, CUstream stream) {
    return "device=" + std::to_string(device.ordinal) + " stream=" + std::to_string(stream->number);
}

}  // namespace stand_in

using namespace stand_in;

EXPORT CUresult cuStreamCreateWithPriority(CUstream* stream, u32 flags, int) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = working(device)) return result;
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

// What is queued still runs.
EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = entered(device)) return result;
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
    std::unique_lock<std::mutex> held(lock());
    Device* device;
    if (CUresult result = resolved(device, stream)) return result;
    if (CUresult result = unasked(*device, stream)) return result;
    log("host synchronises " + named(*device, stream));
    // What is queued meanwhile by another thread is not waited for.
    const MarkerPtr tail = stream->tail;
    return wait_for(*device, stream, [&] { return !tail || tail->done; }, held);
}

EXPORT CUresult cuStreamQuery(CUstream stream) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = resolved(device, stream)) return result;
    if (CUresult result = unasked(*device, stream)) return result;
    const MarkerPtr tail = stream->tail;
    advance_a_little(stream);
    if (device->error) return device->error;
    return !tail || tail->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, u32 flags) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = resolved(device, stream)) return result;
    if (!known(event)) return CUDA_ERROR_INVALID_HANDLE;
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
    if (CUresult result = working(device)) return result;
    *event = new CUevent_st{device->ordinal, !(flags & CU_EVENT_DISABLE_TIMING), nullptr, nullptr, {}};
    state().events.insert(*event);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent event) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = entered(device)) return result;
    if (!known(event)) return CUDA_ERROR_INVALID_HANDLE;
    state().events.erase(event);
    delete event;
    return device->error;
}

// A node of a graph that records an event for those outside of it.
struct Recorded : Operation {
    CUevent event;
    explicit Recorded(CUevent event) : Operation("record"), event(event) {}
    struct Started : Run {
        MarkerPtr marker = std::make_shared<Marker>();
        Step step(int) override {
            marker->done = true;
            marker->milliseconds = now_ms();
            return Step::done;
        }
    };
    std::unique_ptr<Run> start() const override {
        auto run = std::make_unique<Started>();
        if (known(event)) event->marker = run->marker;
        return run;
    }
};

EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, u32 flags) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = resolved(device, stream)) return result;
    if (!known(event) || event->device != stream->device) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) {
        if (flags & CU_EVENT_EXTERNAL) return capture_node(stream, std::make_shared<Recorded>(event));
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
    if (CUresult result = resolved(device, event)) return result;
    if (CUresult result = unasked(*device, event)) return result;
    const MarkerPtr marker = event->marker;
    if (!marker) return CUDA_SUCCESS;
    if (!marker->done) advance_a_little(holder(marker));
    if (device->error) return device->error;
    return marker->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuEventSynchronize(CUevent event) {
    std::unique_lock<std::mutex> held(lock());
    Device* device;
    if (CUresult result = resolved(device, event)) return result;
    if (CUresult result = unasked(*device, event)) return result;
    const MarkerPtr marker = event->marker;
    log("host synchronises device=" + std::to_string(device->ordinal) + " event");
    if (!marker) return CUDA_SUCCESS;
    return wait_for(*device, holder(marker), [&] { return marker->done; }, held);
}

EXPORT CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
    Guard guard(lock());
    Device* device;
    if (CUresult result = resolved(device, start)) return result;
    if (!known(end) || !start->timed || !end->timed) return CUDA_ERROR_INVALID_HANDLE;
    if (!start->marker || !end->marker) return CUDA_ERROR_INVALID_HANDLE;
    if (!start->marker->done || !end->marker->done) return CUDA_ERROR_NOT_READY;
    *milliseconds = float(end->marker->milliseconds - start->marker->milliseconds);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime_v2(milliseconds, start, end);
}
