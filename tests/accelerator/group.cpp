// A backend for process groups with the semantics of NCCL, over local sockets.
//
// A communicator connects at its first collective, which waits on the host for all ranks. Its operations run
// one after another, in the order of the calls, on its own stream, or on the caller's if the call is not
// asynchronous. What ranks exchange begins with a header: where they called different collectives, that is a
// fault, and the operation never ends, as when another rank is gone, before somebody aborts.
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "tensors.hpp"

namespace emu {
namespace {

using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Clocked = std::chrono::steady_clock;

std::atomic<bool> watched{false}; // whether a failed operation ends the process, as PyTorch's watchdog does

// As with NCCL, whoever makes a communicator may have asked for it not to.
bool may_end_process() {
  const char* how = std::getenv("TORCH_EMCCL_ASYNC_ERROR_HANDLING");
  return how == nullptr || std::string(how) != "0";
}

// What one rank tells another before its bytes.
struct Header {
  int32_t kind, root, reduction, dtype;
  int64_t nbytes;

  bool fits(const Header& other) const {
    return kind == other.kind && root == other.root && reduction == other.reduction && dtype == other.dtype &&
        nbytes == other.nbytes;
  }
  std::string text() const {
    return c10d::opTypeToString(OpType(kind)) + " (" + std::to_string(nbytes) + " bytes, root " +
        std::to_string(root) + ", reduction " + std::to_string(reduction) + ", dtype " + std::to_string(dtype) + ")";
  }
};

struct Message {
  Header header;
  char* data;
};

// Bytes to or from one rank, in order.
struct Channel {
  std::vector<Message> messages;
  size_t index = 0, done = 0; // of the current one: bytes with its header
  Header seen{};
};

struct Aborted : std::runtime_error {
  Aborted() : std::runtime_error("the communicator was aborted") {}
};

int64_t this_thread() { // those of the system have the ids of others that ended
  static std::atomic<int64_t> count{0};
  thread_local const int64_t number = count++;
  return number;
}

// What tests see of a communicator; it lives longer.
struct Calls {
  int size;
  std::string name;
  int64_t count = 0;
  std::set<int64_t> threads; // that called
};
std::mutex calls_mutex;
std::vector<std::shared_ptr<Calls>>& all_calls() {
  static auto* made = new std::vector<std::shared_ptr<Calls>>;
  return *made;
}

struct Communicator {
  const int rank, size;
  const std::chrono::milliseconds timeout;
  std::vector<int> sockets; // by rank
  const int stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  std::mutex mutex;
  std::condition_variable changed;
  int64_t called = 0, turn = 0; // operations
  const std::shared_ptr<Calls> calls;
  std::atomic<bool> aborted{false};
  const bool ends_process = may_end_process();

  Communicator(int rank, int size, std::chrono::milliseconds timeout)
      : rank(rank), size(size), timeout(timeout), calls(std::make_shared<Calls>()) {
    calls->size = size;
    std::lock_guard<std::mutex> lock(calls_mutex);
    all_calls().push_back(calls);
  }

  ~Communicator() {
    for (const int each : sockets) {
      if (each >= 0) {
        close(each);
      }
    }
    close(stop);
  }

  std::string name() const {
    std::lock_guard<std::mutex> lock(calls_mutex);
    return calls->name;
  }

  bool connected() const {
    return !sockets.empty();
  }

  void abort() {
    std::lock_guard<std::mutex> lock(mutex);
    if (!aborted.exchange(true)) {
      const uint64_t one = 1;
      (void)!write(stop, &one, sizeof(one));
      for (const int each : sockets) {
        if (each >= 0) {
          shutdown(each, SHUT_RDWR); // the others see that this rank is gone
        }
      }
    }
    changed.notify_all();
  }

  // Waits for nothing but an abort, or the watchdog.
  void hang(const std::string& why, Clocked::time_point began) {
    for (;;) {
      pollfd ends{stop, POLLIN, 0};
      poll(&ends, 1, 50);
      if (aborted) {
        throw Aborted();
      }
      watch(why, began);
    }
  }

  void watch(const std::string& why, Clocked::time_point began) {
    const bool late = Clocked::now() - began > timeout;
    if (watched && ends_process && (late || !why.empty())) {
      fprintf(stderr, "watchdog of communicator %s: %s\n", name().c_str(), why.empty() ? "timeout" : why.c_str());
      std::abort();
    }
  }

