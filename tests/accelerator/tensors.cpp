// The emulated accelerator as PyTorch sees it: guards, allocators, random numbers and operators.
#include "tensors.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <string_view>

namespace emu {

constexpr size_t kMaxRuns = 4096; // of one tensor; of more, accesses are not checked

namespace {

c10::Device device(int index) {
  return {kType, static_cast<c10::DeviceIndex>(index)};
}

int index_of(c10::Device of) {
  return of.has_index() ? of.index() : current_device();
}

Stream* unwrap(const c10::Stream& wrapped) {
  return stream(wrapped.device_index(), wrapped.id());
}

} // namespace

View view_of(const at::Tensor& tensor) {
  const bool wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  void* data = tensor.numel() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
  return {
      data,
      tensor.sizes().vec(),
      tensor.strides().vec(),
      tensor.scalar_type(),
      tensor.is_conj(),
      tensor.is_neg(),
      wrapped};
}

at::Tensor reached(const View& view) {
  auto made = at::from_blob(reach(view.data), view.sizes, view.strides, at::TensorOptions(view.dtype));
  made._set_conj(view.conj);
  made._set_neg(view.negative);
  if (view.wrapped) {
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return made;
}

Touch touch(const at::Tensor& tensor, bool write) {
  Touch made{{}, write};
  if (!tensor.numel() || tensor.device().type() != kType) {
    return made;
  }
  struct Dim {
    int64_t stride, size;
  };
  std::vector<Dim> dims;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) > 0) { // expanded: the same bytes again
      dims.push_back({tensor.stride(i), tensor.size(i)});
    }
  }
  std::sort(dims.begin(), dims.end(), [](Dim a, Dim b) { return a.stride > b.stride; });
  int64_t length = 1; // elements of a run
  while (!dims.empty() && dims.back().stride <= length) {
    length = dims.back().stride * (dims.back().size - 1) + length;
    dims.pop_back();
  }
  size_t count = 1;
  for (const Dim& dim : dims) {
    count *= dim.size;
  }
  if (count > kMaxRuns) {
    return made;
  }
  const auto start = uintptr_t(tensor.const_data_ptr());
  const int64_t itemsize = tensor.element_size();
  for (size_t number = 0; number < count; ++number) {
    int64_t offset = 0;
    size_t rest = number;
    for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
      offset += int64_t(rest % dim->size) * dim->stride;
      rest /= dim->size;
    }
    made.runs.emplace_back(start + offset * itemsize, start + (offset + length) * itemsize);
  }
  std::sort(made.runs.begin(), made.runs.end());
  return made;
}

Stream* stream_of(const at::Tensor& tensor) {
  const int on = tensor.device().index();
  return stream(on, current_stream(on));
}

// ---------------------------------------------------------------------------------- devices and streams

