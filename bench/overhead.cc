// Question: what does one save cost the host on top of LibTorch's own work, passed through, offloaded and restored, and
// does that grow with the number of saves that are alive?
//
// A save is a torch::autograd::SavedVariable, made and unpacked as a node makes and unpacks it. Copies go to a tier
// that does nothing, so what is timed is ebb's own: hooks, policy, pool, order, statistics. `live` saves are made, then
// unpacked in reverse, then destroyed; each benchmark times one of the three and reports nanoseconds a save.
//
// A million saves do not fit into the processor's caches. "_cold" times a hundred after all caches have been filled
// with other data: what is dearer than that with a million grows with their number; what is not waits for memory.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <benchmark/benchmark.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
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
  kIdleHook,        // no offloader, but a hook that keeps what it gets: what any hook costs
  kParameter,       // such a leaf is passed through
  kSmall,           // kept by the policy
  kOffloaded,
};

bool is_plain(Kind kind) { return kind == Kind::kPlain || kind == Kind::kPlainParameter || kind == Kind::kIdleHook; }
bool is_parameter(Kind kind) { return kind == Kind::kPlainParameter || kind == Kind::kParameter; }

enum class Part : std::uint8_t { kSave, kUnpack, kEnd };

class IdleHook final : public torch::autograd::SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override { saved_ = tensor; }
  at::Tensor call_unpack_hook() override { return saved_; }

 private:
  at::Tensor saved_;
};

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

enum class Caches : bool { kWarm, kCold };

// Fills the processor's caches with other data.
void cool_caches() {
  static std::vector<char> other = [] {
    std::int64_t largest = 0;
    for (const benchmark::CPUInfo::CacheInfo& cache : benchmark::CPUInfo::Get().caches) {
      largest = std::max<std::int64_t>(largest, cache.size);
    }
    return std::vector<char>(2 * largest + 1);
  }();
  constexpr std::size_t kLine = 64;
  for (std::size_t i = 0; i < other.size(); i += kLine) {
    ++other[i];
  }
  benchmark::ClobberMemory();
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

// Saves, unpacks in reverse, and ends, over and over.
class Passes {
 public:
  Passes(Kind kind, std::int64_t live, Caches caches)
      : kind_(kind), live_(live), caches_(caches), offloader_(options_for(kind), std::make_shared<NullTier>()) {
    saved_.reserve(live);
  }

  // The seconds of one part of one pass.
  double run(Part part) {
    if (made_.tensors.empty()) {
      made_ = make_tensors(kind_, live_);
    }
    std::optional<OffloadGuard> guard;
    if (!is_plain(kind_)) {
      guard.emplace(offloader_);
    }
    double seconds = 0;
    prepare_caches(part == Part::kSave);
    {
      const Stopwatch watch(part == Part::kSave);
      for (const at::Tensor& tensor : made_.tensors) {
        SavedVariable& saved = saved_.emplace_back(tensor, /*is_output=*/false);
        if (kind_ == Kind::kIdleHook) {
          saved.register_hooks(std::make_unique<IdleHook>());
        }
      }
      seconds += watch.seconds();
    }
    if (kind_ == Kind::kOffloaded) {  // else nothing would have to be brought back
      made_ = {};
      offloader_.drain();
    }
    prepare_caches(part == Part::kUnpack);
    {
      const Stopwatch watch(part == Part::kUnpack);
      for (auto each = saved_.rbegin(); each != saved_.rend(); ++each) {
        benchmark::DoNotOptimize(each->unpack());
      }
      seconds += watch.seconds();
    }
    prepare_caches(part == Part::kEnd);
    {
      const Stopwatch watch(part == Part::kEnd);
      saved_.clear();
      seconds += watch.seconds();
    }
    return seconds;
  }

  // Every storage that was offloaded came back by a copy.
  [[nodiscard]] bool restored() const {
    const Stats stats = offloader_.stats();
    return stats.fetched.tensors == stats.offloaded.tensors && stats.reused.tensors == 0;
  }

 private:
  void prepare_caches(bool timed) const {
    if (timed && caches_ == Caches::kCold) {
      cool_caches();
    }
  }

  const Kind kind_;
  const std::int64_t live_;
  const Caches caches_;
  Offloader offloader_;
  Tensors made_;
  std::vector<SavedVariable> saved_;
};

void saves(benchmark::State& state, Kind kind, Part part, Caches caches) {
  const std::int64_t live = state.range(0);
  Passes passes(kind, live, caches);
  passes.run(part);  // pools and tables grow
  double total = 0;
  for (auto _ : state) {
    const double seconds = passes.run(part);
    state.SetIterationTime(seconds);
    total += seconds;
  }
  constexpr double kNanoseconds = 1e9;
  state.counters["ns_per_save"] = kNanoseconds * total / static_cast<double>(state.iterations() * live);
  if (!passes.restored()) {
    state.SkipWithError("not every offloaded storage came back by a copy");
  }
}

struct Named {
  const char* name;
  Kind kind;
};
struct Timed {
  const char* name;
  Part part;
};

void register_all() {
  constexpr std::array kKinds{Named{"plain", Kind::kPlain},        Named{"plain_parameter", Kind::kPlainParameter},
                              Named{"idle_hook", Kind::kIdleHook}, Named{"parameter", Kind::kParameter},
                              Named{"small", Kind::kSmall},        Named{"offloaded", Kind::kOffloaded}};
  constexpr std::array kParts{Timed{"save", Part::kSave}, Timed{"unpack", Part::kUnpack}, Timed{"end", Part::kEnd}};
  for (const Named& kind : kKinds) {
    for (const Timed& part : kParts) {
      const std::string name = std::string(kind.name) + "_" + part.name;
      const auto run = [kind = kind.kind, part = part.part](benchmark::State& state) {
        saves(state, kind, part, Caches::kWarm);
      };
      const auto run_cold = [kind = kind.kind, part = part.part](benchmark::State& state) {
        saves(state, kind, part, Caches::kCold);
      };
      benchmark::RegisterBenchmark(name.c_str(), run)->Arg(100)->Arg(10'000)->UseManualTime();
      // Only a part of each pass is timed, so time alone would have it repeat this for minutes.
      benchmark::RegisterBenchmark(name.c_str(), run)->Arg(1'000'000)->Iterations(1)->UseManualTime();
      benchmark::RegisterBenchmark((name + "_cold").c_str(), run_cold)->Arg(100)->Iterations(30)->UseManualTime();
    }
  }
}

}  // namespace
}  // namespace ebb

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 1;
  }
  ebb::register_all();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
