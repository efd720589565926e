// Question: how long does it take to plan a step, by how many storages it saves and which part of their bytes may stay?
//
// Steps are random (random_step.h), and a copy takes 1 ms a byte, so that copies and compute take about as long. Times
// are of one thread, and of one plan for a limit; Options::device_budget as a slowdown makes some ten of them.

#include <cstdint>
#include <random>

#include <benchmark/benchmark.h>

#include "bench/planning/random_step.h"
#include "policy/planner.h"

namespace ebb {
namespace {

constexpr LinkRates kOneByteEachMs{.out_bytes_per_ms = 1, .in_bytes_per_ms = 1, .ms_per_copy = 0};

// Arguments: storages, and the percentage of their bytes that may stay.
void plan(benchmark::State& state) {
  std::mt19937_64 random(7);
  const StepRecord record = random_step(random, {.storages = static_cast<std::size_t>(state.range(0))});
  const Limits limits{.device_bytes = total_bytes(record) * static_cast<std::uint64_t>(state.range(1)) / 100};
  for (auto each : state) {
    benchmark::DoNotOptimize(make_plan(record, limits, kOneByteEachMs));
  }
}
BENCHMARK(plan)->ArgsProduct({{100, 1000, 10'000}, {90, 70, 50, 30, 10}})->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ebb

BENCHMARK_MAIN();
