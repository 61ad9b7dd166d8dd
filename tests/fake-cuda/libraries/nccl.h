// State of the fake NCCL: communicators, and calls on them.
#pragma once
#include <atomic>
#include <map>
#include <vector>
#include "message_files.h"

enum Result {
    SUCCESS = 0,
    UNHANDLED_CUDA_ERROR = 1,
    SYSTEM_ERROR = 2,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    IN_PROGRESS = 7,
};
enum Kind : u32 { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, SEND, RECEIVE };
enum Reduction : u32 { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE };

struct Comm;
using CommPtr = std::shared_ptr<Comm>;

// A call of a collective, send or receive.
struct Call {
    Kind kind;
    const void* send;
    void* receive;
    u64 count;
    u32 type, operation;
    // Root of a collective, or peer of a message.
    int root;

    bool collective() const { return kind < SEND; }
    std::string name() const;
    u64 send_bytes(const Comm& comm) const;
    u64 receive_bytes(const Comm& comm) const;
    // Equal on all ranks.
    Header header() const { return {kind, type, operation, root, count}; }
};

// Calls on one communicator that execute together: a single call, or those of a group.
struct Batch : fake_cuda::Operation {
    CommPtr comm;
    std::vector<Call> calls;
    Batch(CommPtr comm, std::vector<Call> calls);
    Batch(const Batch&) = delete;
    ~Batch();
    std::unique_ptr<fake_cuda::Run> start() const override;
};

struct Queued {
    CUstream stream;
    std::shared_ptr<Batch> batch;
};

struct Comm {
    std::string folder;
    int rank = -1, size = 0, device = 0;
    bool blocking = true;
    // Whether all ranks have joined.
    bool ready = false;
    bool aborted = false;
    Result error = SUCCESS;
    // The communicator it was split from, and the index of that split.
    CommPtr parent;
    u64 split = 0;
    int color = 0;
    // A split in progress; the communicator cannot be used before it completes.
    CommPtr splitting;
    u64 splits = 0;
    // Batches of a non-blocking communicator that are not on their streams yet.
    std::vector<Queued> deferred;
    // Batches that were launched, and that are done; they execute in order.
    u64 launched = 0, done = 0;
    // Batches that are queued or part of an existing graph.
    std::atomic<u64> live_batches{0};
    // Number of collectives launched, and of messages by peer.
    u64 collectives = 0;
    std::vector<u64> sent, received;
    // Files of this rank that others may still read, by collective.
    std::map<u64, std::string> own_files;

    std::string file(const std::string& name) const { return folder + "/" + name; }
    // Checks in the folder whether all ranks have joined.
    bool all_joined();
    // Enters an error state that only an abort ends.
    void fail(const std::string& reason);
    // Leaves the folder; the last rank removes it.
    void leave();
};

u64 width_of(u32 type);
// Combines `sum` with `other` by a reduction operation.
void reduce(void* sum, const void* other, u64 count, u32 type, u32 operation);
// Divides by the number of ranks, for averages.
void divide(void* sum, u64 count, u32 type, int by);
bool can_reduce(u32 type, u32 operation);
