// The fake NCCL: communicators, and calls on them.
//
// A non-blocking communicator returns ncclInProgress wherever NCCL may: until all ranks have joined, and at random for
// launches, which are then not on their streams before ncclCommGetAsyncError reports success.
#include "nccl.h"
#include <unistd.h>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

using fake_cuda::Guard;
using fake_cuda::lock;
using UniqueLock = std::unique_lock<std::mutex>;

struct UniqueId {
    char text[128];
};

// The fields of ncclConfig_t that are read.
struct Config {
    size_t size;
    u32 magic, version;
    int blocking;
};

struct GroupedCall {
    CommPtr comm;
    CUstream stream;
    Call call;
};

// Communicators by their handles.
static std::map<Comm*, CommPtr>& comms() {
    static auto* all = new std::map<Comm*, CommPtr>;
    return *all;
}

static thread_local u32 group_depth = 0;
static thread_local std::vector<GroupedCall> grouped;
static thread_local std::vector<CommPtr> joining;
static thread_local std::string last_error;

static Result refused(Result result, const std::string& reason) {
    last_error = reason;
    fake_cuda::report("NCCL: " + reason);
    return result;
}

static CommPtr find_comm(Comm* comm) {
    const auto entry = comms().find(comm);
    return entry == comms().end() ? nullptr : entry->second;
}

// Advances earlier calls on a communicator.
static Result progress(Comm& comm) {
    if (comm.error) return comm.error;
    if (!comm.ready && !comm.all_joined()) return IN_PROGRESS;
    if (comm.splitting && !comm.splitting->all_joined()) return IN_PROGRESS;
    if (!comm.deferred.empty()) {
        if (fake_cuda::draw(2)) return IN_PROGRESS;
        for (Queued& queued : comm.deferred) {
            if (fake_cuda::queue(queued.stream, queued.batch)) comm.error = UNHANDLED_CUDA_ERROR;
        }
        comm.deferred.clear();
    }
    return comm.error;
}

static Result usable(Comm* handle, CommPtr& comm) {
    comm = find_comm(handle);
    if (!comm) return refused(INVALID_ARGUMENT, "there is no such communicator");
    if (comm->error) return comm->error;
    if (!comm->ready || comm->splitting || !comm->deferred.empty()) {
        return refused(INVALID_ARGUMENT,
                       "a communicator is used before an earlier call has completed "
                       "(poll ncclCommGetAsyncError)");
    }
    return SUCCESS;
}

static Result wait_for(UniqueLock& guard, Comm& comm) {
    Result result;
    while ((result = progress(comm)) == IN_PROGRESS) {
        guard.unlock();
        usleep(200);
        guard.lock();
    }
    return result;
}

// Waits for a blocking communicator to be ready: now, or at the end of the group.
static Result join(UniqueLock& guard, const CommPtr& comm) {
    if (!comm->blocking) return IN_PROGRESS;
    if (group_depth) {
        joining.push_back(comm);
        return SUCCESS;
    }
    return wait_for(guard, *comm);
}

static bool is_non_blocking(const Config* config, bool default_value) {
    // NCCL_CONFIG_UNDEF_INT.
    if (!config || config->blocking == int(0x80000000)) return default_value;
    return config->blocking == 0;
}

static Result queue(const CommPtr& comm, CUstream stream, std::vector<Call> calls) {
    auto batch = std::make_shared<Batch>(comm, std::move(calls));
    if (!comm->blocking && fake_cuda::draw(4) == 0) {
        comm->deferred.push_back({stream, batch});
        return IN_PROGRESS;
    }
    return fake_cuda::queue(stream, batch) ? UNHANDLED_CUDA_ERROR : SUCCESS;
}

static Result call(Comm* handle, CUstream stream, const Call& of) {
    Guard guard(lock());
    CommPtr comm;
    if (const Result result = usable(handle, comm)) return result;
    if (!width_of(of.type)) return refused(INVALID_ARGUMENT, "the data type is not supported");
    const bool reduces = of.kind == ALL_REDUCE || of.kind == REDUCE_SCATTER || of.kind == REDUCE;
    if (reduces && !can_reduce(of.type, of.operation)) {
        return refused(INVALID_ARGUMENT, "the reduction is not supported for this data type");
    }
    const bool has_root = of.kind == BROADCAST || of.kind == REDUCE || !of.collective();
    if (has_root && (of.root < 0 || of.root >= comm->size)) {
        return refused(INVALID_ARGUMENT, "there is no rank " + std::to_string(of.root));
    }
    if (fake_cuda::device_of(stream) != comm->device) {
        return refused(INVALID_ARGUMENT, "the stream or the thread's context belongs to another "
                                         "device than the communicator");
    }
    if (group_depth) {
        grouped.push_back({comm, stream, of});
        return SUCCESS;
    }
    return queue(comm, stream, {of});
}

EXPORT Result ncclGetVersion(int* version) {
    *version = 22703;
    return SUCCESS;
}

