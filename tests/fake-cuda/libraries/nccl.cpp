// NCCL's stand-in: communicators, and what is called on them.
//
// A communicator that does not block says ncclInProgress wherever NCCL may: until all ranks came, and
// now and then for what is launched, which is then not on its stream before ncclCommGetAsyncError
// says that it is.
#include "nccl.h"
#include <unistd.h>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

using stand_in::Guard;
using stand_in::lock;
using Held = std::unique_lock<std::mutex>;

struct UniqueId {
    char text[128];
};

// As far as it is read.
struct Config {
    size_t size;
    u32 magic, version;
    int blocking;
};

struct Grouped {
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
static thread_local std::vector<Grouped> grouped;
static thread_local std::vector<CommPtr> joining;
static thread_local std::string last_error;

static Result refused(Result result, const std::string& why) {
    last_error = why;
    stand_in::say("NCCL: " + why);
    return result;
}

static CommPtr known(Comm* comm) {
    const auto found = comms().find(comm);
    return found == comms().end() ? nullptr : found->second;
}

// What is still to come of what was called before.
static Result progress(Comm& comm) {
    if (comm.error) return comm.error;
    if (!comm.ready && !comm.arrived()) return IN_PROGRESS;
    if (comm.splitting && !comm.splitting->arrived()) return IN_PROGRESS;
    if (!comm.deferred.empty()) {
        if (stand_in::draw(2)) return IN_PROGRESS;
        for (Queued& queued : comm.deferred) {
            if (stand_in::queue(queued.stream, queued.batch)) comm.error = UNHANDLED_CUDA_ERROR;
        }
        comm.deferred.clear();
    }
    return comm.error;
}

static Result usable(Comm* handle, CommPtr& comm) {
    comm = known(handle);
    if (!comm) return refused(INVALID_ARGUMENT, "there is no such communicator");
    if (comm->error) return comm->error;
    if (!comm->ready || comm->splitting || !comm->deferred.empty()) {
        return refused(INVALID_ARGUMENT,
                       "a communicator is used before what was called on it is done "
                       "(ask ncclCommGetAsyncError until it is)");
    }
    return SUCCESS;
}

static Result wait_for(Held& held, Comm& comm) {
    Result result;
    while ((result = progress(comm)) == IN_PROGRESS) {
        held.unlock();
        usleep(200);
        held.lock();
    }
    return result;
}

// Waits for those that block, at the end of a group if there is one.
static Result join(Held& held, const CommPtr& comm) {
    if (!comm->blocking) return IN_PROGRESS;
    if (group_depth) {
        joining.push_back(comm);
        return SUCCESS;
    }
    return wait_for(held, *comm);
}

static bool does_not_block(const Config* config, bool otherwise) {
    // Of those that say nothing, a number that is none.
    if (!config || config->blocking == int(0x80000000)) return otherwise;
    return config->blocking == 0;
}

static Result queue(const CommPtr& comm, CUstream stream, std::vector<Call> calls) {
    auto batch = std::make_shared<Batch>(comm, std::move(calls));
    if (!comm->blocking && stand_in::draw(4) == 0) {
        comm->deferred.push_back({stream, batch});
        return IN_PROGRESS;
    }
    return stand_in::queue(stream, batch) ? UNHANDLED_CUDA_ERROR : SUCCESS;
}

static Result call(Comm* handle, CUstream stream, const Call& of) {
    Guard guard(lock());
    CommPtr comm;
    if (const Result result = usable(handle, comm)) return result;
    if (!width_of(of.type)) return refused(INVALID_ARGUMENT, "there is no such format");
    const bool reduces = of.kind == ALL_REDUCE || of.kind == REDUCE_SCATTER || of.kind == REDUCE;
    if (reduces && !can_reduce(of.type, of.operation)) {
        return refused(INVALID_ARGUMENT, "this reduction in this format is not stood in for");
    }
    const bool named = of.kind == BROADCAST || of.kind == REDUCE || !of.collective();
    if (named && (of.root < 0 || of.root >= comm->size)) {
        return refused(INVALID_ARGUMENT, "there is no rank " + std::to_string(of.root));
    }
    if (stand_in::device_of(stream) != comm->device) {
        return refused(INVALID_ARGUMENT, "the stream, or the thread's context, is of another device "
                                         "than the communicator");
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
    if (!make_folder(folder)) return refused(SYSTEM_ERROR, folder + " cannot be made");
    memset(id->text, 0, sizeof id->text);
    memcpy(id->text, folder.c_str(), folder.size());
    return SUCCESS;
}

// NCCL takes ranks on one device for a mistake, unless their hosts are told apart.
static Result introduce(Comm& comm) {
    const char* host = getenv("NCCL_HOSTID");
    u64 hash = 0xcbf29ce484222325 + u64(comm.device);
    for (const char* at = host ? host : ""; *at; at++) hash = (hash ^ u8(*at)) * 0x100000001b3;
    const std::string own = comm.file("rank." + std::to_string(comm.rank));
    if (is_there(own)) return refused(INVALID_USAGE, "two are rank " + std::to_string(comm.rank));
    if (!put(own, {0, 0, 0, 0, hash}, nullptr, 0)) return refused(SYSTEM_ERROR, own + " cannot be written");
    const char* many = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    for (int other = 0; other < comm.size && !(many && *many == '1'); other++) {
        Header of;
        if (other == comm.rank || !get(comm.file("rank." + std::to_string(other)), of)) continue;
        if (of.count != hash) continue;
        return refused(INVALID_USAGE, "ranks " + std::to_string(other) + " and " +
                                          std::to_string(comm.rank) + " are both on device " +
                                          std::to_string(comm.device));
    }
    return SUCCESS;
}

EXPORT Result ncclCommInitRankConfig(Comm** made, int size, UniqueId id, int rank, Config* config) {
    Held held(lock());
    if (size < 1 || rank < 0 || rank >= size) return refused(INVALID_ARGUMENT, "there is no such rank");
    auto comm = std::make_shared<Comm>();
    comm->folder = id.text;
    comm->rank = rank;
    comm->size = size;
    comm->device = stand_in::current_device();
    comm->blocking = !does_not_block(config, false);
    if (comm->device < 0) return refused(UNHANDLED_CUDA_ERROR, "the thread has no context");
    if (const Result result = introduce(*comm)) return result;
    *made = comm.get();
    comms()[comm.get()] = comm;
    return join(held, comm);
}

EXPORT Result ncclCommInitRank(Comm** made, int size, UniqueId id, int rank) {
    return ncclCommInitRankConfig(made, size, id, rank, nullptr);
}

EXPORT Result ncclCommSplit(Comm* handle, int color, int key, Comm** made, Config* config) {
    Held held(lock());
    CommPtr parent;
    if (const Result result = usable(handle, parent)) return result;
    *made = nullptr;
    auto comm = std::make_shared<Comm>();
    comm->parent = parent;
    comm->split = parent->splits++;
    comm->color = color < 0 ? -1 : color;
    comm->device = parent->device;
    comm->blocking = !does_not_block(config, !parent->blocking);
    const std::string own = "split." + std::to_string(comm->split) + "." + std::to_string(parent->rank);
    if (!put(parent->file(own), {u32(comm->color), 0, 0, key, 0}, nullptr, 0)) {
        return refused(SYSTEM_ERROR, own + " cannot be written");
    }
    parent->splitting = comm;
    if (color >= 0) {
        *made = comm.get();
        comms()[comm.get()] = comm;
    }
    return join(held, comm);
}

EXPORT Result ncclCommGetAsyncError(Comm* handle, Result* error) {
    Guard guard(lock());
    const CommPtr comm = known(handle);
    if (!comm) return refused(INVALID_ARGUMENT, "there is no such communicator");
    *error = progress(*comm);
    return SUCCESS;
}

static Result asked(Comm* handle, int* answer, int Comm::*what) {
    Guard guard(lock());
    CommPtr comm;
    if (const Result result = usable(handle, comm)) return result;
    *answer = (*comm).*what;
    return SUCCESS;
}
EXPORT Result ncclCommCount(Comm* comm, int* count) { return asked(comm, count, &Comm::size); }
EXPORT Result ncclCommUserRank(Comm* comm, int* rank) { return asked(comm, rank, &Comm::rank); }
EXPORT Result ncclCommCuDevice(Comm* comm, int* device) { return asked(comm, device, &Comm::device); }

// Waits until what was launched is done.
static Result flushed(Held& held, Comm& comm) {
    while (comm.error == SUCCESS && (comm.done < comm.launched || !comm.deferred.empty())) {
        progress(comm);
        if (stand_in::advance(nullptr)) continue;
        held.unlock();
        usleep(200);
        held.lock();
    }
    return comm.error;
}

EXPORT Result ncclCommFinalize(Comm* handle) {
    Held held(lock());
    const CommPtr comm = known(handle);
    if (!comm) return refused(INVALID_ARGUMENT, "there is no such communicator");
    return flushed(held, *comm);
}

EXPORT Result ncclCommDestroy(Comm* handle) {
    Held held(lock());
    const CommPtr comm = known(handle);
    if (!comm) return refused(INVALID_ARGUMENT, "there is no such communicator");
    const Result result = flushed(held, *comm);
    comm->aborted = true;
    comm->leave();
    comms().erase(handle);
    return result;
}

// What is under way ends, and nothing is known of what it leaves. As NCCL's own, it returns when all that
// was queued has ended and no graph has a part of it: the caller must have destroyed those, and what lies on
// streams behind other communicators ends when they are aborted too.
EXPORT Result ncclCommAbort(Comm* handle) {
    Held held(lock());
    const CommPtr comm = known(handle);
    if (!comm) return refused(INVALID_ARGUMENT, "there is no such communicator");
    comm->aborted = true;
    comm->deferred.clear();
    while (comm->held > 0) {
        if (stand_in::advance(nullptr)) continue;
        held.unlock();
        usleep(200);
        held.lock();
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
    Held held(lock());
    if (!group_depth) return refused(INVALID_USAGE, "a group ends that did not begin");
    if (--group_depth) return SUCCESS;
    Result result = SUCCESS;
    const auto and_then = [&](Result next) {
        if (result == SUCCESS || (result == IN_PROGRESS && next != SUCCESS)) result = next;
    };
    for (const CommPtr& comm : std::exchange(joining, {})) and_then(wait_for(held, *comm));
    std::vector<Grouped> calls = std::exchange(grouped, {});
    while (!calls.empty()) {
        const Grouped first = calls.front();
        std::vector<Call> together;
        for (const Grouped& other : calls) {
            if (other.comm != first.comm) continue;
            if (other.stream != first.stream) {
                return refused(INVALID_USAGE, "one communicator on several streams of a group is not stood in for");
            }
            together.push_back(other.call);
        }
        const auto same = [&](const Grouped& other) { return other.comm == first.comm; };
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
