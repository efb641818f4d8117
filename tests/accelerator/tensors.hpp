// Tensors as operations see them; shared by the kernels and the process group.
#pragma once

#include <ATen/core/Tensor.h>

#include "runtime.hpp"

namespace emu {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// What is left of a tensor when its operation runs, on another thread.
struct View {
  void* data;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
  bool conj, negative, wrapped;
};

View view_of(const at::Tensor& tensor);
at::Tensor reached(const View& view); // a CPU tensor of the same bytes, for the thread of a stream
Touch touch(const at::Tensor& tensor, bool write);
Stream* stream_of(const at::Tensor& tensor); // the calling thread's current one on the tensor's device

} // namespace emu
