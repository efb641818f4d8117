// Communicators over local sockets, which hang and end as those of NCCL, and torch's watchdog for them.
#include "communicator.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "runtime.hpp"

namespace emu {

namespace {

std::atomic<bool> watched{false}; // whether a failed operation ends the process, as PyTorch's watchdog does

const std::string kDumpSignal = "emccl dump signal";
constexpr auto kHeartbeat = std::chrono::milliseconds(100);

std::string environment(const char* name) {
  const char* found = std::getenv(name);
  return found ? found : "";
}

// As with NCCL, whoever makes a communicator may have asked for it not to; not where ranks out of step are looked for.
bool may_end_process() {
  return environment("TORCH_EMCCL_ASYNC_ERROR_HANDLING") != "0" || environment("TORCH_EMCCL_DESYNC_DEBUG") == "1" ||
      environment("TORCH_DISTRIBUTED_DEBUG") == "DETAIL";
}

std::chrono::seconds ready_timeout() {
  const std::string found = environment("TORCH_EMCCL_NONBLOCKING_TIMEOUT");
  return std::chrono::seconds(found.empty() ? 30 * 60 : std::stoi(found));
}

int64_t this_thread() { // those of the system have the ids of others that ended
  static std::atomic<int64_t> count{0};
  thread_local const int64_t number = count++;
  return number;
}

std::mutex& all_mutex() {
  static auto* made = new std::mutex;
  return *made;
}
std::vector<std::shared_ptr<Calls>>& all_calls() {
  static auto* made = new std::vector<std::shared_ptr<Calls>>;
  return *made;
}
std::vector<std::weak_ptr<Communicator>>& all_communicators() {
  static auto* made = new std::vector<std::weak_ptr<Communicator>>;
  return *made;
}

// The heartbeat monitor, one for all communicators.
[[noreturn]] void monitor() {
  for (;;) {
    std::this_thread::sleep_for(kHeartbeat);
    std::vector<std::shared_ptr<Communicator>> living;
    {
      std::lock_guard<std::mutex> lock(all_mutex());
      for (const auto& each : all_communicators()) {
        if (auto found = each.lock()) {
          living.push_back(std::move(found));
        }
      }
    }
    for (const auto& each : living) {
      each->heed_dump_signal();
    }
  }
}

// What the communicators of a job share. NCCL's take the store without any prefix. Here jobs of other tests use
// that, each with a prefix.
c10::intrusive_ptr<c10d::Store> store_of_job(c10::intrusive_ptr<c10d::Store> store) {
  for (;;) {
    auto* outer = dynamic_cast<c10d::PrefixStore*>(store.get());
    if (!outer || !dynamic_cast<c10d::PrefixStore*>(outer->getUnderlyingStore().get())) {
      return store;
    }
    store = outer->getUnderlyingStore();
  }
}

} // namespace

bool Header::fits(const Header& other) const {
  return kind == other.kind && root == other.root && reduction == other.reduction && dtype == other.dtype &&
      nbytes == other.nbytes;
}

std::string Header::text() const {
  return c10d::opTypeToString(c10d::OpType(kind)) + " (" + std::to_string(nbytes) + " bytes, root " +
      std::to_string(root) + ", reduction " + std::to_string(reduction) + ", dtype " + std::to_string(dtype) + ")";
}

std::shared_ptr<Communicator> Communicator::make(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout) {
  std::shared_ptr<Communicator> made(new Communicator(std::move(store), rank, size, timeout));
  std::lock_guard<std::mutex> lock(all_mutex());
  all_calls().push_back(made->calls_);
  std::erase_if(all_communicators(), [](const auto& each) { return each.expired(); });
  all_communicators().push_back(made);
  return made;
}

Communicator::Communicator(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout)
    : rank(rank),
      size(size),
      timeout(timeout),
      blocking_wait(environment("TORCH_EMCCL_BLOCKING_WAIT") == "1"),
      store_(std::move(store)),
      ends_process_(may_end_process()),
      calls_(std::make_shared<Calls>()),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  calls_->size = size;
}

Communicator::~Communicator() {
  for (const int each : sockets_) {
    if (each >= 0) {
      close(each);
    }
  }
  close(stop_);
}

std::string Communicator::name() const {
  std::lock_guard<std::mutex> lock(all_mutex());
  return calls_->name;
}

void Communicator::set_name(const std::string& name) {
  std::lock_guard<std::mutex> lock(all_mutex());
  calls_->name = name;
}

void Communicator::count_call() {
  std::lock_guard<std::mutex> lock(all_mutex());
  ++calls_->count;
  calls_->threads.insert(this_thread());
}

