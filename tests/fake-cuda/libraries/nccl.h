// What NCCL's stand-in keeps of a communicator, and of what is called on it.
#pragma once
#include <atomic>
#include <map>
#include <vector>
#include "wire.h"

enum Result {
    SUCCESS = 0,
    UNHANDLED_CUDA_ERROR = 1,
    SYSTEM_ERROR = 2,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    IN_PROGRESS = 7,
};
enum Kind : u32 { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, SEND, RECEIVE };

struct Comm;
using CommPtr = std::shared_ptr<Comm>;

// One call.
struct Call {
    Kind kind;
    const void* send;
    void* receive;
    u64 count;
    u32 type, operation;
    // The root, or the peer.
    int root;

    bool collective() const { return kind < SEND; }
    std::string name() const;
    u64 send_bytes(const Comm& comm) const;
    u64 receive_bytes(const Comm& comm) const;
    // The same on all ranks.
    Header header() const { return {kind, type, operation, root, count}; }
};

// Calls of one communicator that are under way together: one, or a group.
struct Batch : stand_in::Operation {
    CommPtr comm;
    std::vector<Call> calls;
    Batch(CommPtr comm, std::vector<Call> calls);
    Batch(const Batch&) = delete;
    ~Batch();
    std::unique_ptr<stand_in::Run> start() const override;
};

struct Queued {
    CUstream stream;
    std::shared_ptr<Batch> batch;
};

struct Comm {
    std::string folder;
    int rank = -1, size = 0, device = 0;
    bool blocking = true;
    // All ranks came.
    bool ready = false;
    bool aborted = false;
    Result error = SUCCESS;
    // Of which it is a part, and which split of it.
    CommPtr parent;
    u64 split = 0;
    int color = 0;
    // That it waits for before it can be used again.
    CommPtr splitting;
    u64 splits = 0;
    // What of a communicator that does not block is not queued yet.
    std::vector<Queued> deferred;
    // Batches that were launched, and that are done: they run in this order.
    u64 launched = 0, done = 0;
    // Batches that are queued, or nodes of a graph that somebody still has.
    std::atomic<u64> held{0};
    // Collectives that were launched, and messages by peer.
    u64 collectives = 0;
    std::vector<u64> sent, received;
    // Files of this rank that others may still read, by the number of their collective.
    std::map<u64, std::string> kept;

    std::string file(const std::string& name) const { return folder + "/" + name; }
    // Whether all ranks came; asks the folder.
    bool arrived();
    // Something is wrong that only an abort ends.
    void fail(const std::string& why);
    // This rank is done with the folder. The last one removes it.
    void leave();
};

u64 width_of(u32 type);
// `sum` becomes what `more` is added to, or whatever else the operation does.
void reduce(void* sum, const void* more, u64 count, u32 type, u32 operation);
// Of an average: by the number of ranks.
void divide(void* sum, u64 count, u32 type, int by);
bool can_reduce(u32 type, u32 operation);
