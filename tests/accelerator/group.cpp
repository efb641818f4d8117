// A backend for process groups with the semantics of NCCL.
//
// The operations of a communicator run one after another, in the order of the calls, on its own stream, or on the
// caller's if the call is not asynchronous. What ranks exchange begins with a header: where they called different
// collectives, that is a fault, and the operation never ends, as when another rank is gone, before somebody aborts.
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <thread>

#include "communicator.hpp"
#include "tensors.hpp"

namespace emu {
namespace {

using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

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
  // The host waits for a barrier, with a timeout, and if the communicator was made to wait, as WorkNCCL's does since
  // torch 2.6. `synchronize` never makes it wait.
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    const bool blocking = all_->blocking_wait;
    if (timeout != kNoTimeout || blocking || opType_ == OpType::BARRIER) {
      const auto limit = timeout == kNoTimeout && blocking ? all_->timeout : timeout;
      const auto began = Clocked::now();
      std::string problem;
      while (problem.empty() && !isCompleted()) {
        if (limit != kNoTimeout && Clocked::now() - began >= limit) {
          problem = "a collective ran into its timeout";
        } else if (blocking) {
          problem = all_->failure();
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      if (!problem.empty() && blocking) {
        all_->abort();
      }
      TORCH_CHECK(problem.empty(), problem);
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

// What ncclGroupStart opens, in this thread: before it is closed, no call of any communicator launches anything.
struct Group {
  int depth = 0;
  std::vector<std::function<void()>> launches;
};
thread_local Group group;

// What a communicator launches, in the order of the calls.
class Launches {
 public:
  explicit Launches(std::shared_ptr<Communicator> all) : all_(std::move(all)) {}

  // Returns what is done once the operation is over.
  MarkPtr launch(Stream* on, OpType kind, const std::vector<Touch>& touches, const Action& action) {
    std::lock_guard<std::mutex> calling(mutex_);
    if (last_ && last_on_ != on) {
      follow(on, last_);
    }
    int64_t number = 0;
    {
      std::lock_guard<std::mutex> lock(all_->mutex);
      number = all_->called++;
    }
    all_->count_call();
    count("collectives");
    std::vector<Touch> written;
    for (const Touch& each : touches) {
      if (each.write) {
        written.push_back(each);
      }
    }
    auto body = [all = all_, number, action, written] {
      try {
        std::unique_lock<std::mutex> lock(all->mutex);
        all->changed.wait(lock, [&] { return all->turn == number || all->aborted; });
        if (all->aborted) {
          throw Aborted();
        }
        lock.unlock();
        action(*all);
        lock.lock();
        ++all->turn;
      } catch (const Aborted&) {
        for (const Touch& each : written) {
          for (const auto& [start, end] : each.runs) {
            std::memset(reach(reinterpret_cast<void*>(start)), kPoison, end - start);
          }
        }
      } catch (const std::exception& error) {
        all->fail(error.what());
        throw;
      }
      all->changed.notify_all();
    };
    emu::launch(on, c10d::opTypeToString(kind), touches, body);
    last_on_ = on;
    return last_ = record(on);
  }

 private:
  std::shared_ptr<Communicator> all_;
  std::mutex mutex_;
  Stream* last_on_ = nullptr;
  MarkPtr last_;
};

class Emccl final : public c10d::Backend {
 public:
  Emccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout)
      : Backend(rank, size),
        all_(Communicator::make(std::move(store), rank, size, timeout)),
        launches_(std::make_shared<Launches>(all_)) {
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
    all_->set_name(uid);
  }
  void setTimeout(std::chrono::milliseconds) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    std::lock_guard<std::mutex> lock(all_->mutex);
    return uint64_t(all_->called);
  }
  void eagerConnectSingleDevice(at::Device device) override {
    const int on = device.has_index() ? device.index() : current_device();
    own_stream(on);
    all_->connect(on);
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

  // A call in between that fails leaves the group open, and so this thread's calls where they are.
  void startCoalescing() override {
    coalescing_ = true;
    ++group.depth;
  }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(group.depth > 0, "this thread has not opened a group");
    coalescing_ = false;
    if (!--group.depth) {
      for (const auto& launch : std::exchange(group.launches, {})) {
        launch();
      }
    }
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

  // From the pool, when it connects.
  int64_t own_stream(int on) {
    std::lock_guard<std::mutex> calling(calling_);
    const auto found = streams_.find(on);
    if (found != streams_.end()) {
      return found->second;
    }
    const char* high = std::getenv("TORCH_EMCCL_HIGH_PRIORITY");
    return streams_[on] = next_stream(on, high && std::string(high) == "1" ? -1 : 0);
  }

  WorkPtr enqueue(OpType kind, std::vector<Call> calls, bool async) {
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
    all_->ensure_ready(on);
    const int64_t own_id = own_stream(on);
    std::lock_guard<std::mutex> calling(calling_);
    shelves_.erase(
        std::remove_if(
            shelves_.begin(), shelves_.end(), [](const auto& shelf) { return query(shelf->mark); }),
        shelves_.end());
    Stream* caller = stream(on, current_stream(on));
    const int64_t id = async ? own_id : current_stream(on);
    Stream* own = stream(on, id);
    if (own != caller) {
      emu::wait(own, record(caller));
    }
    MarkPtr mark;
    if (group.depth) { // over before it has begun, for all that anybody can see
      group.launches.push_back([launches = launches_, own, kind, touches, action = steps(calls), all_tensors] {
        launches->launch(own, kind, touches, action);
      });
      mark = record(own);
    } else {
      mark = launches_->launch(own, kind, touches, steps(calls));
    }
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

  std::shared_ptr<Communicator> all_;
  std::shared_ptr<Launches> launches_;
  c10::intrusive_ptr<Options> options_;
  std::mutex calling_;
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