void Communicator::connect(int device) {
  if (mode().ready_s < 0) {
    ensure_ready(device);
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  devices_.insert(device);
  if (!in_background_.exchange(true)) {
    std::thread([self = shared_from_this()] { self->connect_in_background(); }).detach();
  }
}

void Communicator::connect_in_background() {
  std::string problem;
  try {
    wait_for_abort(int(1e3 * mode().ready_s));
    if (aborted) {
      throw Aborted();
    }
    make_sockets(*store_->clone()); // a store blocks others while one waits for a key
  } catch (const std::exception& error) {
    problem = error.what();
  }
  std::lock_guard<std::mutex> lock(mutex);
  problem_ = problem;
  changed.notify_all();
}

void Communicator::ensure_ready(int device) {
  std::lock_guard<std::mutex> waiting(ready_mutex_);
  TORCH_CHECK(!aborted, Aborted().what());
  if (!in_background_ && !connected_) {
    make_sockets(*store_);
  }
  std::unique_lock<std::mutex> lock(mutex);
  devices_.insert(device);
  const bool ended = changed.wait_for(lock, ready_timeout(), [&] { return connected_ || !problem_.empty(); });
  TORCH_CHECK(ended, "the communicator was not ready in time");
  TORCH_CHECK(problem_.empty(), problem_);
}

std::string Communicator::address_of(int peer, c10d::Store& store) {
  const std::string key = "emu/" + std::to_string(peer);
  while (in_background_ && !store.check({key})) {
    wait_for_abort(5);
    if (aborted) {
      throw Aborted();
    }
  }
  const auto found = store.get(key);
  return std::string(found.begin(), found.end());
}

// One for each other rank; waits until all have come.
void Communicator::make_sockets(c10d::Store& store) {
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
  std::vector<int> sockets(size, -1);
  try {
    store.set("emu/" + std::to_string(rank), std::vector<uint8_t>(path.begin(), path.end()));
    for (int peer = 0; peer < size; ++peer) {
      const auto text = address_of(peer, store);
      if (peer < rank) {
        const auto other = address(text);
        sockets[peer] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (::connect(sockets[peer], reinterpret_cast<const sockaddr*>(&other), sizeof(other)) ||
            write(sockets[peer], &rank, sizeof(int)) != sizeof(int)) {
          TORCH_CHECK(in_background_, "rank ", peer, " is gone");
          while (!aborted) {
            wait_for_abort(-1);
          }
          throw Aborted();
        }
      }
    }
    for (int count = rank + 1; count < size; ++count) {
      pollfd ready[] = {{listener, POLLIN, 0}, {in_background_ ? stop_ : -1, POLLIN, 0}};
      const bool came = poll(ready, 2, int(std::min<int64_t>(timeout.count(), 1 << 30))) > 0;
      TORCH_CHECK(came && !aborted, aborted ? Aborted().what() : "a rank did not come");
      const int made = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      int peer = -1;
      TORCH_CHECK(read(made, &peer, sizeof(int)) == sizeof(int) && peer > rank && peer < size);
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
  std::lock_guard<std::mutex> lock(mutex);
  sockets_ = std::move(sockets);
  connected_ = true;
  changed.notify_all();
}

void Communicator::abort() {
  std::unique_lock<std::mutex> ready(ready_mutex_, std::defer_lock);
  if (in_background_) {
    ready.lock();
  }
  std::set<int> devices;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (aborted.exchange(true)) {
      return;
    }
    const uint64_t one = 1;
    (void)!write(stop_, &one, sizeof(one));
    for (const int each : sockets_) {
      if (each >= 0) {
        shutdown(each, SHUT_RDWR); // the others see that this rank is gone
      }
    }
    devices = devices_;
  }
  changed.notify_all();
  if (mode().slow_aborts) {
    for (const int device : devices) { // whose memory is freed
      drain(device);
    }
  }
}

void Communicator::wait_for_abort(int timeout_ms) {
  pollfd ends{stop_, POLLIN, 0};
  poll(&ends, 1, timeout_ms);
}

void Communicator::hang(const std::string& why) {
  for (;;) {
    wait_for_abort(50);
    if (aborted) {
      throw Aborted();
    }
    fail(why);
  }
}

std::string Communicator::failure() {
  std::lock_guard<std::mutex> lock(mutex);
  return failure_;
}

void Communicator::fail(const std::string& why) {
  bool first = false;
  {
    std::lock_guard<std::mutex> lock(mutex);
    first = failure_.empty();
    failure_ = why;
  }
  if (blocking_wait || aborted) { // no watchdog is made, or it has ended
    return;
  }
  if (first && mode().dump_s >= 0) {
    try {
      const std::string text = id();
      dump_store().set(kDumpSignal, std::vector<uint8_t>(text.begin(), text.end()));
    } catch (const std::exception& error) {
      fprintf(stderr, "watchdog of communicator %s: no dump signal: %s\n", name().c_str(), error.what());
    }
  }
  if (watched && ends_process_) {
    fprintf(stderr, "watchdog of communicator %s: %s\n", name().c_str(), why.c_str());
    std::abort();
  }
}

void Communicator::heed_dump_signal() {
  const double after_s = mode().dump_s;
  if (blocking_wait || aborted || after_s < 0) {
    return;
  }
  if (ends_at_) {
    if (Clocked::now() >= *ends_at_) {
      fprintf(stderr, "heartbeat monitor of communicator %s: another one has failed\n", name().c_str());
      std::abort();
    }
    return;
  }
  try {
    if (dump_store().check({kDumpSignal})) {
      const auto found = dump_store().get(kDumpSignal);
      if (std::string(found.begin(), found.end()) != id()) {
        ends_at_ = Clocked::now() + std::chrono::milliseconds(int64_t(1e3 * after_s));
      }
    }
  } catch (const std::exception&) { // the store is gone: as NCCL's, it goes on
  }
}

std::string Communicator::id() const {
  return std::to_string(getpid()) + "/" + std::to_string(uintptr_t(this));
}

c10d::Store& Communicator::dump_store() {
  std::call_once(dump_store_made_, [&] { dump_store_ = store_of_job(store_)->clone(); });
  return *dump_store_;
}

void Communicator::exchange(std::vector<Channel>& out, std::vector<Channel>& in) {
  const auto began = Clocked::now();
  for (;;) {
    std::vector<pollfd> ready{{stop_, POLLIN, 0}};
    std::vector<int> peers{-1};
    for (int peer = 0; peer < size; ++peer) {
      const short events = (out[peer].index < out[peer].messages.size() ? POLLOUT : 0) |
          (in[peer].index < in[peer].messages.size() ? POLLIN : 0);
      if (events && peer != rank) {
        ready.push_back({sockets_[peer], events, 0});
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
    if (Clocked::now() - began > timeout) {
      fail("timeout");
    }
    const auto ends = [&](size_t i, short events) {
      return ready[i].events & events && ready[i].revents & (events | POLLHUP | POLLERR);
    };
    const auto gone = [&](size_t i) { hang("rank " + std::to_string(peers[i]) + " is gone"); };
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

namespace {

// Moves what goes at once. False at the end of the connection.
template <class F>
bool advance(Channel& channel, Header& header, F move) {
  Message& message = channel.messages[channel.index];
  const size_t total = sizeof(Header) + size_t(message.header.nbytes);
  while (channel.done < total) {
    const bool head = channel.done < sizeof(Header);
    char* data =
        head ? reinterpret_cast<char*>(&header) + channel.done : message.data + (channel.done - sizeof(Header));
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

} // namespace

bool Communicator::send(Channel& channel, int peer) {
  return advance(channel, channel.messages[channel.index].header, [&](char* data, size_t length) {
    return ::send(sockets_[peer], data, length, MSG_DONTWAIT | MSG_NOSIGNAL);
  });
}

bool Communicator::receive(Channel& channel, int peer) {
  const bool head = channel.done < sizeof(Header);
  const bool lives = advance(channel, channel.seen, [&](char* data, size_t length) {
    return ::recv(sockets_[peer], data, length, MSG_DONTWAIT);
  });
  if (head && channel.done == sizeof(Header)) {
    const Header& mine = channel.messages[channel.index].header;
    if (!channel.seen.fits(mine)) {
      const std::string message = "communicator " + name() + ": rank " + std::to_string(rank) + " called " +
          mine.text() + " where rank " + std::to_string(peer) + " called " + channel.seen.text();
      fault("order", message);
      hang(message);
    }
    if (!mine.nbytes) {
      ++channel.index;
      channel.done = 0;
    }
  }
  return lives;
}

} // namespace emu

extern "C" {

void emu_watchdog(bool on) {
  emu::watched = on;
}

void emu_mode(int pool, bool one_queue, bool slow_aborts, double ready_s, double dump_s) {
  emu::Mode& mode = emu::mode();
  mode.pool = pool;
  mode.one_queue = one_queue;
  mode.slow_aborts = slow_aborts;
  mode.ready_s = ready_s;
  mode.dump_s = dump_s;
  static std::once_flag monitored;
  if (dump_s >= 0) {
    std::call_once(monitored, [] { std::thread(emu::monitor).detach(); });
  }
}

const char* emu_communicators() {
  thread_local std::string made;
  made = "[";
  std::lock_guard<std::mutex> lock(emu::all_mutex());
  for (const auto& each : emu::all_calls()) {
    made += std::string(made.size() > 1 ? ", " : "") + "[\"" + each->name + "\", " + std::to_string(each->size) +
        ", " + std::to_string(each->count) + ", " + std::to_string(each->threads.size()) + "]";
  }
  made += "]";
  return made.c_str();
}
}
