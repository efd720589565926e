#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "offload/accounts/gauge.h"
#include "streams/base/mutex.h"

namespace ebb {

// What finished steps teach later steps: the access orders that backward used, and how many bytes a step saves. A few
// access orders are kept side by side (training and evaluation, sequence-length buckets); the oldest is forgotten
// first.
//
// Threads: every member may be called from any thread.
class AccessHistory {
 public:
  static constexpr std::size_t kMaxOrders = 16;

  // Keeps the access order of a step that has ended. `signature`: a hash of the sizes of the step's storages.
  // `observed`: the storages' positions in the order of saving, listed in the order of use.
  void remember(std::uint64_t signature, std::vector<std::uint32_t> observed);

  // Keeps the sizes of a step that has ended: the sum of its storages and the largest of them.
  void remember_sizes(std::uint64_t saved_bytes, std::uint64_t largest_bytes);

  // Notes that a step under way has saved so many bytes so far, the largest storage among them of `largest_bytes`.
  // Until a first step has ended, these sizes are all that the limits can go by.
  void raise_sizes(std::uint64_t saved_bytes, std::uint64_t largest_bytes) {
    raise_to(under_way_.saved_bytes, saved_bytes);
    raise_to(under_way_.largest_bytes, largest_bytes);
  }

  // Resets the sizes of steps under way, because one of these steps is over. Every other step under way raises the
  // sizes again at its next save.
  void lower_sizes();

  // Notes that all saves of a step under way ended without backward: it was no training step, and nothing is learned.
  void drop_step() {
    lower_sizes();
    dropped_ = true;
  }

  // Whether drop_step() was called since the last call of take_dropped().
  [[nodiscard]] bool take_dropped() { return dropped_.exchange(false); }

  // The expected access order, a permutation of [0, count): first the positions as observed under this signature, then
  // all other positions in the reverse of saving.
  [[nodiscard]] std::vector<std::uint32_t> recall(std::uint64_t signature, std::size_t count) const;

  // Whether an access order was observed under this signature.
  [[nodiscard]] bool knows(std::uint64_t signature) const;

  // The sizes of the last step that ended, or of the steps under way where these are larger.
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