namespace {

// As c10/cuda/impl/CUDAGuardImpl.h, of which some functions set the thread's device and set the one before again,
// which makes its context. Others have a guard, which does not.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device to) const override {
    return device(exchange_device(index_of(to)));
  }
  c10::Device getDevice() const override {
    return device(current_device());
  }
  void setDevice(c10::Device to) const override {
    if (is_autograd_thread()) {
      maybe_set_device(index_of(to)); // torch for CUDA sets the devices of these with contexts only
    } else {
      set_device(index_of(to));
    }
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    maybe_set_device(index_of(to));
  }
  c10::Stream getStream(c10::Device of) const override {
    const int index = index_of(of);
    return wrap(index, current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return wrap(index_of(of), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool high) const override {
    return getNewStream(of, high ? 1 - kPriorities : 0);
  }
  c10::Stream getNewStream(c10::Device of, int priority) const override {
    return wrap(index_of(of), next_stream(index_of(of), priority));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return wrap(to.device_index(), exchange_stream(to.device_index(), to.id()));
  }
  void* getStreamNativeHandle(const c10::Stream of) const override {
    return unwrap(of);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kNumDevices;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }
  bool queryStream(const c10::Stream& of) const override {
    const c10::DeviceGuard guard(of.device());
    return query(unwrap(of));
  }
  void synchronizeStream(const c10::Stream& of) const override {
    const c10::DeviceGuard guard(of.device());
    synchronize_stream(unwrap(of));
  }
  void synchronizeDevice(const c10::DeviceIndex of) const override {
    const int index = of < 0 ? current_device() : of;
    on_device(index, [&] { synchronize_device(index); });
  }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    on_device(on.device_index(), [&] {
      if (!*event) {
        *event = new MarkPtr;
      }
      *static_cast<MarkPtr*>(*event) = emu::record(unwrap(on));
    });
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event) {
      on_device(on.device_index(), [&] { wait(unwrap(on), *static_cast<MarkPtr*>(event)); });
    }
  }
  bool queryEvent(void* event) const override {
    return !event || query(*static_cast<MarkPtr*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) {
      synchronize_event(*static_cast<MarkPtr*>(event));
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex of) const noexcept override {
    if (event) {
      on_device(of < 0 ? current_device() : of, [&] { delete static_cast<MarkPtr*>(event); });
    }
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex of) const override {
    double seconds = 0;
    on_device(of, [&] { seconds = elapsed_s(*static_cast<MarkPtr*>(from), *static_cast<MarkPtr*>(to)); });
    return 1e3 * seconds;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    record_stream(data.get(), unwrap(on));
  }

 private:
  template <class F>
  static void on_device(int index, F call) {
    const int before = current_device();
    set_device(index);
    call();
    set_device(before);
  }
  static bool is_autograd_thread() {
    char name[16] = {};
    pthread_getname_np(pthread_self(), name, sizeof(name));
    return std::string_view(name).starts_with("pt_autograd");
  }
  static c10::Stream wrap(int index, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device(index), id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---------------------------------------------------------------------------------- memory

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* context = nullptr;
    const int index = current_device();
    void* data = emu::allocate(index, nbytes, &context);
    if (nbytes && !data) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, device(index), " has no ", nbytes, " bytes left");
    }
    return {data, context, &release, device(index)};
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "the host does not copy device memory");
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream on) override {
    record_stream(data.get(), unwrap(on));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex of) override {
    const MemoryUse use = memory_use(of);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* each : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*each)[0].current = use.allocated;
      (*each)[0].peak = use.peak;
    }
    stats.reserved_bytes[0].current = use.reserved;
    stats.reserved_bytes[0].peak = use.reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex of) override {
    reset_peak(of);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex of) override {
    const c10::DeviceGuard guard(device(of));
    const MemoryUse use = memory_use(of);
    return {use.limit - use.allocated, use.limit};
  }
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* context = nullptr;
    void* data = allocate_pinned(nbytes, &context);
    TORCH_CHECK(data, "cannot pin ", nbytes, " bytes");
    return {data, context, &release_pinned, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }
  bool record_event(void* data, void*, c10::Stream on) override {
    return record_pinned(data, unwrap(on));
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> on,
    std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(on));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> on,
    std::optional<bool> pinned,
    std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(on));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}

// Makes a storage longer or shorter; what fits of its bytes stays.
void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  const c10::DeviceGuard guard(storage->device());
  c10::DataPtr data = device_memory.allocate(nbytes);
  const size_t kept = std::min(nbytes, storage->nbytes());
  if (kept) {
    const auto from = uintptr_t(storage->data()), to = uintptr_t(data.get());
    const std::vector<Touch> touches{{{{from, from + kept}}, false}, {{{to, to + kept}}, true}};
    const int index = storage->device().index();
    launch(stream(index, current_stream(index)), "resize", touches, [from, to, kept] {
      std::memcpy(reach(reinterpret_cast<void*>(to)), reach(reinterpret_cast<void*>(from)), kept);
    });
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(nbytes);
}

void fit_storage(const at::Tensor& tensor) {
  const size_t wanted = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  if (tensor.numel() && storage->nbytes() < wanted) {
    resize_storage(storage, wanted);
  }
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  if (self.sizes() != size || format.has_value()) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    if (format.has_value()) {
      self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
    }
    fit_storage(self);
  }
  return self;
}

