#include "runtime.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>

namespace emu {

namespace {

constexpr size_t kArenaBytes = size_t(16) << 30; // of address space, for each device
constexpr size_t kMaxAccesses = 256; // that are remembered of a block

struct Access {
  Runs runs;
  bool write;
  int stream;
  uint64_t seq;
  std::string what;
};

// How an operation gets to its device.
enum class Kind {
  kDelayed, // when it is its turn in the hardware queue, and then after the delay that a test has set
  kPrompt, // without the delay
  kAttached, // to the operation before it, not through the hardware queue
};

struct Task {
  std::function<void()> body; // none: it only waits
  bool delayed;
  int64_t ticket; // in the hardware queue, if there is only one; else -1
  MarkPtr after; // what it waits for, if anything
};

std::mutex& mutex() {
  static auto* made = new std::mutex; // leaked, like everything here: threads outlive static destructors
  return *made;
}
using Lock = std::unique_lock<std::mutex>;

std::condition_variable& changed() {
  static auto* made = new std::condition_variable;
  return *made;
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) {
    into.resize(from.size());
  }
  for (size_t i = 0; i < from.size(); ++i) {
    into[i] = std::max(into[i], from[i]);
  }
}

bool knows(const Clock& clock, int stream, uint64_t seq) {
  return size_t(stream) < clock.size() && clock[stream] >= seq;
}

bool overlap(const Runs& a, const Runs& b) {
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    if (a[i].first < b[j].second && b[j].first < a[i].second) {
      return true;
    }
    a[i].second <= b[j].second ? ++i : ++j;
  }
  return false;
}

} // namespace

struct Stream {
  int device;
  int64_t id;
  int number; // in clocks
  Clock clock;
  std::deque<Task> queue;
  uint64_t enqueued = 0, done = 0;
  bool started = false;
  std::condition_variable arrived;
  std::mt19937_64 random;
  std::vector<Block*> freed; // not yet filled
  std::string error;
};

struct Block {
  int device;
  uintptr_t start;
  size_t size; // rounded up
  Stream* owner;
  std::set<Stream*> used_by;
  std::vector<Access> accesses; // of earlier owners, too
};

struct HostBlock {
  uintptr_t start;
  size_t size;
  bool live;
  std::set<Stream*> used_by;
};

namespace {

template <class T>
struct Pending {
  T* block;
  std::vector<MarkPtr> marks;
};

struct Device {
  uintptr_t start = 0; // of addresses that the host cannot touch
  uintptr_t reach = 0; // of the same bytes for operations
  size_t taken = 0;
  int64_t allocated = 0, peak = 0, limit = kArenaBytes;
  std::map<int64_t, Stream*> streams;
  int64_t next[kPriorities] = {}; // in each pool
  int64_t num_queued = 0, num_issued = 0; // through the one hardware queue
  std::map<uintptr_t, Block*> blocks;
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> free; // by owner
  std::vector<Pending<Block>> pending;
};

struct State {
  Device devices[kNumDevices];
  std::vector<Stream*> streams;
  Clock host; // what the host has waited for
  std::map<uintptr_t, HostBlock*> pinned;
  std::map<size_t, std::vector<HostBlock*>> free_pinned;
  std::vector<Pending<HostBlock>> pending_pinned;
  double delay_s = 0, random_delay_s = 0;
  uint64_t seed = 0;
  std::map<std::string, int64_t> counters;
  std::vector<std::pair<std::string, std::string>> faults;
  std::set<int64_t> held;
  int64_t num_holds = 0;
  pid_t pid = 0;
};

State& state() {
  static auto* made = new State;
  return *made;
}

thread_local int64_t this_stream[kNumDevices] = {};

Device& device(int index) {
  if (index < 0 || index >= kNumDevices) {
    throw std::runtime_error("there is no device " + std::to_string(index));
  }
  Device& found = state().devices[index];
  if (!found.start) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* start = mmap(nullptr, kArenaBytes, PROT_NONE, flags, -1, 0);
    void* reach = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (start == MAP_FAILED || reach == MAP_FAILED) {
      throw std::runtime_error("no address space for a device");
    }
    madvise(reach, kArenaBytes, MADV_DONTDUMP);
    found.start = uintptr_t(start);
    found.reach = uintptr_t(reach);
    state().pid = getpid();
  }
  return found;
}