  // Sends and receives at once, with all ranks that have messages.
  void exchange(std::vector<Channel>& out, std::vector<Channel>& in) {
    const auto began = Clocked::now();
    for (;;) {
      std::vector<pollfd> ready{{stop, POLLIN, 0}};
      std::vector<int> peers{-1};
      for (int peer = 0; peer < size; ++peer) {
        const short events = (out[peer].index < out[peer].messages.size() ? POLLOUT : 0) |
            (in[peer].index < in[peer].messages.size() ? POLLIN : 0);
        if (events && peer != rank) {
          ready.push_back({sockets[peer], events, 0});
          peers.push_back(peer);
        }
      }
      if (peers.size() == 1) {
        return;
      }
      poll(ready.data(), ready.size(), 50);
      if (aborted) {
        throw Aborted();
      }
      watch("", began);
      const auto ends = [&](size_t i, short events) {
        return ready[i].events & events && ready[i].revents & (events | POLLHUP | POLLERR);
      };
      const auto gone = [&](size_t i) { hang("rank " + std::to_string(peers[i]) + " is gone", began); };
      for (size_t i = 1; i < ready.size(); ++i) { // first, so that a mismatch is seen by all
        if (ends(i, POLLOUT) && !send(out[peers[i]], peers[i])) {
          gone(i);
        }
      }
      for (size_t i = 1; i < ready.size(); ++i) {
        if (ends(i, POLLIN) && !receive(in[peers[i]], peers[i])) {
          gone(i);
        }
      }
    }
  }

 private:
  // Moves what goes at once. False at the end of the connection.
  template <class F>
  bool advance(Channel& channel, Header& header, F move) {
    Message& message = channel.messages[channel.index];
    const size_t total = sizeof(Header) + size_t(message.header.nbytes);
    while (channel.done < total) {
      const bool head = channel.done < sizeof(Header);
      char* data = head ? reinterpret_cast<char*>(&header) + channel.done
                        : message.data + (channel.done - sizeof(Header));
      const ssize_t moved = move(data, head ? sizeof(Header) - channel.done : total - channel.done);
      if (moved > 0) {
        channel.done += size_t(moved);
        if (channel.done == sizeof(Header)) {
          return true; // a header that came is looked at first
        }
      } else {
        return moved < 0 && (errno == EAGAIN || errno == EINTR);
      }
    }
    ++channel.index;
    channel.done = 0;
    return true;
  }

  bool send(Channel& channel, int peer) {
    return advance(channel, channel.messages[channel.index].header, [&](char* data, size_t length) {
      return ::send(sockets[peer], data, length, MSG_DONTWAIT | MSG_NOSIGNAL);
    });
  }