at::Tensor& set_strided(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data()) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  fit_storage(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto count = int64_t(source.nbytes() / self.element_size());
  return set_strided(self, std::move(source), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_strided(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, &device_memory, true);
  return set_strided(self, std::move(none), 0, {0}, {1});
}

void record_stream_of(at::Tensor& self, c10::Stream on) {
  record_stream(self.storage().data(), unwrap(on));
}

// ---------------------------------------------------------------------------------- random numbers

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int index) {
    device_ = emu::device(index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

uint64_t draw(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->random64();
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex of) const override {
    return has_context(of);
  }
  c10::DeviceIndex deviceCount() const override {
    return kNumDevices;
  }
  void setCurrentDevice(c10::DeviceIndex to) const override {
    set_device(to);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    return exchange_device(to);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override {
    return maybe_exchange_device(to);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(device_of(data) >= 0, "this is no memory of a device");
    return device(device_of(data));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex of) const override {
    static const auto* made = [] {
      auto* all = new std::vector<at::Generator>;
      for (int index = 0; index < kNumDevices; ++index) {
        all->push_back(at::make_generator<Generator>(index));
      }
      return all;
    }();
    return (*made)[of < 0 ? current_device() : of];
  }
  at::Generator getNewGenerator(c10::DeviceIndex of) const override {
    return at::make_generator<Generator>(of < 0 ? current_device() : of);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

Hooks* hooks() {
  static auto* made = new Hooks;
  return made;
}

// ---------------------------------------------------------------------------------- copies

thread_local bool falling_back = false; // copies of a fallback to the CPU are not counted

void count_copy(const std::string& kind, int64_t nbytes) {
  if (!falling_back) {
    count(kind);
    count(kind + "_bytes", nbytes);
  }
}

// What runs on the threads of streams sees plain CPU tensors and no autograd.
std::function<void()> plainly(std::function<void()> body) {
  return [body = std::move(body)] {
    c10::InferenceMode mode;
    try {
      body();
    } catch (const c10::Error& error) {
      throw std::runtime_error(error.what_without_backtrace());
    }
  };
}

void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  count_copy("d2d", int64_t(to.nbytes()));
  Stream* on = stream_of(from);
  Stream* at_home = stream_of(to);
  if (on != at_home) { // another device
    wait(on, record(at_home));
  }
  launch(on, "copy", {touch(from, false), touch(to, true)}, plainly([from = view_of(from), to = view_of(to)] {
    reached(to).copy_(reached(from));
  }));
  if (on != at_home) {
    wait(at_home, record(on));
  }
}

// Host memory that copies from the device are to write.
std::mutex expected_mutex;
std::multiset<std::pair<uintptr_t, uintptr_t>> expected;

bool is_expected(std::pair<uintptr_t, uintptr_t> range) {
  std::lock_guard<std::mutex> lock(expected_mutex);
  return std::any_of(expected.begin(), expected.end(), [&](const auto& each) {
    return each.first < range.second && range.first < each.second;
  });
}

uint64_t digest(const void* data, size_t nbytes) {
  uint64_t made = nbytes;
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t start = 0; start < nbytes; start += sizeof(made)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + start, std::min(sizeof(word), nbytes - start));
    made = (made ^ word) * 0x9E3779B97F4A7C15;
    made ^= made >> 32;
  }
  return made;
}

void copy_with_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool up = from.is_cpu();
  const at::Tensor& host = up ? from : to;
  const void* data = host.const_data_ptr();
  const bool pinned = is_pinned(data);
  count_copy(std::string(up ? "h2d" : "d2h") + (pinned ? "_pinned" : "_pageable"), int64_t(to.nbytes()));
  Stream* on = stream_of(up ? to : from);
  auto storage = host.storage().getWeakStorageImpl();
  // Memory of others, say of a mapped file, may live on without its storage.
  const bool owned = !pinned && host.storage().data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter();
  const auto start = uintptr_t(data);
  const std::pair<uintptr_t, uintptr_t> range{start, start + host.nbytes()};
  const bool plain = from.is_contiguous() && to.is_contiguous() && from.scalar_type() == to.scalar_type() &&
      from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
  // What is to arrive, unless the host memory itself waits for bytes of a device.
  std::optional<uint64_t> sent;
  if (up && plain && !is_expected(range)) {
    sent = digest(data, to.nbytes());
  }
  if (!up && plain) {
    std::lock_guard<std::mutex> lock(expected_mutex);
    expected.insert(range);
  }
  auto body = [from = view_of(from), to = view_of(to), nbytes = to.nbytes(), storage, owned, up, plain, range, sent] {
    const auto alive = storage.lock();
    if (alive || !owned) {
      reached(to).copy_(reached(from));
      if (sent && *sent != digest(reach(to.data), nbytes)) {
        fault("host memory", "a copy to the device read its host memory after that had changed");
      }
    } else if (up) {
      fault("host memory", "a copy to the device began after its host memory was freed");
      reached(to).view(c10::kByte).fill_(kPoison);
    } else {
      fault("host memory", "a copy from the device began after its host memory was freed");
    }
    if (!up && plain) {
      std::lock_guard<std::mutex> lock(expected_mutex);
      expected.erase(expected.find(range));
    }
  };
  const char* what = up ? "copy from host" : "copy to host";
  launch(on, what, {touch(from, false), touch(to, true)}, plainly(body));
  if (pinned) {
    record_pinned(data, on);
  }
  if (!non_blocking) {
    if (!falling_back) {
      count("blocking_copies");
    }
    synchronize(on);
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (!to.numel()) {
    return to;
  }
  const at::Tensor from = self.sizes() == to.sizes() ? self : self.expand_as(to);
  if (from.is_cpu() || to.is_cpu()) {
    copy_with_host(from, to, non_blocking);
  } else {
    copy_on_device(from, to);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  at::Tensor host = at::empty_strided({}, {}, self.options().device(c10::kCPU));
  count("items");
  const bool before = std::exchange(falling_back, true);
  copy_from(self.reshape({}), host, false);
  falling_back = before;
  return host.item();
}

// ---------------------------------------------------------------------------------- all other operators

template <class F>
c10::IValue map_tensors(const c10::IValue& value, F f) {
  if (value.isTensor()) {
    return f(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& each : value.toTensorVector()) {
      made.push_back(f(each));
    }
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
      made.push_back(each ? std::optional<at::Tensor>(f(*each)) : std::nullopt);
    }
    return made;
  }
  return value;
}

bool of_tensors(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::ListType || type.kind() == c10::TypeKind::OptionalType) {
    return of_tensors(*type.containedType(0));
  }
  return type.kind() == c10::TypeKind::TensorType;
}