void add_fault(const std::string& kind, const std::string& message) {
  state().faults.emplace_back(kind, message);
}

std::string name(const Stream* on) {
  return "stream " + std::to_string(on->id) + " of device " + std::to_string(on->device);
}

void work(Stream* on) {
  Lock lock(mutex());
  for (;;) {
    on->arrived.wait(lock, [&] { return !on->queue.empty(); });
    Task task = std::move(on->queue.front());
    on->queue.pop_front();
    Device& device = state().devices[on->device];
    // What is first in the hardware queue and cannot start yet blocks all that was queued later.
    changed().wait(lock, [&] {
      return (task.ticket < 0 || task.ticket == device.num_issued) && (!task.after || task.after->done);
    });
    if (task.ticket >= 0) {
      ++device.num_issued;
      changed().notify_all();
    }
    double delay_s = 0;
    if (task.delayed) {
      delay_s = state().delay_s;
      if (state().random_delay_s > 0) {
        delay_s += std::uniform_real_distribution<double>(0, state().random_delay_s)(on->random);
      }
    }
    lock.unlock();
    std::string error;
    try {
      if (delay_s > 0) {
        std::this_thread::sleep_for(std::chrono::duration<double>(delay_s));
      }
      if (task.body) {
        task.body();
      }
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    task.body = nullptr; // drops what it held, not under the lock
    lock.lock();
    if (!error.empty()) {
      on->error = error;
      add_fault("error", name(on) + ": " + error);
    }
    ++on->done;
    changed().notify_all();
  }
}

void check(Stream* on, uint64_t seq, const std::string& what, const Touch& touch) {
  State& all = state();
  if (touch.runs.empty()) {
    return;
  }
  auto& blocks = all.devices[device_of(reinterpret_cast<void*>(touch.runs[0].first))].blocks;
  auto found = blocks.upper_bound(touch.runs[0].first);
  if (found == blocks.begin()) {
    return;
  }
  Block* block = std::prev(found)->second;
  auto& accesses = block->accesses;
  for (const Access& other : accesses) {
    if ((touch.write || other.write) && !knows(on->clock, other.stream, other.seq) &&
        overlap(touch.runs, other.runs)) {
      const bool freed = what == "free" || other.what == "free";
      add_fault(
          freed ? "use after free" : "race",
          what + " on " + name(on) + (touch.write ? " writes" : " reads") + " what " + other.what + " on " +
              name(all.streams[other.stream]) + (other.write ? " writes" : " reads") +
              ", and neither waits for the other");
      break;
    }
  }
  accesses.erase(
      std::remove_if(
          accesses.begin(),
          accesses.end(),
          [&](const Access& other) {
            return knows(all.host, other.stream, other.seq) ||
                (other.stream == on->number && other.write == touch.write && other.runs == touch.runs);
          }),
      accesses.end());
  if (accesses.size() == kMaxAccesses) {
    accesses.erase(accesses.begin());
  }
  accesses.push_back({touch.runs, touch.write, on->number, seq, what});
}

void enqueue(Stream* on, Kind kind, std::function<void()> body, MarkPtr after) {
  if (state().pid != getpid()) {
    throw std::runtime_error("the emulated accelerator was used before this process was forked");
  }
  if (!on->started) {
    on->started = true;
    std::thread(work, on).detach();
  }
  const bool queued = mode().one_queue && kind != Kind::kAttached;
  const int64_t ticket = queued ? state().devices[on->device].num_queued++ : -1;
  on->queue.push_back({std::move(body), kind == Kind::kDelayed, ticket, std::move(after)});
  ++on->enqueued;
  on->arrived.notify_one();
}

void launch_locked(
    Stream* on,
    const std::string& what,
    const std::vector<Touch>& touches,
    Kind kind,
    std::function<void()> body,
    MarkPtr after = nullptr) {
  merge(on->clock, state().host);
  const uint64_t seq = ++on->clock[on->number];
  for (const Touch& touch : touches) {
    check(on, seq, what, touch);
  }
  enqueue(on, kind, std::move(body), std::move(after));
}

// Fills memory that was freed, before the stream's next operation. Not at once: it may wait for others first.
void poison(Stream* on) {
  std::vector<Block*> freed;
  freed.swap(on->freed);
  for (Block* block : freed) {
    void* start = reach(reinterpret_cast<void*>(block->start));
    const size_t size = block->size;
    launch_locked(on, "free", {{{{block->start, block->start + size}}, true}}, Kind::kAttached, [start, size] {
      std::memset(start, kPoison, size);
    });
  }
}

MarkPtr record_locked(Stream* on) {
  poison(on);
  auto mark = std::make_shared<Mark>();
  launch_locked(on, "event", {}, Kind::kAttached, [mark] {
    Lock lock(mutex());
    mark->done = true;
    mark->time_s = now_s();
  });
  mark->clock = on->clock;
  return mark;
}

bool over(const std::vector<MarkPtr>& marks) {
  for (const MarkPtr& mark : marks) {
    if (!mark->done) {
      return false;
    }
  }
  for (const MarkPtr& mark : marks) {
    merge(state().host, mark->clock);
  }
  return true;
}

void give_back(Block* block) {
  Device& on = state().devices[block->device];
  block->owner->freed.push_back(block);
  on.free[{block->owner, block->size}].push_back(block);
}

template <class T, class F>
void settle(std::vector<Pending<T>>& pending, F give_back) {
  auto rest = std::stable_partition(
      pending.begin(), pending.end(), [](const Pending<T>& each) { return !over(each.marks); });
  for (auto each = rest; each != pending.end(); ++each) {
    give_back(each->block);
  }
  pending.erase(rest, pending.end());
}

void settle_pinned() {
  settle(state().pending_pinned, [](HostBlock* block) {
    state().free_pinned[block->size].push_back(block);
  });
}

size_t round_up(size_t nbytes) { // to one of eight sizes between two powers of two, at least 512 bytes
  size_t unit = 512;
  while (unit * 16 < nbytes) {
    unit *= 2;
  }
  return std::max<size_t>((nbytes + unit - 1) / unit * unit, 512);
}

void wait_until_done(Lock& lock, Stream* on) {
  poison(on);
  const uint64_t target = on->enqueued;
  const Clock clock = on->clock;
  changed().wait(lock, [&] { return on->done >= target; });
  merge(state().host, clock);
  if (!on->error.empty()) {
    std::string error;
    error.swap(on->error);
    throw std::runtime_error("an operation on " + name(on) + " failed: " + error);
  }
}

} // namespace

