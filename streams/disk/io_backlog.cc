#include "streams/disk/io_backlog.h"

#include <utility>

namespace ebb {

namespace {

std::shared_ptr<IoJob> take_first(std::deque<std::shared_ptr<IoJob>>& jobs) {
  if (jobs.empty()) {
    return nullptr;
  }
  std::shared_ptr<IoJob> first = std::move(jobs.front());
  jobs.pop_front();
  return first;
}

}  // namespace

void IoBacklog::push(std::shared_ptr<IoJob> job) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back(std::move(job));
  changed_.notify_one();
}

std::shared_ptr<IoJob> IoBacklog::pop() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return closed_ || !jobs_.empty(); });
  return take_first(jobs_);
}

std::shared_ptr<IoJob> IoBacklog::try_pop() {
  const std::lock_guard lock(mutex_);
  return take_first(jobs_);
}

void IoBacklog::close() noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace ebb
