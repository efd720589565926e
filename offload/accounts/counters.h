#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "offload/stats.h"

namespace ebb {

// A Count that several threads may add to at once.
class Counter {
 public:
  void add(std::uint64_t bytes) {
    tensors_.fetch_add(1, std::memory_order_relaxed);
    bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }
  [[nodiscard]] Count count() const {
    return {tensors_.load(std::memory_order_relaxed), bytes_.load(std::memory_order_relaxed)};
  }
  void reset() {
    tensors_.store(0, std::memory_order_relaxed);
    bytes_.store(0, std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint64_t> tensors_{0};
  std::atomic<std::uint64_t> bytes_{0};
};

// The counts that Stats reports, while they grow.
struct Counters {
  Counter saved;
  Counter offloaded;
  Counter dropped;
  Counter evicted;
  Counter deduplicated;
  std::array<Counter, kKeptReasons> kept;
  Counter fetched;
  Counter recomputed;
  Counter reused;
  Counter still_held;
  Counter managed_prefetched;
  Counter managed_fetched_late;
  Counter managed_evicted;
  std::atomic<std::uint64_t> steps{0};

  void reset() {
    for (Counter* counter : {&saved, &offloaded, &dropped, &evicted, &deduplicated, &fetched, &recomputed, &reused,
                             &still_held, &managed_prefetched, &managed_fetched_late, &managed_evicted}) {
      counter->reset();
    }
    for (Counter& counter : kept) {
      counter.reset();
    }
    steps = 0;
  }
};

}  // namespace ebb
