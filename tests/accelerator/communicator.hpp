// What ranks of a process group exchange bytes with; knows neither tensors nor streams.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace emu {

using Clocked = std::chrono::steady_clock;

// What one rank tells another before its bytes.
struct Header {
  int32_t kind, root, reduction, dtype;
  int64_t nbytes;

  bool fits(const Header& other) const;
  std::string text() const;
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

// What tests see of a communicator; it lives longer.
struct Calls {
  int size;
  std::string name;
  int64_t count = 0;
  std::set<int64_t> threads; // that called
};

// Sockets to the other ranks, and what looks after them: a watchdog, whoever aborts.
//
// It connects at its first operation, or eagerly. Either waits on the host for all ranks, and nobody can abort
// that, unless the mode has connecting go on in the background: then the first operation waits until it is ready,
// and as in NCCLComm::waitReady it holds meanwhile what `abort` needs.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  const int rank, size;
  const std::chrono::milliseconds timeout;
  const bool blocking_wait; // asked for by whoever made it
  std::mutex mutex;
  std::condition_variable changed;
  int64_t called = 0, turn = 0; // operations
  std::atomic<bool> aborted{false};

  static std::shared_ptr<Communicator> make(
      c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout);
  ~Communicator();

  std::string name() const;
  void set_name(const std::string& name);
  void count_call(); // by the calling thread

  void connect(int device); // eagerly
  void ensure_ready(int device);
  void abort();

  // Sends and receives at once, with all ranks that have messages. As long as a rank is missing or gone, or has
  // called something else, it hangs, before somebody aborts.
  void exchange(std::vector<Channel>& out, std::vector<Channel>& in);

  // Of an operation that cannot succeed: the watchdog sees it.
  void fail(const std::string& why);
  std::string failure();
  // What the heartbeat monitor does now and then: ends the process some time after another communicator failed.
  void heed_dump_signal();

 private:
  Communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout);
  void connect_in_background();
  void make_sockets(c10d::Store& store);
  std::string address_of(int peer, c10d::Store& store);
  [[noreturn]] void hang(const std::string& why);
  bool send(Channel& channel, int peer);
  bool receive(Channel& channel, int peer);
  void wait_for_abort(int timeout_ms);
  std::string id() const; // in the job
  c10d::Store& dump_store();

  const c10::intrusive_ptr<c10d::Store> store_;
  const bool ends_process_;
  const std::shared_ptr<Calls> calls_;
  const int stop_; // readable once it is aborted
  std::mutex ready_mutex_;
  std::atomic<bool> in_background_{false};
  bool connected_ = false;
  std::string problem_; // of connecting in the background
  std::vector<int> sockets_; // by rank
  std::set<int> devices_;
  std::string failure_;
  std::once_flag dump_store_made_;
  c10::intrusive_ptr<c10d::Store> dump_store_;
  std::optional<Clocked::time_point> ends_at_;
};

} // namespace emu
