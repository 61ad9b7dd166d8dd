// Queues, and in which order they advance.
//
// The seed chooses one of four habits, and within it every choice:
//   0  each step is of any stream;
//   1  a stream goes on as far as it can before another is chosen;
//   2  nothing runs that is not waited for;
//   3  the youngest stream first, and the one that is waited for last.
// All are what a device may do where events leave it open. Where nobody asks for long, everything
// advances: other processes may wait for what is queued here.
#include <fcntl.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include "state.h"

namespace stand_in {

// Never destroyed: a thread may still advance when the process ends.
std::mutex& lock() {
    static auto* mutex = new std::mutex;
    return *mutex;
}

State& state() {
    static auto* state = new State;
    return *state;
}

u64 setting(const char* name, u64 otherwise) {
    const char* text = getenv(name);
    return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}

static u64 seed() {
    static const u64 seed = setting("NARROWS_FAKE_CUDA_SEED", 0);
    return seed;
}

u32 draw(u32 below) {
    // Processes that share a seed draw other numbers, one for each device.
    static auto* random = new std::mt19937_64(seed() + 1'000'003 * u64(state().first_device + 1));
    return u32((*random)() % below);
}

double now_ms() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

void say(const std::string& sentence) {
    const std::string line = "stand-in: " + sentence + "\n";
    if (write(2, line.data(), line.size()) < 0) return;
}

void log(const std::string& line) {
    static const int file = [] {
        const char* path = getenv("NARROWS_FAKE_CUDA_LOG");
        return path && *path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666) : -1;
    }();
    if (file < 0) return;
    const std::string whole = "process=" + std::to_string(getpid()) + " " + line + "\n";
    if (write(file, whole.data(), whole.size()) < 0) say("the log cannot be written");
}

struct AtOnce : Operation {
    std::function<void(int)> action;
    AtOnce(std::string name, std::function<void(int)> action)
        : Operation(std::move(name)), action(std::move(action)) {}
    struct Started : Run {
        std::function<void(int)> action;
        Step step(int device) override {
            action(device);
            return Step::done;
        }
    };
    std::unique_ptr<Run> start() const override {
        auto run = std::make_unique<Started>();
        run->action = action;
        return run;
    }
};

std::shared_ptr<Operation> at_once(std::string name, std::function<void(int device)> action) {
    return std::make_shared<AtOnce>(std::move(name), std::move(action));
}

// What is queued does not run by itself as long as the host is busy, but not for ever.
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

static const Operation* of_graphs = nullptr;

// One step of an operation that nothing else is in the way of.
static Step attempt(Device& device, const Operation& operation, Run& run, const std::string& where) {
    static const bool one_at_once = setting("NARROWS_FAKE_CUDA_ONE_COLLECTIVE", 0) != 0;
    const bool alone = operation.alone && one_at_once;
    if (alone && device.alone && device.alone != &run) return Step::blocked;
    if (alone) device.alone = &run;
    const Step step = run.step(device.ordinal);
    if (step == Step::done) {
        if (alone) device.alone = nullptr;
        if (&operation != of_graphs) log("run " + where + " " + operation.name);
    }
    return step;
}

// A launched graph: its nodes in any order that its edges allow.
struct GraphRun : Run {
    std::shared_ptr<const Graph> graph;
    std::vector<std::unique_ptr<Run>> runs;
    std::vector<bool> done;
    MarkerPtr before;
    std::string where;
    u32 left;

    Step step(int device) override {
        if (before && !before->done) return Step::blocked;
        if (left == 0) return Step::done;
        std::vector<u32> ready;
        for (u32 at = 0; at < graph->nodes.size(); at++) {
            const auto& after = graph->nodes[at].after;
            const auto finished = [&](u32 node) { return bool(done[node]); };
            if (!done[at] && std::all_of(after.begin(), after.end(), finished)) ready.push_back(at);
        }
        while (!ready.empty()) {
            const u32 choice = draw(u32(ready.size())), at = ready[choice];
            const std::string place = where + " graph=" + std::to_string(graph->number) +
                                      " node=" + std::to_string(at);
            const Step step =
                attempt(*state().devices[device], *graph->nodes[at].operation, *runs[at], place);
            if (step == Step::done) {
                done[at] = true;
                return --left == 0 ? Step::done : Step::moved;
            }
            if (step == Step::moved) return step;
            ready.erase(ready.begin() + choice);
        }
        return Step::blocked;
    }
};

