#include "bench/planning/random_step.h"

#include <algorithm>

namespace ebb {

StepRecord random_step(std::mt19937_64& random, const RandomStep& step) {
  constexpr std::uint32_t kReach = 7;
  const auto below = [&random](std::uint64_t bound) { return random() % bound; };
  StepRecord record;
  double now = 0;
  for (std::uint32_t i = 0; i < step.storages; ++i) {
    now += static_cast<double>(1 + below(10));
    StorageRecord storage{.bytes = 1 + below(20), .saved_ms = now};
    if (below(2) == 0) {
      storage.recompute = Recompute::kMemoryBound;
      storage.recompute_ms = 0.5 * static_cast<double>(below(10));
      storage.recompute_bytes = below(2) * below(10);
      storage.other_bytes = step.other_bytes;
      for (std::uint32_t input = i > kReach ? i - kReach : 0; input < i; ++input) {
        if (below(3) == 0) {
          storage.inputs.push_back(input);
        }
      }
    }
    if (step.still_in_use && below(3) == 0) {
      storage.idle_ms = now + static_cast<double>(below(30));
    }
    record.storages.push_back(storage);
  }
  record.other = {{0, step.other_bytes}};
  if (step.head_bytes > 0) {
    record.other.push_back({now, step.other_bytes + below(step.head_bytes)});
  }
  now += static_cast<double>(1 + below(20));
  record.backward_ms = now;
  if (step.head_bytes > 0) {
    record.other.push_back({now, step.other_bytes});
  }
  for (auto storage = record.storages.rbegin(); storage != record.storages.rend(); ++storage) {
    storage->needed_ms = now;
    storage->idle_ms = std::min(storage->idle_ms, now);
    now += static_cast<double>(1 + below(20));
    storage->released_ms = now;
  }
  record.end_ms = now;
  return record;
}

std::uint64_t total_bytes(const StepRecord& record) {
  std::uint64_t total = 0;
  for (const StorageRecord& storage : record.storages) {
    total += storage.bytes;
  }
  return total;
}

}  // namespace ebb
