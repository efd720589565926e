#include "test/simulated/simulated_queues.h"

#include <algorithm>
#include <utility>

namespace ebb {

namespace {

bool is_copy(const SimulatedOperation& operation) { return operation.queue().kind != SimulatedQueueId::Kind::kCompute; }

}  // namespace

SimulatedQueues::~SimulatedQueues() {
  // Work that holds memory frees that memory here, and finds that the queues have ended.
  for (const auto& [queue, operations] : waiting_) {
    for (const Operation& operation : operations) {
      operation->abandon();
    }
  }
}

Ticket SimulatedQueues::push(SimulatedQueueId queue, std::function<void()> work, std::vector<Ticket> after) {
  const MutexLock lock(mutex_);
  auto operation = std::make_shared<SimulatedOperation>(shared_from_this(), queue, std::move(work), std::move(after));
  waiting_[queue].push_back(operation);
  let_run();
  return operation;
}

void SimulatedQueues::force(const SimulatedOperation& operation) {
  const MutexLock lock(mutex_);
  force_locked(operation);
  let_run();
}

void SimulatedQueues::run_all() {
  const MutexLock lock(mutex_);
  const auto has_some = [](const auto& entry) { return !entry.second.empty(); };
  for (auto at = std::ranges::find_if(waiting_, has_some); at != waiting_.end();
       at = std::ranges::find_if(waiting_, has_some)) {
    force_locked(*at->second.back());
  }
}

std::uint64_t SimulatedQueues::forced_points() const {
  const MutexLock lock(mutex_);
  return forced_points_;
}

void SimulatedQueues::force_locked(const SimulatedOperation& operation) {
  // A stack of our own: chains of waits get longer than a thread's stack is deep. Every entry waits for the next one,
  // so no entry can run, and be destroyed, before it is on top.
  std::vector<const SimulatedOperation*> wanted{&operation};
  while (!wanted.empty()) {
    const SimulatedOperation& top = *wanted.back();
    if (top.done()) {
      wanted.pop_back();
    } else if (const SimulatedOperation& front = *waiting_.at(top.queue()).front(); !is_copy(top) && &front != &top) {
      wanted.push_back(&front);
    } else if (const SimulatedOperation* unmet = first_unmet(top)) {
      wanted.push_back(unmet);
    } else {
      wanted.pop_back();
      run(top);
    }
  }
}

// The first operation of these queues that `operation` still waits for; null for none. Waits for tickets of other
// queues before it returns.
const SimulatedOperation* SimulatedQueues::first_unmet(const SimulatedOperation& operation) {
  for (const Ticket& ticket : operation.after()) {
    if (is_done(ticket)) {
      continue;
    }
    if (!operation.has_work()) {
      ++forced_points_;
    }
    const auto* simulated = dynamic_cast<const SimulatedOperation*>(ticket.get());
    if (simulated != nullptr && simulated->is_of(*this)) {
      return simulated;
    }
    try {
      ticket->synchronize();
    } catch (...) {
      // A ticket that failed is done all the same, and reports its error to its own waiters.
    }
  }
  return nullptr;
}

void SimulatedQueues::let_run() {
  if (running_ || schedule_ == Schedule::kLate) {
    return;
  }
  while (schedule_ == Schedule::kEarly || random_() % 2 == 0) {
    std::vector<Operation> candidates = ready();
    if (schedule_ == Schedule::kEarly) {
      std::erase_if(candidates, [](const Operation& each) { return !is_copy(*each) && each->has_work(); });
    }
    if (candidates.empty()) {
      return;
    }
    const std::size_t choice = schedule_ == Schedule::kEarly ? 0 : random_() % candidates.size();
    run(*candidates[choice]);
  }
}

std::vector<SimulatedQueues::Operation> SimulatedQueues::ready() const {
  std::vector<Operation> result;
  for (const auto& [queue, operations] : waiting_) {
    for (const Operation& operation : operations) {
      if (std::ranges::all_of(operation->after(), is_done)) {
        result.push_back(operation);
      }
      if (!is_copy(*operation)) {
        break;  // kernels behind the first have to wait for it
      }
    }
  }
  return result;
}

void SimulatedQueues::run(const SimulatedOperation& wanted) {
  std::deque<Operation>& operations = waiting_.at(wanted.queue());
  const auto is_wanted = [&](const Operation& each) { return each.get() == &wanted; };
  const Operation operation = *std::ranges::find_if(operations, is_wanted);
  running_ = true;
  operation->run();  // still in its queue, because work that frees memory queues an operation behind it
  running_ = false;
  operations.erase(std::ranges::find_if(operations, is_wanted));
}

}  // namespace ebb
