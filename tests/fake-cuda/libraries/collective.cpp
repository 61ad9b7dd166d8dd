// Collectives, sends and receives, as operations that poll for messages of other ranks.
//
// In the k-th collective of a communicator each rank writes a file `k.RANK` with the call and the data it sends. A rank
// that has seen all of these files knows that earlier collectives are complete everywhere, and removes its own earlier
// files. A send is a file, which is complete when the receiver has answered it.
#include <algorithm>
#include <cstring>
#include "nccl.h"

using fake_cuda::Step;

std::string Call::name() const {
    const char* names[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "send", "receive"};
    return std::string(names[kind]) + " " + std::to_string(count * width_of(type));
}

u64 Call::send_bytes(const Comm& comm) const {
    const u64 bytes = count * width_of(type);
    switch (kind) {
        case REDUCE_SCATTER: return bytes * u64(comm.size);
        case BROADCAST: return comm.rank == root ? bytes : 0;
        case RECEIVE: return 0;
        default: return bytes;
    }
}

u64 Call::receive_bytes(const Comm& comm) const {
    const u64 bytes = count * width_of(type);
    switch (kind) {
        case ALL_GATHER: return bytes * u64(comm.size);
        case REDUCE: return comm.rank == root ? bytes : 0;
        case SEND: return 0;
        default: return bytes;
    }
}

struct CallRun {
    Call call;
    // Index among the communicator's collectives, or among the messages to or from the peer.
    u64 number;
    bool started = false, failed = false;
    // Ranks whose files have been seen.
    int seen = 0;

    std::string path(const Comm& comm, int rank) const {
        return comm.file(std::to_string(number) + "." + std::to_string(rank));
    }

    Step stop(Comm& comm, const std::string& reason) {
        comm.fail(call.name() + ": " + reason);
        failed = true;
        return Step::blocked;
    }

    Step step(Comm& comm, int device) {
        if (failed) return Step::blocked;
        if (!started) {
            using fake_cuda::check_range;
            const u64 sends = call.send_bytes(comm), receives = call.receive_bytes(comm);
            const std::string name = call.name();
            if ((sends && !check_range(device, call.send, sends, "the source of " + name)) ||
                (receives && !check_range(device, call.receive, receives, "the destination of " + name))) {
                return Step::done;
            }
        }
        return call.collective() ? collective(comm) : call.kind == SEND ? send(comm) : receive(comm);
    }

    Step collective(Comm& comm) {
        if (!started) {
            started = true;
            const std::string own = path(comm, comm.rank);
            if (!write_message(own, call.header(), call.send, call.send_bytes(comm))) {
                return stop(comm, own + " cannot be written");
            }
            comm.own_files[number] = own;
            return Step::moved;
        }
        for (; seen < comm.size; seen++) {
            Header other;
            if (!read_header(path(comm, seen), other)) return Step::blocked;
            if (!(other == call.header())) {
                return stop(comm, "rank " + std::to_string(seen) + " makes another call, or with another "
                                  "count, type or root, as collective " + std::to_string(number));
            }
        }
        const bool whole = finish(comm);
        return whole ? Step::done : stop(comm, "a message is truncated");
    }

    bool finish(Comm& comm) {
        const u64 bytes = call.count * width_of(call.type);
        char* to = static_cast<char*>(call.receive);
        switch (call.kind) {
            case BROADCAST: return read_data(path(comm, call.root), 0, to, bytes);
            case ALL_GATHER:
                for (int rank = 0; rank < comm.size; rank++) {
                    if (!read_data(path(comm, rank), 0, to + u64(rank) * bytes, bytes)) return false;
                }
                return true;
            case REDUCE:
                if (comm.rank != call.root) return true;
                break;
            default: break;
        }
        const u64 from = call.kind == REDUCE_SCATTER ? u64(comm.rank) * bytes : 0;
        std::string sum(bytes, 0), other(bytes, 0);
        for (int rank = 0; rank < comm.size; rank++) {
            if (!read_data(path(comm, rank), from, rank ? &other[0] : &sum[0], bytes)) return false;
            if (rank) reduce(&sum[0], other.data(), call.count, call.type, call.operation);
        }
        if (call.operation == AVERAGE) divide(&sum[0], call.count, call.type, comm.size);
        memcpy(to, sum.data(), bytes);
        return true;
    }

    std::string message(const Comm& comm, int from, int to) const {
        return comm.file("message." + std::to_string(from) + "." + std::to_string(to) + "." +
                         std::to_string(number));
    }

