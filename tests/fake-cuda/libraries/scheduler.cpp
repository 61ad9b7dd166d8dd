// Stream queues, and the order in which they advance.
//
// The seed modulo 4 selects a policy, and the seed draws all choices within it:
//   0  each step advances a random stream;
//   1  a stream advances as far as it can before another is chosen;
//   2  streams that the host waits for first;
//   3  the youngest stream first, and the one that the host waits for last.
// A device may do any of these where events leave the order open. When the host makes no calls for a while, everything
// advances, since other processes may wait for operations queued here.
#include <fcntl.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include "state.h"

namespace fake_cuda {

// Never destroyed: the background thread may still run while the process exits.
std::mutex& lock() {
    static auto* mutex = new std::mutex;
    return *mutex;
}

State& state() {
    static auto* state = new State;
    return *state;
}

u64 setting(const char* name, u64 default_value) {
    const char* text = getenv(name);
    return text && *text ? strtoull(text, nullptr, 10) : default_value;
}

static u64 seed() {
    static const u64 seed = setting("NARROWS_FAKE_CUDA_SEED", 0);
    return seed;
}

u32 draw(u32 below) {
    // Processes with the same seed draw different sequences, one per device.
    static auto* random = new std::mt19937_64(seed() + 1'000'003 * u64(state().first_device + 1));
    return u32((*random)() % below);
}

double now_ms() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

void report(const std::string& message) {
    const std::string line = "fake CUDA: " + message + "\n";
    if (write(2, line.data(), line.size()) < 0) return;
}

void log(const std::string& line) {
    static const int file = [] {
        const char* path = getenv("NARROWS_FAKE_CUDA_LOG");
        return path && *path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666) : -1;
    }();
    if (file < 0) return;
    const std::string whole = "process=" + std::to_string(getpid()) + " " + line + "\n";
    if (write(file, whole.data(), whole.size()) < 0) report("the log cannot be written");
}

struct AtOnce : Operation {
    std::function<void(int)> action;
    AtOnce(std::string name, std::function<void(int)> action)
        : Operation(std::move(name)), action(std::move(action)) {}
    struct Execution : Run {
        std::function<void(int)> action;
        Step step(int device) override {
            action(device);
            return Step::done;
        }
    };
    std::unique_ptr<Run> start() const override {
        auto run = std::make_unique<Execution>();
        run->action = action;
        return run;
    }
};

std::shared_ptr<Operation> at_once(std::string name, std::function<void(int device)> action) {
    return std::make_shared<AtOnce>(std::move(name), std::move(action));
}

