// Question: what does one save cost the host on top of LibTorch's own work, passed through, offloaded and restored, and
// does that grow with the number of saves that are alive?
//
// A save is a torch::autograd::SavedVariable, made and unpacked as a node makes and unpacks it. Copies go to a tier
// that does nothing, so what is timed is ebb's own: hooks, policy, pool, order, statistics. `live` saves are made, then
// unpacked in reverse, then destroyed; each benchmark times one of the three and reports nanoseconds a save.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <benchmark/benchmark.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "bench/null_tier.h"
#include "offload/guard.h"
#include "offload/offloader.h"
#include "policy/everything.h"
#include "policy/minimum_size.h"

namespace ebb {
namespace {

using torch::autograd::SavedVariable;

enum class Kind : std::uint8_t {
  kPlain,           // no offloader
  kPlainParameter,  // no offloader, a leaf that requires gradients
  kParameter,       // such a leaf is passed through
  kSmall,           // kept by the policy
  kOffloaded,
};

bool is_plain(Kind kind) { return kind == Kind::kPlain || kind == Kind::kPlainParameter; }
bool is_parameter(Kind kind) { return kind == Kind::kPlainParameter || kind == Kind::kParameter; }

enum class Part : std::uint8_t { kSave, kUnpack, kEnd };

Options options_for(Kind kind) {
  Options options;
  options.policy = kind == Kind::kSmall ? minimum_size(1 << 20) : offload_everything();
  options.window_bytes = 1 << 20;
  options.stash_bytes = 1 << 20;
  return options;
}

// What is saved, with the nodes that a graph would keep alive.
struct Tensors {
  std::vector<at::Tensor> tensors;
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators;
};

Tensors make_tensors(Kind kind, std::int64_t count) {
  const at::Tensor leaf = at::zeros({4}).requires_grad_();
  Tensors made;
  for (std::int64_t i = 0; i < count; ++i) {
    if (is_parameter(kind)) {
      made.tensors.push_back(at::zeros({4}).requires_grad_());
      made.accumulators.push_back(torch::autograd::impl::grad_accumulator(made.tensors.back()));
    } else {
      made.tensors.push_back(leaf.neg());
    }
  }
  return made;
}

class Stopwatch {
 public:
  explicit Stopwatch(bool runs) : runs_(runs) {}
  [[nodiscard]] double seconds() const {
    return runs_ ? std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count() : 0;
  }

 private:
  const bool runs_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

void saves(benchmark::State& state, Kind kind, Part part) {
  const std::int64_t live = state.range(0);
  const Tensors made = make_tensors(kind, live);
  Offloader offloader(options_for(kind), std::make_shared<NullTier>());
  std::vector<SavedVariable> saved;
  saved.reserve(live);
  double total = 0;
  for (auto _ : state) {
    std::optional<OffloadGuard> guard;
    if (!is_plain(kind)) {
      guard.emplace(offloader);
    }
    double seconds = 0;
    {
      const Stopwatch watch(part == Part::kSave);
      for (const at::Tensor& tensor : made.tensors) {
        saved.emplace_back(tensor, /*is_output=*/false);
      }
      seconds += watch.seconds();
    }
    {
      const Stopwatch watch(part == Part::kUnpack);
      for (auto each = saved.rbegin(); each != saved.rend(); ++each) {
        benchmark::DoNotOptimize(each->unpack());
      }
      seconds += watch.seconds();
    }
    {
      const Stopwatch watch(part == Part::kEnd);
      saved.clear();
      seconds += watch.seconds();
    }
    state.SetIterationTime(seconds);
    total += seconds;
  }
  constexpr double kNanoseconds = 1e9;
  state.counters["ns_per_save"] = kNanoseconds * total / static_cast<double>(state.iterations() * live);
}

void all_sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->RangeMultiplier(100)->Range(100, 1'000'000)->UseManualTime()->Unit(benchmark::kMicrosecond);
}

BENCHMARK_CAPTURE(saves, plain_save, Kind::kPlain, Part::kSave)->Apply(all_sizes);
BENCHMARK_CAPTURE(saves, plain_unpack, Kind::kPlain, Part::kUnpack)->Apply(all_sizes);
BENCHMARK_CAPTURE(saves, plain_end, Kind::kPlain, Part::kEnd)->Apply(all_sizes);
BENCHMARK_CAPTURE(saves, plain_parameter_save, Kind::kPlainParameter, Part::kSave)->Apply(all_sizes);
BENCHMARK_CAPTURE(saves, plain_parameter_unpack, Kind::kPlainParameter, Part::kUnpack)->Apply(all_sizes);
BENCHMARK_CAPTURE(saves, plain_parameter_end, Kind::kPlainParameter, Part::kEnd)->Apply(all_sizes);
BENCHMARK_CAPTURE(saves, parameter_save, Kind::kParameter, Part::kSave)->Apply(all_sizes);
BENCHMARK_CAPTURE(saves, parameter_unpack, Kind::kParameter, Part::kUnpack)->Apply(all_sizes);
BENCHMARK_CAPTURE(saves, parameter_end, Kind::kParameter, Part::kEnd)->Apply(all_sizes);
BENCHMARK_CAPTURE(saves, small_save, Kind::kSmall, Part::kSave)->Apply(all_sizes);
BENCHMARK_CAPTURE(saves, small_unpack, Kind::kSmall, Part::kUnpack)->Apply(all_sizes);
BENCHMARK_CAPTURE(saves, small_end, Kind::kSmall, Part::kEnd)->Apply(all_sizes);
BENCHMARK_CAPTURE(saves, offloaded_save, Kind::kOffloaded, Part::kSave)->Apply(all_sizes);
BENCHMARK_CAPTURE(saves, offloaded_unpack, Kind::kOffloaded, Part::kUnpack)->Apply(all_sizes);
BENCHMARK_CAPTURE(saves, offloaded_end, Kind::kOffloaded, Part::kEnd)->Apply(all_sizes);

}  // namespace
}  // namespace ebb

BENCHMARK_MAIN();
