// State of the fake driver: devices with their memory, streams, events, captures and graphs.
#pragma once
#include <deque>
#include <map>
#include <set>
#include <thread>
#include <vector>
#include "cuda.h"

namespace fake_cuda {

// Completion of an operation, which events record and streams wait for.
struct Marker {
    bool done = false;
    double milliseconds = 0;
};
using MarkerPtr = std::shared_ptr<Marker>;

// An operation in the queue of a stream.
struct QueuedOperation {
    std::shared_ptr<const Operation> operation;
    std::unique_ptr<Run> run;
    std::vector<MarkerPtr> waits;
    MarkerPtr done;
};

struct Node {
    std::shared_ptr<const Operation> operation;
    // Indices of the nodes it depends on.
    std::vector<u32> after;
};

struct Graph {
    u32 number;
    std::vector<Node> nodes;
};

// A capture of one or more streams into one graph.
struct Capture {
    std::shared_ptr<Graph> graph;
    CUstream origin;
    CaptureMode mode;
    std::thread::id thread;
    bool invalid = false, ended = false;
};
using CapturePtr = std::shared_ptr<Capture>;

struct Allocation {
    u64 bytes;
    bool freed;
    // The mapping, including inaccessible guard pages.
    void* mapped;
    u64 mapped_bytes;
};

}  // namespace fake_cuda

struct CUstream_st {
    int device;
    // 0 is the legacy default stream.
    u32 number;
    bool blocking;
    bool destroyed = false;
    std::deque<fake_cuda::QueuedOperation> queue;
    // Marker of the last queued operation.
    fake_cuda::MarkerPtr tail;
    fake_cuda::CapturePtr capture;
    // Nodes that the next captured node depends on.
    std::set<u32> frontier;
};

struct CUevent_st {
    int device;
    bool timed;
    // Marker of the last record; null before the first.
    fake_cuda::MarkerPtr marker;
    // If last recorded during a capture: the capture and its frontier.
    fake_cuda::CapturePtr capture;
    std::set<u32> frontier;
};

struct CUctx_st {
    int device;
};

struct CUgraph_st {
    std::shared_ptr<fake_cuda::Graph> graph;
};

struct CUgraphExec_st {
    int device;
    std::shared_ptr<const fake_cuda::Graph> graph;
    // Marker of its last launch: launches of one graph do not overlap.
    fake_cuda::MarkerPtr last_launch;
};

namespace fake_cuda {

struct Device {
    int ordinal;
    CUctx_st context;
    u32 retained = 0;
    // Sticky error that every call returns.
    CUresult error = CUDA_SUCCESS;
    CUstream_st legacy;
    u64 used_bytes = 0;
    std::map<u64, Allocation> allocations;
    // The exclusive operation that is in progress.
    const Run* exclusive = nullptr;
};

struct State {
    bool initialised = false;
    std::vector<std::unique_ptr<Device>> devices;
    std::set<CUstream> streams;
    std::set<CUevent> events;
    std::vector<CapturePtr> captures;
    // Host memory of cuMemHostAlloc: end by begin.
    std::map<u64, u64> pinned;
    u32 last_stream = 0, last_graph = 0;
    u64 last_call_ms = 0;
    // The first device of which this process retained a context.
    int first_device = -1;
};
State& state();

extern thread_local CUcontext current;
extern thread_local CaptureMode thread_mode;

// The device of the thread's context.
CUresult context_device(Device*& device);
// The same, or the sticky error of a failed device.
CUresult working_device(Device*& device);
// Resolves a stream handle, which must belong to the device.
CUresult resolve(Device& device, CUstream& stream);
bool is_valid(CUevent event);

// Checks a call that is forbidden during captures; invalidates the captures that forbid it.
CUresult check_not_capturing();
void invalidate(Capture& capture);

// Queues an operation on a stream that is not capturing.
MarkerPtr push(CUstream stream, std::shared_ptr<const Operation> operation, std::unique_ptr<Run> run,
               std::vector<MarkerPtr> waits);
// Adds a node to the capture of a stream.
CUresult capture_node(CUstream stream, std::shared_ptr<const Operation> operation);

// Advances by a few steps, as time that passes during a query.
void advance_a_little(CUstream target);
// Advances until `done` or the device fails, releasing the lock in between.
CUresult wait_for(Device& device, CUstream target, const std::function<bool()>& done,
                  std::unique_lock<std::mutex>& lock);
bool idle(CUstream stream);

bool is_in_allocation(int device, const void* begin, u64 bytes);
double now_ms();

}  // namespace fake_cuda