Mode& mode() {
  static auto* made = new Mode;
  return *made;
}

Stream* stream(int index, int64_t id) {
  Lock lock(mutex());
  Stream*& found = device(index).streams[id];
  if (!found) {
    State& all = state();
    found = new Stream;
    found->device = index;
    found->id = id;
    found->number = int(all.streams.size());
    found->clock.resize(all.streams.size() + 1);
    found->random.seed(all.seed * 1000003 + found->number);
    all.streams.push_back(found);
  }
  return found;
}

int64_t next_stream(int index, int priority) {
  use_context(index);
  const int pool = std::clamp(-priority, 0, kPriorities - 1);
  Lock lock(mutex());
  return 1 + pool * kPooledStreams + device(index).next[pool]++ % mode().pool;
}

int64_t current_stream(int index) {
  return this_stream[index];
}

int64_t exchange_stream(int index, int64_t id) {
  return std::exchange(this_stream[index], id);
}

void launch(Stream* on, const std::string& what, const std::vector<Touch>& touches, std::function<void()> body) {
  use_context(on->device);
  Lock lock(mutex());
  poison(on);
  launch_locked(on, what, touches, Kind::kDelayed, std::move(body));
}

bool query(Stream* on) {
  Lock lock(mutex());
  if (on->done < on->enqueued) {
    return false;
  }
  merge(state().host, on->clock);
  return true;
}

void synchronize(Stream* on) {
  Lock lock(mutex());
  wait_until_done(lock, on);
}

void synchronize_stream(Stream* on) {
  count("stream_syncs");
  synchronize(on);
}

void synchronize_device(int index) {
  count("device_syncs");
  Lock lock(mutex());
  for (size_t number = 0; number < state().streams.size(); ++number) {
    if (state().streams[number]->device == index) {
      wait_until_done(lock, state().streams[number]);
    }
  }
}

