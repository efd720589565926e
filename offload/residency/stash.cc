#include "offload/residency/stash.h"

#include <algorithm>
#include <new>
#include <optional>
#include <utility>

#include "offload/base/references.h"

namespace ebb {

Stash::~Stash() {
  if (in_force(WaitPoint::kStashEnd)) {
    drain();
  }
}

void Stash::hold(c10::Storage source, std::shared_ptr<Gauge::Lease> on_device, Ticket left, c10::Stream stream,
                 std::uint64_t limit_bytes) {
  const std::uint64_t bytes = source.nbytes();
  make_room(bytes, limit_bytes);
  Entry entry{0, std::move(on_device), gauge_.hold(bytes), std::move(source), std::move(left), stream};
  try {
    const MutexLock lock(mutex_);
    entry.number = next_number_++;
    entries_.push_back(std::move(entry));
  } catch (const std::bad_alloc&) {  // push_back has not moved the entry
    tier_.wait_or_block(WaitPoint::kStashBound, stream, entry.left);
    return;
  }
  if (bytes > limit_bytes) {
    shrink_to(limit_bytes);
  }
}

void Stash::make_room(std::uint64_t bytes, std::uint64_t limit_bytes) noexcept {
  sweep();
  shrink_to(limit_bytes - std::min(bytes, limit_bytes));
}

void Stash::sweep() noexcept {
  while (true) {
    std::optional<Entry> finished;  // destroyed after the lock is released: freeing memory may run other people's code
    {
      const MutexLock lock(mutex_);
      if (entries_.empty() || !may_refer_to(*entries_.front().source.unsafeGetStorageImpl()) ||
          (in_force(WaitPoint::kStashSweep) && !is_done(entries_.front().left))) {
        return;
      }
      finished = std::move(entries_.front());
      entries_.pop_front();
    }
  }
}

void Stash::shrink_to(std::uint64_t limit_bytes) noexcept {
  while (gauge_.now_bytes() > limit_bytes) {
    std::optional<Wait> oldest;
    {
      const MutexLock lock(mutex_);
      if (entries_.empty() || !may_refer_to(*entries_.front().source.unsafeGetStorageImpl())) {
        return;
      }
      oldest = wait_for(entries_.front());
    }
    let_go(*oldest);
  }
}

void Stash::release(const c10::Storage& source) noexcept {
  while (true) {
    std::optional<Wait> found;
    {
      const MutexLock lock(mutex_);
      const auto at = std::ranges::find(entries_, source.unsafeGetStorageImpl(),
                                        [](const Entry& entry) { return entry.source.unsafeGetStorageImpl(); });
      if (at == entries_.end()) {
        return;
      }
      found = wait_for(*at);
    }
    let_go(*found);
  }
}

// The source is let go after the wait only, so that work which reuses its memory comes behind the copy on the same
// stream (R1 in docs/design.md). On a disk the host may wait here, so the lock is not held. The entry stays until then,
// so that another thread, too, waits for the copy. A failed copy reads the source no more either; its error reaches
// whoever asks for its bytes.
void Stash::let_go(const Wait& wait) noexcept {
  tier_.wait_or_block(WaitPoint::kStashBound, wait.stream, wait.left);
  std::optional<Entry> done;  // destroyed after the lock is released, as in sweep
  const MutexLock lock(mutex_);
  const auto at = std::ranges::find(entries_, wait.number, &Entry::number);
  if (at != entries_.end()) {
    done = std::move(*at);
    entries_.erase(at);
  }
}

}  // namespace ebb
