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
  const MutexLock lock(mutex_);
  jobs_.push_back(std::move(job));
  changed_.notify_one();
}

std::shared_ptr<IoJob> IoBacklog::pop() {
  const MutexLock lock(mutex_);
  while (!closed_ && jobs_.empty()) {
    mutex_.wait(changed_);
  }
  return take_first(jobs_);
}

std::shared_ptr<IoJob> IoBacklog::try_pop() {
  const MutexLock lock(mutex_);
  return take_first(jobs_);
}

void IoBacklog::close() noexcept {
  const MutexLock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace ebb
