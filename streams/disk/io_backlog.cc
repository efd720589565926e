#include "streams/disk/io_backlog.h"

#include <utility>

namespace ebb {

void IoBacklog::push(std::shared_ptr<IoJob> job) {
  const MutexLock lock(mutex_);
  jobs_.push_back(std::move(job));
  changed_.notify_one();
}

std::shared_ptr<IoJob> IoBacklog::pop(Wait wait) {
  const MutexLock lock(mutex_);
  while (wait == Wait::kYes && !closed_ && jobs_.empty()) {
    mutex_.wait(changed_);
  }
  if (jobs_.empty()) {
    return nullptr;
  }
  std::shared_ptr<IoJob> first = std::move(jobs_.front());
  jobs_.pop_front();
  return first;
}

void IoBacklog::close() noexcept {
  const MutexLock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace ebb
