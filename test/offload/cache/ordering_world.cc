#include "test/offload/cache/ordering_world.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

#include <ATen/Functions.h>
#include <catch2/catch.hpp>

#include "policy/policies.h"

namespace ebb::test {
namespace {

std::shared_ptr<Runtime> make_runtime(const std::shared_ptr<SimulatedTier>& tier, const OrderingWorld::Limits& limits) {
  Options options;
  options.device = tier->device();
  options.policy = offload_everything();
  options.stash_bytes = limits.stash_bytes;
  options.window_bytes = limits.window_bytes;
  return std::make_shared<Runtime>(options, tier);
}

}  // namespace

Order any_order() {
  static const char* const set = std::getenv("EBB_SEED");
  static const std::uint64_t first = set == nullptr ? 0 : 20 * std::strtoull(set, nullptr, 10);
  const auto seed = static_cast<std::uint64_t>(GENERATE(range(0, 22)));
  if (seed == 20) {
    return {Schedule::kLate, 0};
  }
  return seed == 21 ? Order{Schedule::kEarly, 0} : Order{Schedule::kRandom, first + seed};
}

OrderingWorld::OrderingWorld(Schedule schedule, std::uint64_t seed, Limits limits)
    : tier(std::make_shared<SimulatedTier>(schedule, seed, limits.capacity_bytes, /*deferred_compute=*/true)),
      runtime(make_runtime(tier, limits)),
      step(runtime->steps().of_this_thread()) {}

at::Tensor OrderingWorld::make(float value, std::size_t times) {
  const std::size_t bytes = times * kBytes;
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, runtime->tier().allocate(bytes));
  auto* const data = static_cast<float*>(storage.mutable_data());
  tier->compute(tier->current_stream(), [data, value, times] { std::fill_n(data, times * kFloats, value); });
  return at::empty({0}).set_(storage, 0, {static_cast<std::int64_t>(times * kFloats)}, {1});
}

std::unique_ptr<SavedStorage::Use> OrderingWorld::save(at::Tensor tensor) {
  return std::make_unique<SavedStorage::Use>(runtime->save(tensor, step));
}

void OrderingWorld::read(c10::Storage storage) {
  const std::size_t at = seen_->size();
  constexpr float kNothing = std::numeric_limits<float>::quiet_NaN();
  seen_->push_back(kNothing);
  // As on a GPU, the kernel has an address, and the host may let the memory go before the kernel runs.
  tier->compute(tier->current_stream(), [seen = seen_, at, data = static_cast<const float*>(storage.data())] {
    const bool alike = std::all_of(data, data + kFloats, [data](float value) { return value == data[0]; });
    (*seen)[at] = alike ? data[0] : kNothing;
  });
}

}  // namespace ebb::test
