// Uses of managed storages, in turn, of which a quarter fits on the device: does a use cost more where more are
// managed?

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <benchmark/benchmark.h>

#include "bench/overhead/null_tier.h"
#include "bench/overhead/rows.h"
#include "offload/offloader.h"

namespace ebb {
namespace {

constexpr std::int64_t kFloats = 1024;
constexpr std::int64_t kRounds = 4;  // that the order of uses is learned in

void run(benchmark::State& state) {
  const std::int64_t count = state.range(0);
  Offloader offloader(Options(), std::make_shared<NullTier>());
  std::vector<at::Tensor> tensors;
  for (std::int64_t i = 0; i < count; ++i) {
    tensors.push_back(at::ones({kFloats}));
  }
  const std::uint64_t bytes = tensors.front().nbytes();
  offloader.manage(tensors, {.device_bytes = bytes * static_cast<std::uint64_t>(count) / 4,
                             .prefetch_bytes = 16 * bytes,
                             .minimum_bytes = 1});
  const at::NoGradGuard no_grad;
  const auto use_all = [&] {
    for (at::Tensor& each : tensors) {
      each.mul_(1);
    }
  };
  for (std::int64_t i = 0; i < kRounds; ++i) {
    use_all();
  }
  double total = 0;
  for (auto _ : state) {
    const Stopwatch watch;
    use_all();
    const double seconds = watch.seconds();
    state.SetIterationTime(seconds);
    total += seconds;
  }
  state.counters["ns_per_use"] = kNanoseconds * total / static_cast<double>(state.iterations() * count);
}

}  // namespace

void register_managed() {
  auto* const registered = benchmark::RegisterBenchmark("managed_null_tier_use", &run);
  for (const std::int64_t count : {100, 400, 1'600, 6'400}) {
    registered->Arg(count);
  }
  registered->UseManualTime();
}

}  // namespace ebb