// Advances all queues once the host has made no calls for a while.
static void advance_when_quiet() {
    constexpr u64 QUIET_MS = 300;
    for (;;) {
        usleep(50'000);
        for (u32 steps = 0; steps < 64; steps++) {
            Guard guard(lock());
            if (u64(now_ms()) < state().last_call_ms + QUIET_MS || !advance(nullptr)) break;
        }
    }
}

// The operation that stands for launched graphs, which are not logged themselves.
static const Operation* graph_operation = nullptr;

// Attempts one step of an operation whose dependencies are done.
static Step attempt(Device& device, const Operation& operation, Run& run, const std::string& where) {
    static const bool one_at_once = setting("NARROWS_FAKE_CUDA_ONE_COLLECTIVE", 0) != 0;
    const bool exclusive = operation.exclusive && one_at_once;
    if (exclusive && device.exclusive && device.exclusive != &run) return Step::blocked;
    if (exclusive) device.exclusive = &run;
    const Step step = run.step(device.ordinal);
    if (step == Step::done) {
        if (exclusive) device.exclusive = nullptr;
        if (&operation != graph_operation) log("run " + where + " " + operation.name);
    }
    return step;
}

// An execution of a graph: its nodes run in a random topological order.
struct GraphRun : Run {
    std::shared_ptr<const Graph> graph;
    std::vector<std::unique_ptr<Run>> runs;
    std::vector<bool> done;
    MarkerPtr previous_launch;
    std::string where;
    u32 remaining;

    Step step(int device) override {
        if (previous_launch && !previous_launch->done) return Step::blocked;
        if (remaining == 0) return Step::done;
        std::vector<u32> ready;
        for (u32 at = 0; at < graph->nodes.size(); at++) {
            const auto& after = graph->nodes[at].after;
            const auto finished = [&](u32 node) { return bool(done[node]); };
            if (!done[at] && std::all_of(after.begin(), after.end(), finished)) ready.push_back(at);
        }
        while (!ready.empty()) {
            const u32 choice = draw(u32(ready.size())), at = ready[choice];
            const std::string node_name = where + " graph=" + std::to_string(graph->number) +
                                      " node=" + std::to_string(at);
            const Step step =
                attempt(*state().devices[device], *graph->nodes[at].operation, *runs[at], node_name);
            if (step == Step::done) {
                done[at] = true;
                return --remaining == 0 ? Step::done : Step::moved;
            }
            if (step == Step::moved) return step;
            ready.erase(ready.begin() + choice);
        }
        return Step::blocked;
    }
};

static std::string stream_name(CUstream stream) {
    return "device=" + std::to_string(stream->device) + " stream=" + std::to_string(stream->number);
}

MarkerPtr push(CUstream stream, std::shared_ptr<const Operation> operation, std::unique_ptr<Run> run,
               std::vector<MarkerPtr> waits) {
    static const bool started = (std::thread(advance_when_quiet).detach(), true);
    (void)started;
    Device& device = *state().devices[stream->device];
    const auto after = [&](const CUstream_st& other) {
        if (other.tail && !other.tail->done) waits.push_back(other.tail);
    };
    if (stream == &device.legacy) {
        for (CUstream other : state().streams) {
            if (other->blocking && other->device == stream->device) after(*other);
        }
    } else if (stream->blocking) {
        after(device.legacy);
    }
    auto done = std::make_shared<Marker>();
    stream->queue.push_back({std::move(operation), std::move(run), std::move(waits), done});
    stream->tail = done;
    state().last_call_ms = u64(now_ms());
    return done;
}

int queue(CUstream stream, std::shared_ptr<Operation> operation) {
    Device* device;
    if (CUresult result = working_device(device)) return result;
    if (CUresult result = resolve(*device, stream)) return result;
    if (stream->capture) return capture_node(stream, std::move(operation));
    auto run = operation->start();
    push(stream, std::move(operation), std::move(run), {});
    return CUDA_SUCCESS;
}

// Queues a launch of a graph.
void push_graph(CUstream stream, CUgraphExec_st& exec) {
    static const auto operation = at_once("graph", [](int) {});
    graph_operation = operation.get();
    auto run = std::make_unique<GraphRun>();
    run->graph = exec.graph;
    run->remaining = u32(exec.graph->nodes.size());
    run->done.resize(run->remaining);
    for (const Node& node : exec.graph->nodes) run->runs.push_back(node.operation->start());
    run->previous_launch = exec.last_launch;
    run->where = stream_name(stream);
    exec.last_launch = push(stream, operation, std::move(run), {});
}

bool idle(CUstream stream) { return stream->queue.empty(); }

static void finish(QueuedOperation& item) {
    item.done->done = true;
    item.done->milliseconds = now_ms();
}

// Attempts one step of the first operation of a stream.
static bool advance_stream(CUstream stream) {
    Device& device = *state().devices[stream->device];
    if (stream->queue.empty()) return false;
    if (device.error) {
        // Operations of a failed device do not run; they complete so that no one waits for them.
        for (QueuedOperation& item : stream->queue) finish(item);
        stream->queue.clear();
        device.exclusive = nullptr;
        return true;
    }
    QueuedOperation& item = stream->queue.front();
    for (const MarkerPtr& wait : item.waits) {
        if (!wait->done) return false;
    }
    const Step step = attempt(device, *item.operation, *item.run, stream_name(stream));
    if (step == Step::done) {
        finish(item);
        stream->queue.pop_front();
    }
    return step != Step::blocked;
}

static std::vector<CUstream> busy_streams() {
    std::vector<CUstream> streams;
    for (CUstream stream : state().streams) {
        if (!stream->queue.empty()) streams.push_back(stream);
    }
    for (auto& device : state().devices) {
        if (!device->legacy.queue.empty()) streams.push_back(&device->legacy);
    }
    const auto older = [](CUstream a, CUstream b) {
        return std::make_pair(a->device, a->number) < std::make_pair(b->device, b->number);
    };
    std::sort(streams.begin(), streams.end(), older);
    return streams;
}

bool advance(CUstream target) {
    static u32 current = 0;
    std::vector<CUstream> streams = busy_streams();
    // A random order, to which the policy's preference is applied.
    for (u32 at = u32(streams.size()); at > 1; at--) std::swap(streams[at - 1], streams[draw(at)]);
    const auto prefer = [&](auto preferred) {
        std::stable_partition(streams.begin(), streams.end(), preferred);
    };
    switch (seed() % 4) {
        case 1: prefer([&](CUstream stream) { return stream->number == current; }); break;
        case 2: prefer([&](CUstream stream) { return stream == target; }); break;
        case 3:
            std::sort(streams.begin(), streams.end(),
                      [](CUstream a, CUstream b) { return a->number > b->number; });
            prefer([&](CUstream stream) { return stream != target; });
            break;
        default: break;
    }
    for (CUstream stream : streams) {
        if (!advance_stream(stream)) continue;
        current = stream->number;
        if (stream->destroyed && stream->queue.empty()) {
            state().streams.erase(stream);
            delete stream;
        }
        return true;
    }
    return false;
}

void advance_a_little(CUstream target) {
    for (u32 steps = 1 + draw(32); steps && advance(target); steps--) {}
}

CUresult wait_for(Device& device, CUstream target, const std::function<bool()>& done,
                  std::unique_lock<std::mutex>& lock) {
    while (!device.error && !done()) {
        const bool moved = advance(target);
        state().last_call_ms = u64(now_ms());
        lock.unlock();
        if (!moved) usleep(100);
        lock.lock();
    }
    return device.error;
}

void fail(int ordinal, int result, const std::string& reason) {
    Device& device = *state().devices[ordinal];
    report(reason);
    log("failed device=" + std::to_string(ordinal) + " result=" + std::to_string(result));
    if (!device.error) device.error = result;
}

}  // namespace fake_cuda
