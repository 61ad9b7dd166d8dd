// Shared by the fake CUDA libraries: operations queued on streams, and checks of the memory they access.
//
// Operations do not run when they are queued. Queues advance when the host synchronises or queries, in an order drawn
// from the seed among all orders that streams and events allow. An operation is a state machine, so that one that waits
// for another process blocks its own stream only. One global lock protects all state.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct CUstream_st;
using CUstream = CUstream_st*;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake_cuda {

// Outcome of one step of an operation.
enum class Step { blocked, moved, done };

// An execution of an operation, from its queueing or the launch of its graph until it is done.
struct Run {
    virtual ~Run() = default;
    virtual Step step(int device) = 0;
};

// An operation that can be queued any number of times.
struct Operation {
    // For the log: the kind, then parameters.
    std::string name;
    // Whether a device may be limited to one such operation at a time.
    bool exclusive = false;
    explicit Operation(std::string name) : name(std::move(name)) {}
    virtual ~Operation() = default;
    // Called in the order in which operations are queued or graphs launched.
    virtual std::unique_ptr<Run> start() const = 0;
};

// An operation that completes in one step.
std::shared_ptr<Operation> at_once(std::string name, std::function<void(int device)> action);

// The global lock.
std::mutex& lock();
using Guard = std::lock_guard<std::mutex>;

// Queues an operation on a stream, or adds it to the graph that the stream captures. Returns a CUresult.
int queue(CUstream stream, std::shared_ptr<Operation> operation);

// The device of a stream, or -1; the device of the thread's context, or -1 without one.
int device_of(CUstream stream);
int current_device();

// Whether a range lies within one allocation of the device. If not, the device fails.
bool check_range(int device, const void* begin, u64 bytes, const std::string& what);

// Fails the device: every later call returns `result`. The reason goes to standard error.
void fail(int device, int result, const std::string& reason);

// Writes a line to standard error.
void report(const std::string& message);

// Appends a line to the log file, if there is one.
void log(const std::string& line);

// Advances one queue by one step; the host waits for stream `target`. False when no queue can advance.
bool advance(CUstream target);

// A pseudo-random number below a bound.
u32 draw(u32 below);

// An integer from the environment, or a default.
u64 setting(const char* name, u64 default_value);

}  // namespace fake_cuda
