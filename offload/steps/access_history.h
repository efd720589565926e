#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "streams/base/mutex.h"

namespace ebb {

// What finished steps teach the next ones: in which order backward wanted the storages, and how much was saved. A few
// orders are kept side by side (training and evaluation, sequence-length buckets), the oldest forgotten first.
//
// Threads: every member may be called from any thread.
class AccessHistory {
 public:
  static constexpr std::size_t kMaxOrders = 16;

  // `observed`: positions in the order of use. `signature`: of the step's sizes.
  void remember(std::uint64_t signature, std::vector<std::uint32_t> observed);
  void remember_sizes(std::uint64_t saved_bytes, std::uint64_t largest_bytes);

  // A step under way has come this far. Until one has ended, that is all there is to go by.
  void raise_sizes(std::uint64_t saved_bytes, std::uint64_t largest_bytes);

  // It is over. Other steps under way raise them again with what they save next.
  void lower_sizes();

  // It was none: all its saves ended without backward.
  void drop_step() {
    lower_sizes();
    dropped_ = true;
  }

  // Whether one was dropped since this was last asked.
  [[nodiscard]] bool take_dropped() { return dropped_.exchange(false); }

  // A permutation of [0, count): as observed under this signature, what was not used then last; else the reverse.
  [[nodiscard]] std::vector<std::uint32_t> recall(std::uint64_t signature, std::size_t count) const;

  // Whether an order was observed under this signature.
  [[nodiscard]] bool knows(std::uint64_t signature) const;

  // Of the last step that ended, or of the one under way where that is more.
  [[nodiscard]] std::uint64_t saved_bytes() const {
    return std::max(ended_.saved_bytes.load(), under_way_.saved_bytes.load());
  }
  [[nodiscard]] std::uint64_t largest_bytes() const {
    return std::max(ended_.largest_bytes.load(), under_way_.largest_bytes.load());
  }

 private:
  struct Order {
    std::uint64_t signature;
    std::vector<std::uint32_t> positions;
  };

  [[nodiscard]] std::deque<Order>::const_iterator find_locked(std::uint64_t signature) const EBB_REQUIRES(mutex_);

  struct Sizes {
    std::atomic<std::uint64_t> saved_bytes{0};
    std::atomic<std::uint64_t> largest_bytes{0};
  };

  Sizes ended_;
  Sizes under_way_;
  std::atomic<bool> dropped_{false};
  mutable Mutex mutex_;
  std::deque<Order> orders_ EBB_GUARDED_BY(mutex_);  // newest first
};

}  // namespace ebb
