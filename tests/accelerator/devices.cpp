// The current device of each thread, and the contexts that threads make.
//
// Both as in c10/cuda/CUDAFunctions.cpp since CUDA 12: setting a device makes its context, except where it is
// the thread's own already. What restores a device, a guard, only does so where there is a context: else it
// notes which device is wanted, until the thread does something with it.
#include "runtime.hpp"

#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>

namespace emu {

namespace {

thread_local int set = 0; // by the driver: a new thread is on the first device
thread_local int wanted = -1; // instead of `set`, though there is no context
thread_local bool used[kNumDevices] = {};

std::atomic<bool> has[kNumDevices] = {};
std::atomic<void (*)(int)> on_use{nullptr};

void check(int index) {
  if (index < 0 || index >= kNumDevices) {
    throw std::runtime_error("there is no device " + std::to_string(index));
  }
}

void set_by_driver(int index) {
  check(index);
  set = index;
  use_context(index);
}

} // namespace

void use_context(int index) {
  if (!std::exchange(used[index], true)) {
    has[index] = true;
    if (const auto call = on_use.load()) {
      call(index);
    }
  }
}

bool has_context(int index) {
  check(index);
  return has[index];
}

int current_device() {
  return wanted >= 0 ? wanted : set;
}

void set_device(int index) {
  check(index);
  wanted = -1;
  if (index != set) {
    set_by_driver(index);
  }
}

void maybe_set_device(int index) {
  if (has_context(index)) {
    set_device(index);
  } else {
    wanted = index;
  }
}

int exchange_device(int index) {
  const int before = current_device();
  if (std::exchange(wanted, -1) >= 0 || index != before) {
    set_by_driver(index);
  }
  return before;
}

int maybe_exchange_device(int index) {
  const int before = set;
  if (index != before) {
    if (has_context(index)) {
      set_by_driver(index);
    } else {
      wanted = index;
    }
  }
  return before;
}

} // namespace emu

extern "C" void emu_on_use(void (*call)(int)) {
  emu::on_use = call;
}
