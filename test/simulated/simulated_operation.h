#pragma once

#include <atomic>
#include <compare>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include <c10/core/Stream.h>

#include "streams/base/ticket.h"

namespace ebb {

class SimulatedQueues;

// A queue of simulated work: one of the two lanes, or a compute stream.
struct SimulatedQueueId {
  enum class Kind : std::uint8_t { kOutLane, kInLane, kCompute };

  Kind kind;
  c10::StreamId stream = 0;  // for kCompute only

  auto operator<=>(const SimulatedQueueId&) const = default;
};

// One entry of a simulated queue, and the ticket of its completion: a copy, a kernel, or a point without work.
class SimulatedOperation final : public Completion {
 public:
  SimulatedOperation(const std::shared_ptr<SimulatedQueues>& queues, SimulatedQueueId queue, std::function<void()> work,
                     std::vector<Ticket> after);

  // Whether the operation has run, or never will. Never makes it run, and takes no lock.
  [[nodiscard]] bool done() const noexcept override { return done_.load(std::memory_order_acquire); }

  // Runs the operation now if it has not run, and first all that it waits for.
  void synchronize() const override;

  // The queues that own the operation, the queue in which it waits, and the tickets that it waits for besides its
  // predecessors there.
  [[nodiscard]] bool is_of(const SimulatedQueues& queues) const { return &queues == owner_; }
  [[nodiscard]] const SimulatedQueueId& queue() const { return queue_; }
  [[nodiscard]] const std::vector<Ticket>& after() const { return after_; }
  [[nodiscard]] bool has_work() const { return work_ != nullptr; }

  // Called by SimulatedQueues only, which locks: does the work, and keeps an exception for `synchronize`.
  void run() noexcept;

  // Called by SimulatedQueues only, which locks: the operation will never run, and `synchronize` says so.
  void abandon() noexcept;

 private:
  void finish() noexcept;

  const SimulatedQueues* const owner_;
  const std::weak_ptr<SimulatedQueues> queues_;
  const SimulatedQueueId queue_;
  std::function<void()> work_;
  std::vector<Ticket> after_;
  std::exception_ptr error_;  // written before done_
  std::atomic<bool> done_ = false;
};

}  // namespace ebb