  bool receive(Channel& channel, int peer) {
    const bool head = channel.done < sizeof(Header);
    const bool lives = advance(channel, channel.seen, [&](char* data, size_t length) {
      return ::recv(sockets[peer], data, length, MSG_DONTWAIT);
    });
    if (head && channel.done == sizeof(Header)) {
      const Header& mine = channel.messages[channel.index].header;
      if (!channel.seen.fits(mine)) {
        const std::string message = "communicator " + name() + ": rank " + std::to_string(rank) + " called " +
            mine.text() + " where rank " + std::to_string(peer) + " called " + channel.seen.text();
        fault("order", message);
        hang(message, Clocked::now());
      }
      if (!mine.nbytes) {
        ++channel.index;
        channel.done = 0;
      }
    }
    return lives;
  }
};

// Sockets of a communicator, one for each other rank; waits on the host until all have come.
void connect(Communicator& all, c10d::Store& store) {
  char folder[] = "/tmp/emu-XXXXXX";
  TORCH_CHECK(mkdtemp(folder), "cannot make a folder for sockets");
  const std::string path = std::string(folder) + "/socket";
  const auto address = [](const std::string& of) {
    sockaddr_un made{};
    made.sun_family = AF_UNIX;
    std::strncpy(made.sun_path, of.c_str(), sizeof(made.sun_path) - 1);
    return made;
  };
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto own = address(path);
  TORCH_CHECK(!bind(listener, reinterpret_cast<const sockaddr*>(&own), sizeof(own)) && !listen(listener, 128));
  const auto clean = [&] {
    close(listener);
    unlink(path.c_str());
    rmdir(folder);
  };
  std::vector<int> sockets(all.size, -1);
  try {
    store.set("emu/" + std::to_string(all.rank), std::vector<uint8_t>(path.begin(), path.end()));
    for (int peer = 0; peer < all.size; ++peer) {
      const auto text = store.get("emu/" + std::to_string(peer));
      if (peer < all.rank) {
        const auto other = address(std::string(text.begin(), text.end()));
        sockets[peer] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        TORCH_CHECK(
            !::connect(sockets[peer], reinterpret_cast<const sockaddr*>(&other), sizeof(other)) &&
                write(sockets[peer], &all.rank, sizeof(int)) == sizeof(int),
            "rank ", peer, " is gone");
      }
    }
    for (int count = all.rank + 1; count < all.size; ++count) {
      pollfd ready{listener, POLLIN, 0};
      TORCH_CHECK(poll(&ready, 1, int(std::min<int64_t>(all.timeout.count(), 1 << 30))) == 1, "a rank did not come");
      const int made = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      int peer = -1;
      TORCH_CHECK(read(made, &peer, sizeof(int)) == sizeof(int) && peer > all.rank && peer < all.size);
      sockets[peer] = made;
    }
  } catch (...) {
    clean();
    for (const int each : sockets) {
      close(each);
    }
    throw;
  }
  clean();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.sockets = std::move(sockets);
}

// Tensors that an operation still uses, though its caller may have let them go.
struct Shelf {
  std::mutex mutex;
  Tensors tensors;
  MarkPtr mark;

  void clear() {
    Tensors gone;
    std::lock_guard<std::mutex> lock(mutex);
    gone.swap(tensors);
  }
};

struct Work final : c10d::Work {
  Work(int rank, OpType kind, int device, MarkPtr mark, std::shared_ptr<Communicator> all, Tensors outputs)
      : c10d::Work(rank, kind), device_(device), mark_(std::move(mark)), all_(std::move(all)), outputs_(outputs) {}

  std::shared_ptr<Shelf> shelf;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  bool isCompleted() override {
    return all_->aborted || query(mark_);
  }
  bool isSuccess() const override {
    return !all_->aborted;
  }
  std::exception_ptr exception() const override {
    return all_->aborted ? std::make_exception_ptr(Aborted()) : nullptr;
  }
  Tensors result() override {
    return outputs_;
  }
  void synchronize() override {
    emu::wait(stream(device_, current_stream(device_)), mark_);
    shelf->clear();
  }
  // Only a barrier, or a call with a timeout, keeps the host.
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (timeout != kNoTimeout || opType_ == OpType::BARRIER) {
      const auto began = Clocked::now();
      while (!isCompleted()) {
        TORCH_CHECK(timeout == kNoTimeout || Clocked::now() - began < timeout, "a collective ran into its timeout");
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      TORCH_CHECK(isSuccess(), Aborted().what());
    }
    return true;
  }
  void abort() override {
    all_->abort();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future;
  }

 private:
  int device_;
  MarkPtr mark_;
  std::shared_ptr<Communicator> all_;
  Tensors outputs_;
};

// What a call returns that is a part of a coalesced one.
struct Nothing final : c10d::Work {
  Nothing() {
    finish();
  }
};

// Bytes of a tensor when its operation runs.
struct Bytes {
  char* data;
  int64_t nbytes;
};

using Action = std::function<void(Communicator&)>;

// A call that has not been enqueued: several of them are, together, between start and end of coalescing.
struct Call {
  OpType kind;
  Tensors inputs, outputs;
  Action run;
  const void* kept = nullptr; // where an output begins that is an input, and only read
  int peer = -1; // of send and recv
  Message message{};
};

Bytes bytes(const Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == kType, "emccl has collectives for tensors on emu only");
  TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
  void* data = tensor.numel() ? reach(tensor.const_data_ptr()) : nullptr;
  return {static_cast<char*>(data), int64_t(tensor.nbytes())};
}

// Exchanges with all ranks; bytes for the own one are copied.
void trade(Communicator& all, Header header, const std::vector<Bytes>& to, const std::vector<Bytes>& from) {
  std::vector<Channel> out(all.size), in(all.size);
  for (int peer = 0; peer < all.size; ++peer) {
    if (peer == all.rank) {
      if (from[peer].nbytes && from[peer].data != to[peer].data) {
        std::memmove(from[peer].data, to[peer].data, size_t(from[peer].nbytes));
      }
      continue;
    }
    header.nbytes = to[peer].nbytes;
    out[peer].messages.push_back({header, to[peer].data});
    header.nbytes = from[peer].nbytes;
    in[peer].messages.push_back({header, from[peer].data});
  }
  all.exchange(out, in);
}

struct Reduction {
  ReduceOp::RedOpType kind;
  double factor = 1;

