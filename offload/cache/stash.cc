#include "offload/cache/stash.h"

#include <algorithm>
#include <utility>

#include "offload/base/references.h"

namespace ebb {
namespace {

// Of a copy that is over.
bool has_failed(const Ticket& copy) {
  try {
    if (copy != nullptr) {
      copy->synchronize();
    }
    return false;
  } catch (...) {
    return true;
  }
}

}  // namespace

Stash::~Stash() {
  if (in_force(WaitPoint::kStashEnd)) {
    drain();
  }
}

Stash::Number Stash::hold(Place place, Departure departure, std::uint64_t limit_bytes) noexcept {
  const std::uint64_t bytes = departure.memory.nbytes();
  if (limit_bytes != kNoLimit) {
    make_room(bytes, limit_bytes);
  }
  place.mapped() = {std::move(departure), {}};
  Number number = 0;
  {
    const MutexLock lock(mutex_);
    number = next_number_++;
    if (in_force(WaitPoint::kSourceInStash)) {
      place.key() = number;
      place.mapped().counted = gauge_.hold(bytes);
      entries_.insert(entries_.end(), std::move(place));
    }
  }
  if (bytes > limit_bytes) {
    shrink_to(limit_bytes);
  }
  return number;
}

std::optional<Stash::Departure> Stash::take(Number number) noexcept {
  const MutexLock lock(mutex_);
  if (const auto at = entries_.find(number); at != entries_.end()) {
    return std::move(remove_locked(at).mapped().departure);
  }
  if (Place place = failed_.extract(number)) {
    return std::move(place.mapped().departure);
  }
  return std::nullopt;
}

void Stash::make_room(std::uint64_t bytes, std::uint64_t limit_bytes) noexcept {
  sweep();
  shrink_to(limit_bytes - std::min(bytes, limit_bytes));
}

bool Stash::sweep_oldest() noexcept {
  Place finished;  // destroyed after the lock is released: freeing memory may run other people's code
  const MutexLock lock(mutex_);
  const auto at = entries_.begin();
  if (at == entries_.end() || !may_refer_to(*at->second.departure.memory.unsafeGetStorageImpl()) ||
      (in_force(WaitPoint::kStashSweep) && !is_done(at->second.departure.left))) {
    return false;
  }
  finished = end_locked(at);
  return true;
}

void Stash::shrink_to(std::uint64_t limit_bytes) noexcept {
  while (gauge_.now_bytes() > limit_bytes && let_go_of_oldest()) {
  }
}

bool Stash::let_go_of_oldest() noexcept {
  const std::optional<Wait> wait = oldest();
  if (wait) {
    let_go(*wait);
  }
  return wait.has_value();
}

bool Stash::block_for_oldest() noexcept {
  const std::optional<Wait> wait = oldest();
  if (wait) {
    static_cast<void>(has_failed(wait->left));  // synchronizes
    let_go(*wait);
  }
  return wait.has_value();
}

void Stash::release(Number number) noexcept {
  std::optional<Wait> found;
  {
    const MutexLock lock(mutex_);
    if (const auto at = entries_.find(number); at != entries_.end()) {
      found = wait_for(*at);
    }
  }
  if (found) {
    let_go(*found);
  }
}

void Stash::release(const c10::Storage& source) noexcept {
  while (true) {
    std::optional<Wait> found;
    {
      const MutexLock lock(mutex_);
      const auto at = std::ranges::find(entries_, source.unsafeGetStorageImpl(), [](const auto& entry) {
        return entry.second.departure.memory.unsafeGetStorageImpl();
      });
      if (at == entries_.end()) {
        return;
      }
      found = wait_for(*at);
    }
    let_go(*found);
  }
}

Stash::Wait Stash::wait_for(const Entries::value_type& entry) {
  const Departure& departure = entry.second.departure;
  return {entry.first, departure.left, departure.stream};
}

std::optional<Stash::Wait> Stash::oldest() noexcept {
  const MutexLock lock(mutex_);
  const auto at = entries_.begin();
  const bool may_go = at != entries_.end() && may_refer_to(*at->second.departure.memory.unsafeGetStorageImpl());
  return may_go ? std::optional(wait_for(*at)) : std::nullopt;
}

// The memory no longer counts, though the caller is yet to free it.
Stash::Place Stash::remove_locked(Entries::iterator at) noexcept {
  Place removed = entries_.extract(at);
  removed.mapped().counted = {};
  return removed;
}

// Of an entry whose copy is done, or waited for.
Stash::Place Stash::end_locked(Entries::iterator at) noexcept {
  Place ended = remove_locked(at);
  const Departure& departure = ended.mapped().departure;
  if (departure.if_copy_fails == IfCopyFails::kStays && is_done(departure.left) && has_failed(departure.left)) {
    failed_.insert(std::move(ended));
    return {};
  }
  return ended;
}

// The memory is let go of after the wait only, so that work which reuses it comes behind the copy on the same stream
// (R1 in docs/design.md). On a disk the host may wait here, so the lock is not held. The entry stays until then, so
// that another thread, too, waits for the copy.
void Stash::let_go(const Wait& wait) noexcept {
  tier_.wait_or_block(WaitPoint::kStashBound, wait.stream, wait.left);
  Place done;  // destroyed after the lock is released, as in sweep_oldest
  const MutexLock lock(mutex_);
  if (const auto at = entries_.find(wait.number); at != entries_.end()) {
    done = end_locked(at);
  }
}

}  // namespace ebb
