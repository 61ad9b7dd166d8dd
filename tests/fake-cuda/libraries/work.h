// What the stand-ins share: work that is queued on streams, and the memory it may touch.
//
// Nothing runs when it is queued. Somebody who synchronises or asks makes queues advance, in an
// order drawn by the seed: whatever order events and streams leave open is one that may happen.
// An operation is a state machine, so that one that waits for another process stops its own stream
// and no other. Everything here is done under one lock.
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

namespace stand_in {

// What became of an attempt to go on.
enum class Step { blocked, moved, done };

// An operation that was queued, or whose graph was launched, and is not done yet.
struct Run {
    virtual ~Run() = default;
    virtual Step step(int device) = 0;
};

// What can be queued, any number of times.
struct Operation {
    // For the log: what it is, then what distinguishes it.
    std::string name;
    // Whether two of a device may be under way at once.
    bool alone = false;
    explicit Operation(std::string name) : name(std::move(name)) {}
    virtual ~Operation() = default;
    // Called in the order of the calls that queue it, or launch its graph.
    virtual std::unique_ptr<Run> start() const = 0;
};

// An operation that is done in one go.
std::shared_ptr<Operation> at_once(std::string name, std::function<void(int device)> action);

// The lock that everything is done under.
std::mutex& lock();
using Guard = std::lock_guard<std::mutex>;

// Puts an operation on a stream, or into the graph that the stream captures. Returns a CUresult.
int queue(CUstream stream, std::shared_ptr<Operation> operation);

// The device of a stream, -1 for none; of the thread's context, -1 without one.
int device_of(CUstream stream);
int current_device();

// Whether these bytes lie in one allocation of the device. If not, the device fails.
bool inside(int device, const void* begin, u64 bytes, const std::string& what);

// The device fails: every later call says so, and a sentence says why.
void fail(int device, int result, const std::string& why);

// A sentence about a call that is refused, on standard error.
void say(const std::string& sentence);

// A line for the log, where one is kept.
void log(const std::string& line);

// Lets queues advance by one step; the stream is whom somebody waits for. False when nothing can.
bool advance(CUstream target);

// A number below a bound, drawn by the seed.
u32 draw(u32 below);

// A number from the environment, or this.
u64 setting(const char* name, u64 otherwise);

}  // namespace stand_in
