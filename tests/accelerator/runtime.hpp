// Devices, streams, events and memory of the emulated accelerator; nothing here knows tensors.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace emu {

constexpr int kNumDevices = 4;
constexpr int kPooledStreams = 32; // for each device, as CUDA has them for each priority
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

// Devices: the current one belongs to the calling thread.
int current_device();
void set_device(int device);

// Streams. Id 0 is the default stream of its device.
Stream* stream(int device, int64_t id);
int64_t next_stream(int device);
int64_t current_stream(int device);
int64_t exchange_stream(int device, int64_t id);
void launch(Stream* on, const std::string& what, const std::vector<Touch>& touches, std::function<void()> body);
bool query(Stream* on);
void synchronize(Stream* on); // by a blocking copy: not counted
void synchronize_stream(Stream* on);
void synchronize_device(int device);

// Events.
MarkPtr record(Stream* on);
void wait(Stream* on, const MarkPtr& mark);
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