// A tensor argument: device memory to reach then, or host values as they are now.
struct Argument {
  std::optional<View> view;
  at::Tensor host;
};

at::Tensor without_data(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    return tensor;
  }
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
}

// Runs an operator on its stream, by that of the CPU, on the bytes where they are. What it returns is
// allocated here and now, as its kernel for the meta device says. False if that does not say it.
bool launch_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t num_arguments = schema.arguments().size(), first = stack->size() - num_arguments;
  for (const auto& each : schema.returns()) {
    if (!of_tensors(*each.type())) {
      return false;
    }
  }
  bool unknown = false; // whether a result's shape is
  for (const auto& each : schema.returns()) {
    unknown = unknown || !each.alias_info();
  }
  std::optional<c10::Device> on;
  std::vector<c10::IValue> metas;
  std::vector<Argument> arguments; // in the order of `metas`
  std::vector<Touch> touches;
  for (size_t i = 0; i < num_arguments; ++i) {
    const c10::IValue& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool write = alias && alias->isWrite();
    if (value.isDevice()) {
      return false;
    }
    if (value.isGenerator() || (value.isNone() && schema.arguments()[i].name() == "generator")) {
      metas.emplace_back();
      continue;
    }
    bool possible = true;
    metas.push_back(map_tensors(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) {
        arguments.push_back({std::nullopt, tensor});
      } else if (tensor.device().type() == kType) {
        possible = possible && (!on || *on == tensor.device());
        on = tensor.device();
        unknown = unknown || (write && !tensor.numel());
        touches.push_back(touch(tensor, write));
        arguments.push_back({view_of(tensor), {}});
      } else {
        possible = possible && !write && tensor.is_cpu();
        arguments.push_back({std::nullopt, tensor.clone()});
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
          arguments.back().host.unsafeGetTensorImpl()->set_wrapped_number(true);
        }
      }
      return without_data(tensor);
    }));
    if (!possible) {
      return false;
    }
  }
  if (!on) {
    return false;
  }
  torch::jit::Stack returned;
  if (unknown) {
    returned.assign(metas.begin(), metas.end());
    try {
      c10::InferenceMode mode;
      op.callBoxed(&returned);
    } catch (const std::exception&) {
      return false; // its own error, if it is one, comes from the CPU
    }
  }
  const c10::DeviceGuard guard(*on);
  // An argument that was resized.
  size_t number = 0;
  for (size_t i = 0; i < num_arguments; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    std::vector<at::Tensor> real;
    map_tensors((*stack)[first + i], [&](const at::Tensor& tensor) {
      real.push_back(tensor);
      return tensor;
    });
    size_t within = 0;
    map_tensors(metas[i], [&](const at::Tensor& meta) {
      const at::Tensor& tensor = real[within++];
      if (alias && alias->isWrite() && tensor.defined() && tensor.sizes() != meta.sizes()) {
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
        fit_storage(tensor);
        arguments[number].view = view_of(tensor);
        touches.push_back(touch(tensor, true));
      }
      ++number;
      return meta;
    });
  }
  std::vector<c10::IValue> results;
  std::vector<std::optional<View>> outputs; // tensors that are new
  std::vector<bool> is_new;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    is_new.push_back(!alias);
    if (alias) {
      for (size_t j = 0; j < num_arguments; ++j) {
        const auto* other = schema.arguments()[j].alias_info();
        if (alias->isWrite() && other && *other == *alias) {
          results.push_back((*stack)[first + j]);
        }
      }
      if (results.size() != i + 1) {
        return false;
      }
    } else {
      results.push_back(map_tensors(returned[i], [&](const at::Tensor& meta) {
        if (!meta.defined()) {
          outputs.emplace_back();
          return meta;
        }
        at::Tensor made = at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(*on));
        touches.push_back(touch(made, true));
        outputs.emplace_back(view_of(made));
        return made;
      }));
    }
  }
  for (size_t i = 0; i < num_arguments; ++i) { // what is drawn is drawn now
    const c10::IValue& value = (*stack)[first + i];
    if (value.isGenerator() || (value.isNone() && schema.arguments()[i].name() == "generator")) {
      metas[i] = at::detail::createCPUGenerator(
          draw(value.isGenerator() ? value.toGenerator() : hooks()->getDefaultGenerator(on->index())));
    }
  }
  count("kernels");
  auto body = [op, metas, arguments, outputs, is_new] {
    torch::jit::Stack values;
    std::vector<at::Tensor> given;
    size_t number = 0;
    for (const c10::IValue& meta : metas) {
      values.push_back(map_tensors(meta, [&](const at::Tensor&) {
        const Argument& each = arguments[number++];
        given.push_back(each.view ? reached(*each.view) : each.host);
        return given.back();
      }));
    }
    op.callBoxed(&values);
    for (size_t i = 0; i < given.size(); ++i) {
      TORCH_CHECK(!arguments[i].view || given[i].sizes() == arguments[i].view->sizes, "out= has another shape");
    }
    size_t output = 0;
    for (size_t i = 0; i < is_new.size(); ++i) {
      if (is_new[i]) {
        map_tensors(values[i], [&](const at::Tensor& result) {
          const auto& to = outputs[output++];
          if (to && result.numel()) {
            reached(*to).copy_(result);
          }
          return result;
        });
      }
    }
  };
  launch(stream(on->index(), current_stream(on->index())), schema.name(), touches, plainly(std::move(body)));
  torch::jit::drop(*stack, num_arguments);
  stack->insert(stack->end(), results.begin(), results.end());
  return true;
}

