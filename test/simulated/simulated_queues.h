#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "streams/base/mutex.h"
#include "streams/base/ticket.h"
#include "test/simulated/simulated_operation.h"

namespace ebb {

// The time at which an operation runs that may run and that nobody waits for yet.
enum class Schedule : std::uint8_t {
  kLate,    // only when somebody waits
  kEarly,   // copies at once; kernels as for kLate, so that a copy overtakes every kernel it does not wait for
  kRandom,  // after every call a seeded coin decides, again and again, whether one more operation of any queue runs
};

// The queues of a simulated device. An operation may run when all its tickets are done and, if it is a kernel, its
// predecessor in its stream has run. Copies in a lane have no order but their tickets: a GPU's copies run in the order
// of the calls, a disk's do not, and the library must not count on an order. Within that freedom the schedule decides.
//
// Lifetime: an operation that has not run when this object ends never runs; its ticket then reports an error.
// Threads: every member may be called from any thread; work runs one at a time, under the lock, on the calling thread.
// Work must not call these queues, except that memory which it frees may queue its poisoning.
class SimulatedQueues : public std::enable_shared_from_this<SimulatedQueues> {
 public:
  SimulatedQueues(Schedule schedule, std::uint64_t seed) : schedule_(schedule), random_(seed) {}
  ~SimulatedQueues();
  SimulatedQueues(const SimulatedQueues&) = delete;
  SimulatedQueues& operator=(const SimulatedQueues&) = delete;

  // `work` empty: a point, done as soon as it is reached and `after` is done.
  Ticket push(SimulatedQueueId queue, std::function<void()> work, std::vector<Ticket> after);

  // Runs one of this object's operations, and first whatever the operation waits for. Does nothing if it has run.
  void force(const SimulatedOperation& operation);

  // Runs everything.
  void run_all();

  // How often a point had to force one of the tickets that it waits for.
  [[nodiscard]] std::uint64_t forced_points() const;

 private:
  using Operation = std::shared_ptr<SimulatedOperation>;

  void force_locked(const SimulatedOperation& operation) EBB_REQUIRES(mutex_);
  const SimulatedOperation* first_unmet(const SimulatedOperation& operation) EBB_REQUIRES(mutex_);
  void let_run() EBB_REQUIRES(mutex_);
  std::vector<Operation> ready() const EBB_REQUIRES(mutex_);
  void run(const SimulatedOperation& wanted) EBB_REQUIRES(mutex_);

  const Schedule schedule_;

  // Recursive, because work that frees memory queues the poisoning of that memory.
  mutable BasicMutex<std::recursive_mutex> mutex_;
  std::map<SimulatedQueueId, std::deque<Operation>> waiting_ EBB_GUARDED_BY(mutex_);
  std::mt19937_64 random_ EBB_GUARDED_BY(mutex_);
  std::uint64_t forced_points_ EBB_GUARDED_BY(mutex_) = 0;
  bool running_ EBB_GUARDED_BY(mutex_) = false;
};

}  // namespace ebb