static std::string place_of(CUstream stream) {
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
    if (CUresult result = working(device)) return result;
    if (CUresult result = resolve(*device, stream)) return result;
    if (stream->capture) return capture_node(stream, std::move(operation));
    auto run = operation->start();
    push(stream, std::move(operation), std::move(run), {});
    return CUDA_SUCCESS;
}

// The host has launched a graph.
void push_graph(CUstream stream, CUgraphExec_st& exec) {
    static const auto operation = at_once("graph", [](int) {});
    of_graphs = operation.get();
    auto run = std::make_unique<GraphRun>();
    run->graph = exec.graph;
    run->left = u32(exec.graph->nodes.size());
    run->done.resize(run->left);
    for (const Node& node : exec.graph->nodes) run->runs.push_back(node.operation->start());
    run->before = exec.last;
    run->where = place_of(stream);
    exec.last = push(stream, operation, std::move(run), {});
}

bool idle(CUstream stream) { return stream->queue.empty(); }

static void finish(Item& item) {
    item.done->done = true;
    item.done->milliseconds = now_ms();
}

// One step of a stream's first operation.
static bool advance_stream(CUstream stream) {
    Device& device = *state().devices[stream->device];
    if (stream->queue.empty()) return false;
    if (device.error) {
        // Nothing of a failed device runs; that nobody waits for it is all that is left to do.
        for (Item& item : stream->queue) finish(item);
        stream->queue.clear();
        device.alone = nullptr;
        return true;
    }
    Item& item = stream->queue.front();
    for (const MarkerPtr& wait : item.waits) {
        if (!wait->done) return false;
    }
    const Step step = attempt(device, *item.operation, *item.run, place_of(stream));
    if (step == Step::done) {
        finish(item);
        stream->queue.pop_front();
    }
    return step != Step::blocked;
}

static std::vector<CUstream> busy() {
    std::vector<CUstream> found;
    for (CUstream stream : state().streams) {
        if (!stream->queue.empty()) found.push_back(stream);
    }
    for (auto& device : state().devices) {
        if (!device->legacy.queue.empty()) found.push_back(&device->legacy);
    }
    const auto older = [](CUstream a, CUstream b) {
        return std::make_pair(a->device, a->number) < std::make_pair(b->device, b->number);
    };
    std::sort(found.begin(), found.end(), older);
    return found;
}

bool advance(CUstream target) {
    static u32 favourite = 0;
    std::vector<CUstream> streams = busy();
    // Any order, unless a habit says another.
    for (u32 at = u32(streams.size()); at > 1; at--) std::swap(streams[at - 1], streams[draw(at)]);
    const auto first = [&](auto preferred) {
        std::stable_partition(streams.begin(), streams.end(), preferred);
    };
    switch (seed() % 4) {
        case 1: first([&](CUstream stream) { return stream->number == favourite; }); break;
        case 2: first([&](CUstream stream) { return stream == target; }); break;
        case 3:
            std::sort(streams.begin(), streams.end(),
                      [](CUstream a, CUstream b) { return a->number > b->number; });
            first([&](CUstream stream) { return stream != target; });
            break;
        default: break;
    }
    for (CUstream stream : streams) {
        if (!advance_stream(stream)) continue;
        favourite = stream->number;
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
                  std::unique_lock<std::mutex>& held) {
    while (!device.error && !done()) {
        const bool moved = advance(target);
        state().last_call_ms = u64(now_ms());
        held.unlock();
        if (!moved) usleep(100);
        held.lock();
    }
    return device.error;
}

void fail(int ordinal, int result, const std::string& why) {
    Device& device = *state().devices[ordinal];
    say(why);
    log("failed device=" + std::to_string(ordinal) + " result=" + std::to_string(result));
    if (!device.error) device.error = result;
}

}  // namespace stand_in
