#include "offload/steps/eviction_queue.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace ebb {

void EvictionQueue::add_copy(const std::shared_ptr<SavedStep>& step, std::weak_ptr<SavedStorage> storage,
                             std::weak_ptr<Fetched> fetched) {
  const MutexLock lock(mutex_);
  while (!copies_.empty() && copies_.front().fetched.expired()) {
    copies_.pop_front();
  }
  if (copies_.size() >= next_cleaning_) {
    std::erase_if(copies_, [](const Copy& each) { return each.fetched.expired(); });
    next_cleaning_ = std::max<std::size_t>(64, 2 * copies_.size());
  }
  copies_.push_back({&step->thread(), step, std::move(storage), std::move(fetched)});
}

std::vector<EvictionQueue::Copy> EvictionQueue::take_copies_of(const std::shared_ptr<SavedStep>& step) {
  return take([&](const Copy& each) { return !each.step.owner_before(step) && !step.owner_before(each.step); });
}

std::vector<EvictionQueue::Copy> EvictionQueue::take_copies_of(const BackwardCount& thread) {
  return take([&](const Copy& each) { return each.thread == &thread; });
}

std::vector<EvictionQueue::Copy> EvictionQueue::take_last_copy() {
  std::vector<Copy> last;
  const MutexLock lock(mutex_);
  if (!copies_.empty()) {
    last.push_back(std::move(copies_.back()));
    copies_.pop_back();
  }
  return last;
}

template <typename Which>
std::vector<EvictionQueue::Copy> EvictionQueue::take(const Which& which) {
  const MutexLock lock(mutex_);
  const auto others = std::stable_partition(copies_.begin(), copies_.end(), which);
  std::vector<Copy> taken(std::make_move_iterator(copies_.begin()), std::make_move_iterator(others));
  copies_.erase(copies_.begin(), others);
  return taken;
}

EvictionQueue::Id EvictionQueue::add_kept(std::weak_ptr<SavedStorage> storage, c10::Stream stream) {
  const MutexLock lock(mutex_);
  kept_.emplace_hint(kept_.end(), next_id_, KeptEntry{std::move(storage), stream});
  return next_id_++;
}

void EvictionQueue::remove_kept(Id id) noexcept {
  const MutexLock lock(mutex_);
  kept_.erase(id);
}

std::optional<EvictionQueue::Kept> EvictionQueue::first_kept(Id from) {
  const MutexLock lock(mutex_);
  for (auto entry = kept_.lower_bound(from); entry != kept_.end(); ++entry) {
    if (std::shared_ptr<SavedStorage> storage = entry->second.storage.lock()) {
      return Kept{entry->first, std::move(storage), entry->second.stream};
    }
  }
  return std::nullopt;
}

}  // namespace ebb