  explicit Reduction(const ReduceOp& op) : kind(op) {
    TORCH_CHECK(kind <= ReduceOp::MAX || kind == ReduceOp::PREMUL_SUM, "emccl has no bitwise reductions");
    if (kind == ReduceOp::PREMUL_SUM) {
      const auto* supplement = static_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
      factor = supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>()
                                                   : supplement->double_factor;
    }
  }

  void apply(Tensor& sum, const Tensor& next) const {
    switch (kind) {
      case ReduceOp::SUM:
      case ReduceOp::AVG:
        sum.add_(next);
        break;
      case ReduceOp::PREMUL_SUM:
        sum.add_(next, factor);
        break;
      case ReduceOp::PRODUCT:
        sum.mul_(next);
        break;
      case ReduceOp::MIN:
        sum.copy_(sum.minimum(next));
        break;
      default:
        sum.copy_(sum.maximum(next));
    }
  }
};

// Brings `to` of all ranks here, which is a part for each, and reduces the own parts into `out`, in one order.
void reduce_parts(
    Communicator& all, Header header, const Reduction& how, const std::vector<Bytes>& to, const Bytes& out) {
  const auto dtype = c10::ScalarType(header.dtype);
  const int64_t count = out.nbytes / int64_t(c10::elementSize(dtype));
  std::vector<std::vector<char>> came(all.size);
  std::vector<Bytes> from;
  for (auto& each : came) {
    each.resize(size_t(out.nbytes));
    from.push_back({each.data(), out.nbytes});
  }
  trade(all, header, to, from);
  const c10::InferenceMode mode;
  std::vector<Tensor> parts;
  for (auto& each : came) {
    parts.push_back(at::from_blob(each.data(), {count}, at::TensorOptions(dtype)));
  }
  if (how.kind == ReduceOp::PREMUL_SUM) {
    parts[0].mul_(how.factor);
  }
  for (int peer = 1; peer < all.size; ++peer) {
    how.apply(parts[0], parts[peer]);
  }
  if (how.kind == ReduceOp::AVG) {
    parts[0].div_(all.size);
  }
  if (out.nbytes) {
    std::memcpy(out.data, parts[0].const_data_ptr(), size_t(out.nbytes));
  }
}

class Emccl final : public c10d::Backend {
 public:
  Emccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout)
      : Backend(rank, size), store_(std::move(store)), all_(std::make_shared<Communicator>(rank, size, timeout)) {
    options_ = c10::make_intrusive<Options>("emccl", timeout);
  }
  ~Emccl() override {
    all_->abort();
  }

