#include "offload/steps/thread_steps.h"

#include <algorithm>
#include <utility>

namespace ebb {

std::shared_ptr<SavedStep> ThreadSteps::last() {
  const MutexLock lock(mutex_);
  return last_.lock();
}

void ThreadSteps::begin(const std::shared_ptr<SavedStep>& step) {
  const MutexLock lock(mutex_);
  last_ = step;
}

void ThreadSteps::prefetches(std::weak_ptr<SavedStep> step) {
  const MutexLock lock(mutex_);
  if (prefetching_.size() >= next_cleaning_) {
    std::erase_if(prefetching_, [](const auto& each) { return each.expired(); });
    next_cleaning_ = std::max<std::size_t>(64, 2 * prefetching_.size());
  }
  prefetching_.push_back(std::move(step));
}

std::vector<std::shared_ptr<SavedStep>> ThreadSteps::take_prefetching() {
  std::vector<std::weak_ptr<SavedStep>> taken;
  {
    const MutexLock lock(mutex_);
    taken.swap(prefetching_);
  }
  std::vector<std::shared_ptr<SavedStep>> living;
  for (const std::weak_ptr<SavedStep>& each : taken) {
    if (std::shared_ptr<SavedStep> step = each.lock()) {
      living.push_back(std::move(step));
    }
  }
  return living;
}

bool ThreadSteps::is_idle() {
  const MutexLock lock(mutex_);
  return in_backward() == 0 && last_.expired();
}

std::shared_ptr<ThreadSteps> StepsOfThreads::here() {
  const MutexLock lock(mutex_);
  const std::thread::id thread = std::this_thread::get_id();
  if (const auto known = steps_.find(thread); known != steps_.end()) {
    return known->second;
  }
  if (steps_.size() >= next_cleaning_) {
    std::erase_if(steps_, [](const auto& entry) { return entry.second.use_count() == 1 && entry.second->is_idle(); });
    next_cleaning_ = std::max<std::size_t>(64, 2 * steps_.size());
  }
  return steps_.emplace(thread, std::make_shared<ThreadSteps>()).first->second;
}

std::vector<std::shared_ptr<ThreadSteps>> StepsOfThreads::all() {
  std::vector<std::shared_ptr<ThreadSteps>> found;
  const MutexLock lock(mutex_);
  for (const auto& [thread, steps] : steps_) {
    found.push_back(steps);
  }
  return found;
}

}  // namespace ebb
