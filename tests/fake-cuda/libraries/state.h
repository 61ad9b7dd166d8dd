// What the driver's stand-in keeps: devices with their memory, streams, events, captures, graphs.
#pragma once
#include <deque>
#include <map>
#include <set>
#include <thread>
#include <vector>
#include "cuda.h"

namespace stand_in {

// Done or not, and since when: what an event records, and what a stream waits for.
struct Marker {
    bool done = false;
    double milliseconds = 0;
};
using MarkerPtr = std::shared_ptr<Marker>;

// An operation in a stream's queue.
struct Item {
    std::shared_ptr<const Operation> operation;
    std::unique_ptr<Run> run;
    std::vector<MarkerPtr> waits;
    MarkerPtr done;
};

struct Node {
    std::shared_ptr<const Operation> operation;
    // Earlier nodes, by their numbers.
    std::vector<u32> after;
};

struct Graph {
    u32 number;
    std::vector<Node> nodes;
};

// Several streams whose calls become one graph.
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
    // What is mapped for it, with pages around that nobody may touch.
    void* mapped;
    u64 mapped_bytes;
};

}  // namespace stand_in

struct CUstream_st {
    int device;
    // 0 is the legacy default stream.
    u32 number;
    bool blocking;
    bool destroyed = false;
    std::deque<stand_in::Item> queue;
    // Of the last operation that was queued.
    stand_in::MarkerPtr tail;
    stand_in::CapturePtr capture;
    // What the next node comes after.
    std::set<u32> frontier;
};

struct CUevent_st {
    int device;
    bool timed;
    // Of the last record; none before the first.
    stand_in::MarkerPtr marker;
    // Where it was last recorded in a capture: after these nodes.
    stand_in::CapturePtr capture;
    std::set<u32> frontier;
};

struct CUctx_st {
    int device;
};

struct CUgraph_st {
    std::shared_ptr<stand_in::Graph> graph;
};

struct CUgraphExec_st {
    int device;
    std::shared_ptr<const stand_in::Graph> graph;
    // Of its last launch: no two run at once.
    stand_in::MarkerPtr last;
};

namespace stand_in {

struct Device {
    int ordinal;
    CUctx_st context;
    u32 retained = 0;
    // Other than success: every call says it.
    CUresult error = CUDA_SUCCESS;
    CUstream_st legacy;
    u64 used_bytes = 0;
    std::map<u64, Allocation> allocations;
    // Under way, of those that are alone.
    const Run* alone = nullptr;
};

struct State {
    bool initialised = false;
    std::vector<std::unique_ptr<Device>> devices;
    std::set<CUstream> streams;
    std::set<CUevent> events;
    std::vector<CapturePtr> captures;
    // Host memory of cuMemHostAlloc: its end by its beginning.
    std::map<u64, u64> pinned;
    u32 last_stream = 0, last_graph = 0;
    u64 last_call_ms = 0;
    // That this process made a context of.
    int first_device = -1;
};
State& state();

extern thread_local CUcontext current;
extern thread_local CaptureMode thread_mode;

// A call that needs a context: its device, or why there is none.
CUresult entered(Device*& device);
// Also where the device failed before.
CUresult working(Device*& device);
// A stream's handle, of the thread's device.
CUresult resolve(Device& device, CUstream& stream);
bool known(CUevent event);

// A call that a capture does not allow: what is captured is lost.
CUresult forbidden(Device& device);
void invalidate(Capture& capture);

// Puts an operation on a stream that does not capture.
MarkerPtr push(CUstream stream, std::shared_ptr<const Operation> operation, std::unique_ptr<Run> run,
               std::vector<MarkerPtr> waits);
// Adds a node to what a stream captures.
CUresult capture_node(CUstream stream, std::shared_ptr<const Operation> operation);

// A few steps, as time that passes while somebody asks.
void advance_a_little(CUstream target);
// Advances, with the lock released in between, until all of it is done or the device fails.
CUresult wait_for(Device& device, CUstream target, const std::function<bool()>& done,
                  std::unique_lock<std::mutex>& held);
bool idle(CUstream stream);

bool is_inside(int device, const void* begin, u64 bytes);
double now_ms();

}  // namespace stand_in
