// Devices, streams, events and memory of the emulated accelerator; nothing here knows tensors.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace emu {

constexpr int kNumDevices = 4;
constexpr int kPooledStreams = 32; // of a device, for each priority
constexpr int kPriorities = 4; // 0, and higher ones: -1 to -3
constexpr unsigned char kPoison = 0xDB;

using Clock = std::vector<uint64_t>; // by stream number: how many of its operations are known to be over
using Runs = std::vector<std::pair<uintptr_t, uintptr_t>>; // byte addresses [start, end), sorted

// Device memory that an operation reads or writes.
struct Touch {
  Runs runs;
  bool write;
};

// One recording of an event.
struct Mark {
  bool done = false;
  Clock clock;
  double time_s = 0;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Stream;
struct Block;
struct HostBlock;

// What tests choose; see `Mode` in __init__.py. No time: it is off.
struct Mode {
  std::atomic<int> pool{kPooledStreams};
  std::atomic<bool> one_queue{false}, slow_aborts{false};
  std::atomic<double> ready_s{-1}, dump_s{-1};
};
Mode& mode();

// The calling thread's current device; see devices.cpp.
int current_device();
void set_device(int device);
void maybe_set_device(int device);
int exchange_device(int device); // the one before
int maybe_exchange_device(int device);
void use_context(int device); // makes it, if there is none
bool has_context(int device);

// Streams. Id 0 is the default stream of its device. The others are in pools, which hand them out in turn.
Stream* stream(int device, int64_t id);
int64_t next_stream(int device, int priority);
int64_t current_stream(int device);
int64_t exchange_stream(int device, int64_t id);
void launch(Stream* on, const std::string& what, const std::vector<Touch>& touches, std::function<void()> body);
bool query(Stream* on);
void synchronize(Stream* on); // by a blocking copy: not counted
void synchronize_stream(Stream* on);
void synchronize_device(int device);
void drain(int device); // waits, for a thread of the driver's: nobody learns what is over

// Events.
MarkPtr record(Stream* on);
void wait(Stream* on, const MarkPtr& mark);
void follow(Stream* on, const MarkPtr& mark); // waits, but nobody may rely on it
bool query(const MarkPtr& mark);
void synchronize_event(const MarkPtr& mark);
double elapsed_s(const MarkPtr& from, const MarkPtr& to);

// Device memory: addresses that only operations can reach, through `reach`.
void* allocate(int device, size_t nbytes, void** context);
void release(void* context);
void record_stream(const void* address, Stream* on);
void* reach(const void* address);
int device_of(const void* address); // -1: no device memory
struct MemoryUse {
  int64_t allocated, peak, reserved, limit; // what was reserved stays so
};
MemoryUse memory_use(int device);
void reset_peak(int device);

// Page-locked host memory.
void* allocate_pinned(size_t nbytes, void** context);
void release_pinned(void* context);
bool is_pinned(const void* address);
bool record_pinned(const void* address, Stream* on);

// What tests look at.
void count(const std::string& name, int64_t amount = 1);
void fault(const std::string& kind, const std::string& message);

} // namespace emu
