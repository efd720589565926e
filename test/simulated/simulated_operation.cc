#include "test/simulated/simulated_operation.h"

#include <stdexcept>
#include <utility>

#include "test/simulated/simulated_queues.h"

namespace ebb {

SimulatedOperation::SimulatedOperation(const std::shared_ptr<SimulatedQueues>& queues, SimulatedQueueId queue,
                                       std::function<void()> work, std::vector<Ticket> after)
    : owner_(queues.get()), queues_(queues), queue_(queue), work_(std::move(work)), after_(std::move(after)) {}

void SimulatedOperation::synchronize() const {
  if (!done()) {
    // Queues that have ended have abandoned the operations that were left in them.
    if (const std::shared_ptr<SimulatedQueues> queues = queues_.lock()) {
      queues->force(*this);
    }
  }
  if (error_ != nullptr) {
    std::rethrow_exception(error_);
  }
}

void SimulatedOperation::run() noexcept {
  try {
    if (work_ != nullptr) {
      work_();
    }
  } catch (...) {
    error_ = std::current_exception();
  }
  finish();
}

void SimulatedOperation::abandon() noexcept {
  error_ = std::make_exception_ptr(std::runtime_error("simulated work was dropped: its tier ended before it ran"));
  finish();
}

void SimulatedOperation::finish() noexcept {
  work_ = nullptr;
  after_.clear();
  done_.store(true, std::memory_order_release);
}

}  // namespace ebb