EXPORT const char* ncclGetErrorString(Result result) {
    switch (int(result)) {
        case SUCCESS: return "no error";
        case UNHANDLED_CUDA_ERROR: return "unhandled cuda error";
        case SYSTEM_ERROR: return "unhandled system error";
        case INVALID_ARGUMENT: return "invalid argument";
        case INVALID_USAGE: return "invalid usage";
        case IN_PROGRESS: return "NCCL operation in progress";
        default: return "unknown result code";
    }
}

EXPORT const char* ncclGetLastError(Comm*) { return last_error.c_str(); }

EXPORT Result ncclGetUniqueId(UniqueId* id) {
    const std::string folder = new_folder_name();
    if (folder.size() >= sizeof id->text) return refused(SYSTEM_ERROR, "TMPDIR is too long a name");
    if (!make_folder(folder)) return refused(SYSTEM_ERROR, folder + " cannot be created");
    memset(id->text, 0, sizeof id->text);
    memcpy(id->text, folder.c_str(), folder.size());
    return SUCCESS;
}

// Announces a rank. NCCL rejects two ranks on one device, unless their hosts differ.
static Result announce(Comm& comm) {
    const char* host = getenv("NCCL_HOSTID");
    u64 hash = 0xcbf29ce484222325 + u64(comm.device);
    for (const char* at = host ? host : ""; *at; at++) hash = (hash ^ u8(*at)) * 0x100000001b3;
    const std::string own = comm.file("rank." + std::to_string(comm.rank));
    if (exists(own)) return refused(INVALID_USAGE, "two processes have rank " + std::to_string(comm.rank));
    if (!write_message(own, {0, 0, 0, 0, hash}, nullptr, 0)) return refused(SYSTEM_ERROR, own + " cannot be written");
    const char* many = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    for (int other = 0; other < comm.size && !(many && *many == '1'); other++) {
        Header of;
        if (other == comm.rank || !read_header(comm.file("rank." + std::to_string(other)), of)) continue;
        if (of.count != hash) continue;
        return refused(INVALID_USAGE, "ranks " + std::to_string(other) + " and " +
                                          std::to_string(comm.rank) + " are both on device " +
                                          std::to_string(comm.device));
    }
    return SUCCESS;
}

EXPORT Result ncclCommInitRankConfig(Comm** created, int size, UniqueId id, int rank, Config* config) {
    UniqueLock guard(lock());
    if (size < 1 || rank < 0 || rank >= size) return refused(INVALID_ARGUMENT, "there is no such rank");
    auto comm = std::make_shared<Comm>();
    comm->folder = id.text;
    comm->rank = rank;
    comm->size = size;
    comm->device = fake_cuda::current_device();
    comm->blocking = !is_non_blocking(config, false);
    if (comm->device < 0) return refused(UNHANDLED_CUDA_ERROR, "the thread has no context");
    if (const Result result = announce(*comm)) return result;
    *created = comm.get();
    comms()[comm.get()] = comm;
    return join(guard, comm);
}

EXPORT Result ncclCommInitRank(Comm** created, int size, UniqueId id, int rank) {
    return ncclCommInitRankConfig(created, size, id, rank, nullptr);
}

EXPORT Result ncclCommSplit(Comm* handle, int color, int key, Comm** created, Config* config) {
    UniqueLock guard(lock());
    CommPtr parent;
    if (const Result result = usable(handle, parent)) return result;
    *created = nullptr;
    auto comm = std::make_shared<Comm>();
    comm->parent = parent;
    comm->split = parent->splits++;
    comm->color = color < 0 ? -1 : color;
    comm->device = parent->device;
    comm->blocking = !is_non_blocking(config, !parent->blocking);
    const std::string own = "split." + std::to_string(comm->split) + "." + std::to_string(parent->rank);
    if (!write_message(parent->file(own), {u32(comm->color), 0, 0, key, 0}, nullptr, 0)) {
        return refused(SYSTEM_ERROR, own + " cannot be written");
    }
    parent->splitting = comm;
    if (color >= 0) {
        *created = comm.get();
        comms()[comm.get()] = comm;
    }
    return join(guard, comm);
}

EXPORT Result ncclCommGetAsyncError(Comm* handle, Result* error) {
    Guard guard(lock());
    const CommPtr comm = find_comm(handle);
    if (!comm) return refused(INVALID_ARGUMENT, "there is no such communicator");
    *error = progress(*comm);
    return SUCCESS;
}

static Result query(Comm* handle, int* value, int Comm::*field) {
    Guard guard(lock());
    CommPtr comm;
    if (const Result result = usable(handle, comm)) return result;
    *value = (*comm).*field;
    return SUCCESS;
}
EXPORT Result ncclCommCount(Comm* comm, int* count) { return query(comm, count, &Comm::size); }
EXPORT Result ncclCommUserRank(Comm* comm, int* rank) { return query(comm, rank, &Comm::rank); }
EXPORT Result ncclCommCuDevice(Comm* comm, int* device) { return query(comm, device, &Comm::device); }