void drain(int index) {
  Lock lock(mutex());
  std::vector<std::pair<Stream*, uint64_t>> running;
  for (Stream* each : state().streams) {
    if (each->device == index) {
      running.emplace_back(each, each->enqueued);
    }
  }
  changed().wait(lock, [&] {
    return std::all_of(running.begin(), running.end(), [](const auto& each) {
      return each.first->done >= each.second;
    });
  });
}

MarkPtr record(Stream* on) {
  use_context(on->device);
  Lock lock(mutex());
  return record_locked(on);
}

void wait(Stream* on, const MarkPtr& mark) {
  use_context(on->device);
  Lock lock(mutex());
  merge(on->clock, mark->clock);
  launch_locked(on, "wait", {}, Kind::kPrompt, nullptr, mark);
}

void follow(Stream* on, const MarkPtr& mark) {
  Lock lock(mutex());
  launch_locked(on, "wait", {}, Kind::kPrompt, nullptr, mark);
}

bool query(const MarkPtr& mark) {
  Lock lock(mutex());
  return over({mark});
}

void synchronize_event(const MarkPtr& mark) {
  count("event_syncs");
  Lock lock(mutex());
  changed().wait(lock, [&] { return mark->done; });
  over({mark});
}

double elapsed_s(const MarkPtr& from, const MarkPtr& to) {
  Lock lock(mutex());
  if (!from->done || !to->done) {
    throw std::runtime_error("an event has not come yet");
  }
  return to->time_s - from->time_s;
}

void* allocate(int index, size_t nbytes, void** context) {
  if (!nbytes) {
    *context = nullptr;
    return nullptr;
  }
  use_context(index);
  const size_t size = round_up(nbytes);
  Stream* owner = stream(index, this_stream[index]);
  Lock lock(mutex());
  Device& on = device(index);
  settle(on.pending, give_back);
  if (on.allocated + int64_t(size) > on.limit) {
    return nullptr;
  }
  Block* block = nullptr;
  auto& free = on.free[{owner, size}];
  if (!free.empty()) {
    block = free.back();
    free.pop_back();
  }
  if (!block) {
    if (on.taken + size > kArenaBytes) {
      return nullptr;
    }
    block = new Block{index, on.start + on.taken, size, owner, {}, {}};
    on.taken += size;
    on.blocks[block->start] = block;
    owner->freed.push_back(block); // new memory has no values, either
  }
  poison(owner);
  on.allocated += int64_t(size);
  on.peak = std::max(on.peak, on.allocated);
  *context = block;
  return reinterpret_cast<void*>(block->start);
}

void release(void* context) {
  if (!context) {
    return;
  }
  auto* block = static_cast<Block*>(context);
  Lock lock(mutex());
  Device& on = state().devices[block->device];
  on.allocated -= int64_t(block->size);
  std::vector<MarkPtr> marks;
  for (Stream* user : block->used_by) {
    marks.push_back(record_locked(user));
  }
  block->used_by.clear();
  if (marks.empty()) {
    give_back(block);
  } else {
    on.pending.push_back({block, std::move(marks)});
  }
}

void record_stream(const void* address, Stream* user) {
  Lock lock(mutex());
  const int index = device_of(address);
  if (index < 0) {
    return;
  }
  auto found = state().devices[index].blocks.upper_bound(uintptr_t(address));
  Block* block = std::prev(found)->second;
  if (block->owner != user) {
    block->used_by.insert(user);
  }
}

int device_of(const void* address) {
  for (int index = 0; index < kNumDevices; ++index) {
    const Device& each = state().devices[index];
    if (each.start && uintptr_t(address) - each.start < kArenaBytes) {
      return index;
    }
  }
  return -1;
}

void* reach(const void* address) {
  const int index = device_of(address);
  if (index < 0) {
    return const_cast<void*>(address);
  }
  const Device& on = state().devices[index];
  return reinterpret_cast<void*>(uintptr_t(address) - on.start + on.reach);
}

MemoryUse memory_use(int index) {
  Lock lock(mutex());
  const Device& on = device(index);
  return {on.allocated, on.peak, int64_t(on.taken), on.limit};
}

void reset_peak(int index) {
  Lock lock(mutex());
  device(index).peak = device(index).allocated;
}

