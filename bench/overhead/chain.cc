// A chain of small operations, forward and backward, with a guard and without one: what saves.py times in Python. An
// operation runs between two saves, so that a save meets the caches as a training step leaves them.

#include <cstdint>
#include <optional>
#include <string>

#include <ATen/Functions.h>
#include <benchmark/benchmark.h>

#include "bench/overhead/rows.h"
#include "offload/guard.h"
#include "offload/offloader.h"

namespace ebb {
namespace {

constexpr std::int64_t kOperations = 2000;

enum class Pass : bool { kForward, kBackward };

void run_chain(benchmark::State& state, Pass pass, bool guarded) {
  Options options;
  options.device = c10::kCPU;
  Offloader offloader(options);
  double total = 0;
  for (auto _ : state) {
    const at::Tensor x = at::zeros({4}).requires_grad_();
    at::Tensor y = x;
    const Stopwatch forward;
    {
      std::optional<OffloadGuard> guard;
      if (guarded) {
        guard.emplace(offloader);
      }
      for (std::int64_t i = 0; i < kOperations; ++i) {
        y = y.sin();
      }
    }
    double seconds = forward.seconds();
    const Stopwatch backward;
    y.backward(at::ones_like(y));
    seconds = pass == Pass::kForward ? seconds : backward.seconds();
    state.SetIterationTime(seconds);
    total += seconds;
  }
  state.counters["ns_per_operation"] = kNanoseconds * total / static_cast<double>(state.iterations() * kOperations);
}

}  // namespace

void register_chain() {
  for (const bool guarded : {false, true}) {
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      const std::string name =
          std::string(guarded ? "chain_ebb_" : "chain_plain_") + (pass == Pass::kForward ? "forward" : "backward");
      benchmark::RegisterBenchmark(name.c_str(), [pass, guarded](benchmark::State& state) {
        run_chain(state, pass, guarded);
      })->UseManualTime();
    }
  }
}

}  // namespace ebb