// Waits until all launched batches are done.
static Result flush(UniqueLock& guard, Comm& comm) {
    while (comm.error == SUCCESS && (comm.done < comm.launched || !comm.deferred.empty())) {
        progress(comm);
        if (fake_cuda::advance(nullptr)) continue;
        guard.unlock();
        usleep(200);
        guard.lock();
    }
    return comm.error;
}

EXPORT Result ncclCommFinalize(Comm* handle) {
    UniqueLock guard(lock());
    const CommPtr comm = find_comm(handle);
    if (!comm) return refused(INVALID_ARGUMENT, "there is no such communicator");
    return flush(guard, *comm);
}

EXPORT Result ncclCommDestroy(Comm* handle) {
    UniqueLock guard(lock());
    const CommPtr comm = find_comm(handle);
    if (!comm) return refused(INVALID_ARGUMENT, "there is no such communicator");
    const Result result = flush(guard, *comm);
    comm->aborted = true;
    comm->leave();
    comms().erase(handle);
    return result;
}

// Ends all batches with undefined results. Like NCCL's, it returns when all queued batches have ended and no graph
// contains one: the caller must have destroyed such graphs. Batches queued behind those of other communicators end when
// these are aborted too.
EXPORT Result ncclCommAbort(Comm* handle) {
    UniqueLock guard(lock());
    const CommPtr comm = find_comm(handle);
    if (!comm) return refused(INVALID_ARGUMENT, "there is no such communicator");
    comm->aborted = true;
    comm->deferred.clear();
    while (comm->live_batches > 0) {
        if (fake_cuda::advance(nullptr)) continue;
        guard.unlock();
        usleep(200);
        guard.lock();
    }
    comm->leave();
    if (comm->parent && comm->parent->splitting == comm) comm->parent->splitting = nullptr;
    comms().erase(handle);
    return SUCCESS;
}

EXPORT Result ncclGroupStart() {
    group_depth++;
    return SUCCESS;
}

EXPORT Result ncclGroupEnd() {
    UniqueLock guard(lock());
    if (!group_depth) return refused(INVALID_USAGE, "a group ends that has not begun");
    if (--group_depth) return SUCCESS;
    Result result = SUCCESS;
    const auto and_then = [&](Result next) {
        if (result == SUCCESS || (result == IN_PROGRESS && next != SUCCESS)) result = next;
    };
    for (const CommPtr& comm : std::exchange(joining, {})) and_then(wait_for(guard, *comm));
    std::vector<GroupedCall> calls = std::exchange(grouped, {});
    while (!calls.empty()) {
        const GroupedCall first = calls.front();
        std::vector<Call> together;
        for (const GroupedCall& other : calls) {
            if (other.comm != first.comm) continue;
            if (other.stream != first.stream) {
                return refused(INVALID_USAGE, "one communicator on several streams in a group is not supported");
            }
            together.push_back(other.call);
        }
        const auto same = [&](const GroupedCall& other) { return other.comm == first.comm; };
        calls.erase(std::remove_if(calls.begin(), calls.end(), same), calls.end());
        and_then(queue(first.comm, first.stream, std::move(together)));
    }
    return result;
}

EXPORT Result ncclAllReduce(const void* send, void* receive, size_t count, u32 type, u32 operation,
                            Comm* comm, CUstream stream) {
    return call(comm, stream, {ALL_REDUCE, send, receive, count, type, operation, 0});
}
EXPORT Result ncclReduceScatter(const void* send, void* receive, size_t count, u32 type, u32 operation,
                                Comm* comm, CUstream stream) {
    return call(comm, stream, {REDUCE_SCATTER, send, receive, count, type, operation, 0});
}
EXPORT Result ncclReduce(const void* send, void* receive, size_t count, u32 type, u32 operation, int root,
                         Comm* comm, CUstream stream) {
    return call(comm, stream, {REDUCE, send, receive, count, type, operation, root});
}
EXPORT Result ncclAllGather(const void* send, void* receive, size_t count, u32 type, Comm* comm,
                            CUstream stream) {
    return call(comm, stream, {ALL_GATHER, send, receive, count, type, 0, 0});
}
EXPORT Result ncclBroadcast(const void* send, void* receive, size_t count, u32 type, int root, Comm* comm,
                            CUstream stream) {
    return call(comm, stream, {BROADCAST, send, receive, count, type, 0, root});
}
EXPORT Result ncclSend(const void* send, size_t count, u32 type, int peer, Comm* comm, CUstream stream) {
    return call(comm, stream, {SEND, send, nullptr, count, type, 0, peer});
}
EXPORT Result ncclRecv(void* receive, size_t count, u32 type, int peer, Comm* comm, CUstream stream) {
    return call(comm, stream, {RECEIVE, nullptr, receive, count, type, 0, peer});
}