    Step send(Comm& comm) {
        const std::string path = message(comm, comm.rank, call.root), taken = path + ".taken";
        if (!started) {
            started = true;
            const Header header = {SEND, call.type, 0, 0, call.count};
            if (!write_message(path, header, call.send, call.send_bytes(comm))) {
                return stop(comm, path + " cannot be written");
            }
            return Step::moved;
        }
        Header answer;
        if (!read_header(taken, answer)) return Step::blocked;
        remove_file(path);
        remove_file(taken);
        const bool same = answer.type == call.type && answer.count == call.count;
        return same ? Step::done : stop(comm, "rank " + std::to_string(call.root) + " receives another count or type");
    }

    Step receive(Comm& comm) {
        const std::string path = message(comm, call.root, comm.rank);
        Header sent;
        started = true;
        if (!read_header(path, sent)) return Step::blocked;
        const bool same = sent.type == call.type && sent.count == call.count;
        const bool whole = same && read_data(path, 0, call.receive, call.receive_bytes(comm));
        if (!write_message(path + ".taken", {RECEIVE, call.type, 0, 0, call.count}, nullptr, 0) || !whole) {
            return stop(comm, "rank " + std::to_string(call.root) + " sends another count or type");
        }
        return Step::done;
    }
};

struct BatchRun : fake_cuda::Run {
    CommPtr comm;
    u64 number, first_collective;
    std::vector<CallRun> calls;

    Step step(int device) override {
        if (comm->aborted) return Step::done;
        if (comm->done != number) return Step::blocked;
        bool moved = false;
        for (size_t at = 0; at < calls.size();) {
            const Step step = calls[at].step(*comm, device);
            moved = moved || step != Step::blocked;
            if (step == Step::done) {
                if (calls[at].call.collective()) remove_files(first_collective);
                calls.erase(calls.begin() + long(at));
            } else {
                at++;
            }
        }
        if (!calls.empty()) return moved ? Step::moved : Step::blocked;
        comm->done++;
        return Step::done;
    }

    // Removes this rank's files of collectives before `before`, which are complete on all ranks.
    void remove_files(u64 before) {
        auto& files = comm->own_files;
        while (!files.empty() && files.begin()->first < before) {
            remove_file(files.begin()->second);
            files.erase(files.begin());
        }
    }
};

Batch::Batch(CommPtr comm, std::vector<Call> calls)
    : Operation(""), comm(std::move(comm)), calls(std::move(calls)) {
    exclusive = true;
    for (const Call& call : this->calls) name += (name.empty() ? "" : " + ") + call.name();
    name += " ranks=" + std::to_string(this->comm->size);
    this->comm->live_batches++;
}

Batch::~Batch() { comm->live_batches--; }

std::unique_ptr<fake_cuda::Run> Batch::start() const {
    auto run = std::make_unique<BatchRun>();
    run->comm = comm;
    run->number = comm->launched++;
    run->first_collective = comm->collectives;
    for (const Call& call : calls) {
        u64& count = call.collective()    ? comm->collectives
                     : call.kind == SEND ? comm->sent[size_t(call.root)]
                                         : comm->received[size_t(call.root)];
        run->calls.push_back({call, count++});
    }
    return run;
}

void Comm::fail(const std::string& reason) {
    if (error == SUCCESS) error = INVALID_USAGE;
    fake_cuda::report("rank " + std::to_string(rank) + " of " + std::to_string(size) + ": " + reason);
}

void Comm::leave() {
    if (folder.empty() || rank < 0) return;
    write_message(file("gone." + std::to_string(rank)), {}, nullptr, 0);
    for (int other = 0; other < size; other++) {
        if (!exists(file("gone." + std::to_string(other)))) return;
    }
    remove_folder(folder);
}

static bool split_joined(Comm& comm) {
    Comm& parent = *comm.parent;
    // Sorted by key, then by rank in the parent.
    std::vector<std::pair<int, int>> members;
    for (int rank = 0; rank < parent.size; rank++) {
        Header of;
        const std::string name = "split." + std::to_string(comm.split) + "." + std::to_string(rank);
        if (!read_header(parent.file(name), of)) return false;
        if (int(of.kind) == comm.color) members.push_back({of.root, rank});
    }
    if (comm.color < 0) return true;
    std::sort(members.begin(), members.end());
    comm.size = int(members.size());
    for (int at = 0; at < comm.size; at++) {
        if (members[size_t(at)].second == parent.rank) comm.rank = at;
    }
    comm.folder = parent.folder + "-" + std::to_string(comm.split) + "-" + std::to_string(comm.color);
    return make_folder(comm.folder);
}

bool Comm::all_joined() {
    if (ready) return true;
    if (parent) {
        if (!split_joined(*this)) return false;
        parent->splitting = nullptr;
    } else {
        for (int other = 0; other < size; other++) {
            if (!exists(file("rank." + std::to_string(other)))) return false;
        }
    }
    sent.resize(size_t(size));
    received.resize(size_t(size));
    return ready = true;
}