void any_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (launch_operator(op, stack)) {
    return;
  }
  count("fallbacks");
  count("fallback " + op.schema().name());
  const bool before = std::exchange(falling_back, true);
  try {
    at::native::cpu_fallback(op, stack, true);
  } catch (...) {
    falling_back = before;
    throw;
  }
  falling_back = before;
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}

at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream_of);
}

// Copies read and write lazy conjugates as they are.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>());
}

const bool registered = [] {
  c10::SetAllocator(kType, &device_memory);
  at::setHostAllocator(kType, &pinned_memory);
  at::RegisterPrivateUse1HooksInterface(hooks());
  return true;
}();

} // namespace
} // namespace emu

extern "C" void emu_seed(int device, uint64_t seed) {
  at::Generator generator = emu::hooks()->getDefaultGenerator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

extern "C" void emu_get_random(int device, void* state) {
  at::Generator generator = emu::hooks()->getDefaultGenerator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  const at::Tensor found = generator.get_state();
  std::memcpy(state, found.data_ptr(), found.nbytes());
}

extern "C" void emu_set_random(int device, void* state) {
  at::Generator generator = emu::hooks()->getDefaultGenerator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  at::Tensor wanted = generator.get_state();
  std::memcpy(wanted.data_ptr(), state, wanted.nbytes());
  generator.set_state(wanted);
}