void* allocate_pinned(size_t nbytes, void** context) {
  size_t size = 4096;
  while (size < nbytes) {
    size *= 2; // as CUDA's allocator has it
  }
  bool any = false; // of the contexts will do
  for (int index = 0; index < kNumDevices; ++index) {
    any = any || has_context(index);
  }
  if (!any) {
    use_context(current_device());
  }
  Lock lock(mutex());
  device(0);
  settle_pinned();
  HostBlock* block = nullptr;
  auto& free = state().free_pinned[size];
  if (!free.empty()) {
    block = free.back();
    free.pop_back();
  } else {
    void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) {
      return nullptr;
    }
    block = new HostBlock{uintptr_t(start), size, true, {}};
    state().pinned[block->start] = block;
    state().counters["pinned_bytes"] += int64_t(size);
  }
  block->live = true;
  *context = block;
  return reinterpret_cast<void*>(block->start);
}

void release_pinned(void* context) {
  auto* block = static_cast<HostBlock*>(context);
  Lock lock(mutex());
  block->live = false;
  std::vector<MarkPtr> marks;
  for (Stream* user : block->used_by) {
    marks.push_back(record_locked(user));
  }
  block->used_by.clear();
  state().pending_pinned.push_back({block, std::move(marks)});
}

namespace {
HostBlock* pinned_block(const void* address) {
  auto found = state().pinned.upper_bound(uintptr_t(address));
  if (found == state().pinned.begin()) {
    return nullptr;
  }
  HostBlock* block = std::prev(found)->second;
  return block->live && uintptr_t(address) - block->start < block->size ? block : nullptr;
}
} // namespace

bool is_pinned(const void* address) {
  Lock lock(mutex());
  return pinned_block(address) != nullptr;
}

bool record_pinned(const void* address, Stream* user) {
  Lock lock(mutex());
  HostBlock* block = pinned_block(address);
  if (block) {
    block->used_by.insert(user);
  }
  return block != nullptr;
}

void count(const std::string& name, int64_t amount) {
  Lock lock(mutex());
  state().counters[name] += amount;
}

void fault(const std::string& kind, const std::string& message) {
  Lock lock(mutex());
  add_fault(kind, message);
}

} // namespace emu

// For Python, by ctypes. Texts live until the same thread asks for the next one.

using namespace emu;

namespace {
const char* keep(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

std::string quoted(const std::string& text) {
  std::string made = "\"";
  for (const char each : text) {
    if (each == '"' || each == '\\') {
      made += '\\';
    }
    made += static_cast<unsigned char>(each) < ' ' ? ' ' : each;
  }
  return made + "\"";
}
} // namespace

extern "C" {

const char* emu_counters(bool reset) {
  Lock lock(mutex());
  std::string made = "{";
  for (const auto& [name, value] : state().counters) {
    made += (made.size() > 1 ? ", " : "") + quoted(name) + ": " + std::to_string(value);
  }
  if (reset) {
    state().counters.clear();
  }
  return keep(made + "}");
}

const char* emu_faults(bool reset) {
  Lock lock(mutex());
  std::string made = "[";
  for (const auto& [kind, message] : state().faults) {
    made += (made.size() > 1 ? ", [" : "[") + quoted(kind) + ", " + quoted(message) + "]";
  }
  if (reset) {
    state().faults.clear();
  }
  return keep(made + "]");
}

void emu_delay(double fixed_s, double random_s, uint64_t seed) {
  Lock lock(mutex());
  State& all = state();
  all.delay_s = fixed_s;
  all.random_delay_s = random_s;
  all.seed = seed;
  for (Stream* each : all.streams) {
    each->random.seed(seed * 1000003 + each->number);
  }
}

void emu_sleep(int device, int64_t id, double seconds) {
  launch(stream(device, id), "sleep", {}, [seconds] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  });
}

int64_t emu_hold(int device, int64_t id) {
  Stream* on = stream(device, id);
  Lock lock(mutex());
  const int64_t hold = state().num_holds++;
  state().held.insert(hold);
  launch_locked(on, "hold", {}, Kind::kPrompt, [hold] {
    Lock inside(mutex());
    changed().wait(inside, [&] { return !state().held.count(hold); });
  });
  return hold;
}

void emu_let_go(int64_t hold) {
  Lock lock(mutex());
  state().held.erase(hold);
  changed().notify_all();
}

void emu_limit(int index, int64_t nbytes) {
  Lock lock(mutex());
  device(index).limit = nbytes;
}
}