  const std::string getBackendName() const override {
    return "emccl";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void setGroupUid(const std::string& uid) override {
    Backend::setGroupUid(uid);
    std::lock_guard<std::mutex> lock(calls_mutex);
    all_->calls->name = uid;
  }
  void setTimeout(std::chrono::milliseconds) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    std::lock_guard<std::mutex> lock(all_->mutex);
    return uint64_t(all_->called);
  }
  void eagerConnectSingleDevice(at::Device) override {
    meet();
  }
  void abort() override {
    all_->abort();
  }
  // Waits, as NCCL does, for what was called.
  void shutdown() override {
    if (!all_->aborted) {
      std::unique_lock<std::mutex> lock(all_->mutex);
      all_->changed.wait(lock, [&] { return all_->turn == all_->called || all_->aborted; });
    }
    all_->abort();
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const int root = int(options.rootRank);
    const Tensor none = tensors.at(0).new_empty({0});
    Tensors to(size_, rank_ == root ? tensors[0] : none), from(size_, none);
    from[root] = tensors[0];
    return call(moving(OpType::BROADCAST, root, to, from), options.asyncOp);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return call(reducing(OpType::ALLREDUCE, tensors.at(0), options.reduceOp, -1), options.asyncOp);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return together(OpType::ALLREDUCE_COALESCED, tensors.size(), options.asyncOp, [&](size_t i) {
      return reducing(OpType::ALLREDUCE, tensors[i], options.reduceOp, -1);
    });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return call(reducing(OpType::REDUCE, tensors.at(0), options.reduceOp, int(options.rootRank)), options.asyncOp);
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return call(moving(OpType::ALLGATHER, -1, Tensors(size_, inputs.at(0)), outputs.at(0)), options.asyncOp);
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return call(gathering(output, input), options.asyncOp);
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return together(OpType::COALESCED, inputs.size(), options.asyncOp, [&](size_t i) {
      return gathering(outputs[i], inputs[i]);
    });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const int root = int(options.rootRank);
    const Tensor none = inputs.at(0).new_empty({0});
    Tensors to(size_, none), from = rank_ == root ? outputs.at(0) : Tensors(size_, none);
    to[root] = inputs[0];
    return call(moving(OpType::GATHER, root, to, from), options.asyncOp);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const int root = int(options.rootRank);
    const Tensor none = outputs.at(0).new_empty({0});
    Tensors to = rank_ == root ? inputs.at(0) : Tensors(size_, none), from(size_, none);
    from[root] = outputs[0];
    return call(moving(OpType::SCATTER, root, to, from), options.asyncOp);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return call(moving(OpType::ALLTOALL, -1, inputs, outputs), options.asyncOp);
  }
  WorkPtr alltoall_base(
      Tensor& output,
      Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    const auto split = [&](const Tensor& tensor, const std::vector<int64_t>& sizes) {
      Tensors made;
      int64_t start = 0;
      for (int peer = 0; peer < size_; ++peer) {
        const int64_t length = sizes.empty() ? tensor.size(0) / size_ : sizes[peer];
        made.push_back(tensor.narrow(0, start, length));
        start += length;
      }
      return made;
    };
    const auto to = split(input, input_sizes), from = split(output, output_sizes);
    return call(moving(OpType::ALLTOALL_BASE, -1, to, from), options.asyncOp);
  }

  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return call(scattering(outputs.at(0), inputs.at(0), options.reduceOp), options.asyncOp);
  }
  WorkPtr _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return call(scattering(output, parts(input), options.reduceOp), options.asyncOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return together(OpType::COALESCED, inputs.size(), options.asyncOp, [&](size_t i) {
      return scattering(outputs[i], parts(inputs[i]), options.reduceOp);
    });
  }

  WorkPtr send(Tensors& tensors, int peer, int) override {
    return one_way(OpType::SEND, tensors.at(0), peer);
  }
  WorkPtr recv(Tensors& tensors, int peer, int) override {
    return one_way(OpType::RECV, tensors.at(0), peer);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    int on = current_device();
    if (options.device && options.device->has_index()) {
      on = options.device->index();
    } else if (!options.device_ids.empty()) {
      on = int(options.device_ids[0]);
    }
    const Tensor flag = at::empty({1}, at::TensorOptions(c10::Device(kType, c10::DeviceIndex(on))));
    return call(moving(OpType::BARRIER, -1, Tensors(size_, flag), Tensors(size_, flag.new_empty({1}))), true);
  }

  void startCoalescing() override {
    coalescing_ = true;
  }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    std::vector<Call> calls;
    calls.swap(calls_);
    return calls.empty() ? nullptr : enqueue(OpType::COALESCED, std::move(calls), coalesced_async_);
  }

 private:
  // Each rank sends one tensor to each and receives one from each; those of no elements are not there.
  Call moving(OpType kind, int root, const Tensors& to, const Tensors& from) {
    TORCH_CHECK(int(to.size()) == size_ && int(from.size()) == size_, "one tensor for each rank is wanted");
    std::vector<Bytes> sent, received;
    for (const Tensor& each : to) {
      sent.push_back(bytes(each));
    }
    for (const Tensor& each : from) {
      received.push_back(bytes(each));
    }
    const Header header{int(kind), root, 0, 0, 0};
    const auto run = [sent, received, header](Communicator& all) { trade(all, header, sent, received); };
    const bool in_place = sent[rank_].data == received[rank_].data;
    return {kind, to, from, run, in_place ? from[rank_].const_data_ptr() : nullptr};
  }
  Tensors parts(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_contiguous() && tensor.numel() % size_ == 0, "a tensor does not split in equal parts");
    return tensor.view({size_, -1}).unbind(0);
  }
  Call gathering(const Tensor& output, const Tensor& input) {
    TORCH_CHECK(output.numel() == input.numel() * size_, "the output is not as long as the inputs of all ranks");
    return moving(OpType::_ALLGATHER_BASE, -1, Tensors(size_, input), parts(output));
  }
  Call reducing(OpType kind, const Tensor& tensor, const ReduceOp& op, int root) {
    const Bytes own = bytes(tensor);
    const Header header{int(kind), root, int(op.op_), int(tensor.scalar_type()), 0};
    return {kind, {tensor}, {tensor}, [own, header, root, how = Reduction(op)](Communicator& all) {
      std::vector<char> unused(size_t(root < 0 || root == all.rank ? 0 : own.nbytes));
      const Bytes out = unused.empty() ? own : Bytes{unused.data(), own.nbytes};
      reduce_parts(all, header, how, std::vector<Bytes>(all.size, own), out);
    }};
  }
  Call scattering(const Tensor& output, const Tensors& inputs, const ReduceOp& op) {
    const Bytes out = bytes(output);
    std::vector<Bytes> to;
    for (const Tensor& each : inputs) {
      to.push_back(bytes(each));
    }
    const Header header{int(OpType::REDUCE_SCATTER), -1, int(op.op_), int(output.scalar_type()), 0};
    return {OpType::REDUCE_SCATTER, inputs, {output}, [out, to, header, how = Reduction(op)](Communicator& all) {
      reduce_parts(all, header, how, to, out);
    }};
  }
  WorkPtr one_way(OpType kind, const Tensor& tensor, int peer) {
    TORCH_CHECK(peer >= 0 && peer < size_ && peer != rank_, "there is no other rank ", peer);
    const Bytes own = bytes(tensor);
    Call made{kind, {}, {}, {}, nullptr, peer, {{int(OpType::SEND), -1, 0, 0, own.nbytes}, own.data}};
    (kind == OpType::SEND ? made.inputs : made.outputs).push_back(tensor);
    return call(std::move(made), true);
  }

  WorkPtr call(Call made, bool async) {
    if (coalescing_) {
      coalesced_async_ = async;
      calls_.push_back(std::move(made));
      return c10::make_intrusive<Nothing>();
    }
    const OpType kind = made.kind;
    std::vector<Call> calls;
    calls.push_back(std::move(made));
    return enqueue(kind, std::move(calls), async);
  }
  template <class F>
  WorkPtr together(OpType kind, size_t count, bool async, F make) {
    std::vector<Call> calls;
    for (size_t i = 0; i < count; ++i) {
      calls.push_back(make(i));
    }
    return enqueue(kind, std::move(calls), async);
  }

  void meet() {
    std::lock_guard<std::mutex> lock(meeting_);
    TORCH_CHECK(!all_->aborted, Aborted().what());
    if (!all_->connected()) {
      connect(*all_, *store_);
    }
  }

  WorkPtr enqueue(OpType kind, std::vector<Call> calls, bool async) {
    meet();
    Tensors all_tensors, outputs;
    std::vector<Touch> touches;
    for (const Call& each : calls) {
      for (const Tensor& tensor : each.inputs) {
        all_tensors.push_back(tensor);
        touches.push_back(touch(tensor, false));
      }
      for (const Tensor& tensor : each.outputs) {
        all_tensors.push_back(tensor);
        outputs.push_back(tensor);
        touches.push_back(touch(tensor, tensor.const_data_ptr() != each.kept));
      }
    }
    const int on = all_tensors.at(0).device().index();
    std::lock_guard<std::mutex> calling(calling_);
    shelves_.erase(
        std::remove_if(
            shelves_.begin(), shelves_.end(), [](const auto& shelf) { return query(shelf->mark); }),
        shelves_.end());
    Stream* caller = stream(on, current_stream(on));
    int64_t id = current_stream(on);
    if (async) {
      if (!streams_.count(on)) {
        streams_[on] = next_stream(on);
      }
      id = streams_[on];
    }
    Stream* own = stream(on, id);
    if (own != caller) {
      emu::wait(own, record(caller));
    }
    int64_t number = 0;
    {
      std::lock_guard<std::mutex> lock(all_->mutex);
      number = all_->called++;
    }
    {
      std::lock_guard<std::mutex> lock(calls_mutex);
      ++all_->calls->count;
      all_->calls->threads.insert(this_thread());
    }
    count("collectives");
    std::vector<Touch> written;
    for (const Touch& each : touches) {
      if (each.write) {
        written.push_back(each);
      }
    }
    auto body = [all = all_, number, calls = steps(calls), written] {
      try {
        std::unique_lock<std::mutex> lock(all->mutex);
        all->changed.wait(lock, [&] { return all->turn == number || all->aborted; });
        if (all->aborted) {
          throw Aborted();
        }
        lock.unlock();
        calls(*all);
        lock.lock();
        ++all->turn;
      } catch (const Aborted&) {
        for (const Touch& each : written) {
          for (const auto& [start, end] : each.runs) {
            std::memset(reach(reinterpret_cast<void*>(start)), kPoison, end - start);
          }
        }
      }
      all->changed.notify_all();
    };
    launch(own, c10d::opTypeToString(kind), touches, body);
    const MarkPtr mark = record(own);
    auto work = c10::make_intrusive<Work>(rank_, kind, on, mark, all_, outputs);
    work->shelf = std::make_shared<Shelf>();
    work->shelf->tensors = std::move(all_tensors);
    work->shelf->mark = mark;
    shelves_.push_back(work->shelf);
    const c10::Device device(kType, c10::DeviceIndex(on));
    work->future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    const c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, device, id));
    work->future->markCompleted(c10::IValue(outputs));
    return work;
  }

  // One action of all calls: those with all ranks one after another, sends and receives at once.
  static Action steps(const std::vector<Call>& calls) {
    std::vector<Action> actions;
    std::vector<std::pair<int, Message>> sent, received;
    for (const Call& each : calls) {
      if (each.run) {
        actions.push_back(each.run);
      } else {
        (each.kind == OpType::SEND ? sent : received).emplace_back(each.peer, each.message);
      }
    }
    return [actions, sent, received](Communicator& all) {
      for (const Action& each : actions) {
        each(all);
      }
      std::vector<Channel> out(all.size), in(all.size);
      for (const auto& [peer, message] : sent) {
        out[peer].messages.push_back(message);
      }
      for (const auto& [peer, message] : received) {
        in[peer].messages.push_back(message);
      }
      all.exchange(out, in);
    };
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<Communicator> all_;
  c10::intrusive_ptr<Options> options_;
  std::mutex meeting_, calling_;
  std::map<int, int64_t> streams_; // by device
  std::vector<std::shared_ptr<Shelf>> shelves_;
  bool coalescing_ = false, coalesced_async_ = true;
  std::vector<Call> calls_;
};

void attach(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t timeout_ms) {
  const auto custom = c10d::ProcessGroup::BackendType::CUSTOM;
  const std::chrono::milliseconds timeout(timeout_ms);
  c10::intrusive_ptr<c10d::Backend> made =
      c10::make_intrusive<Emccl>(group->getStore(), group->getRank(), group->getSize(), timeout);
  group->setBackend(kType, custom, made);
}

TORCH_LIBRARY(emu, m) {
  m.def("attach", &attach);
}

} // namespace
} // namespace emu

extern "C" {

void emu_watchdog(bool on) {
  emu::watched = on;
}

const char* emu_communicators() {
  thread_local std::string made;
  made = "[";
  std::lock_guard<std::mutex> lock(emu::calls_mutex);
  for (const auto& each : emu::all_calls()) {
    made += std::string(made.size() > 1 ? ", " : "") + "[\"" + each->name + "\", " + std::to_string(each->size) +
        ", " + std::to_string(each->count) + ", " + std::to_string(each->threads.size()) + "]";
  }
  made += "]";
  return made.c_str();
}
}
