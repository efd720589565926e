// `live` saves are made, then unpacked in reverse, then destroyed; each row times one of the three.
//
// A million saves do not fit into the processor's caches. "_cold" times a hundred after all caches have been filled
// with other data: what is dearer than that with a million grows with their number; what is not waits for memory.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <benchmark/benchmark.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "bench/overhead/default_hooks.h"
#include "bench/overhead/null_tier.h"
#include "bench/overhead/rows.h"
#include "examples/common/device.h"
#include "offload/guard.h"
#include "offload/offloader.h"
#include "policy/policies.h"

namespace ebb {
namespace {

using torch::autograd::SavedVariable;

enum class Saved : std::uint8_t {
  kActivation,
  kParameter,  // a leaf that requires gradients
};

enum class With : std::uint8_t {
  kHooks,            // no offloader
  kNullTierPassing,  // the policy keeps it
  kNullTierMoving,
  kPinnedTierMoving,
};

struct Kind {
  const char* name;
  Saved saved;
  With with;
  DefaultHooks hooks = DefaultHooks::kNone;  // for kHooks
  std::int64_t floats = 4;                   // a tensor's
};

constexpr std::int64_t kMiBOfFloats = 1 << 18;

constexpr std::array kKinds{
    Kind{"plain", Saved::kActivation, With::kHooks},
    Kind{"plain_parameter", Saved::kParameter, With::kHooks},
    Kind{"idle_default_hook", Saved::kActivation, With::kHooks, DefaultHooks::kIdle},
    Kind{"idle_default_hook_parameter", Saved::kParameter, With::kHooks, DefaultHooks::kIdle},
    Kind{"least_hook", Saved::kActivation, With::kHooks, DefaultHooks::kLeast},
    Kind{"least_hook_parameter", Saved::kParameter, With::kHooks, DefaultHooks::kLeast},
    Kind{"small", Saved::kActivation, With::kNullTierPassing},
    Kind{"parameter", Saved::kParameter, With::kNullTierPassing},
    Kind{"null_tier", Saved::kActivation, With::kNullTierMoving},
    Kind{"pinned_tier_16B", Saved::kActivation, With::kPinnedTierMoving},
    Kind{"pinned_tier_1MiB", Saved::kActivation, With::kPinnedTierMoving, DefaultHooks::kNone, kMiBOfFloats},
};

bool moves(const Kind& kind) { return kind.with == With::kNullTierMoving || kind.with == With::kPinnedTierMoving; }
bool needs_gpu(const Kind& kind) { return kind.with == With::kPinnedTierMoving; }
c10::Device device_of(const Kind& kind) { return needs_gpu(kind) ? kGpu : c10::Device(c10::kCPU); }

enum class Part : std::uint8_t { kSave, kUnpack, kEnd };

std::unique_ptr<Offloader> make_offloader(const Kind& kind) {
  Options options;
  options.policy = moves(kind) ? offload_everything() : minimum_size(1 << 20);
  options.stash_bytes = 1 << 30;  // no stream waits for room
  options.window_bytes = 1 << 30;
  if (!needs_gpu(kind)) {
    return std::make_unique<Offloader>(options, std::make_shared<NullTier>());
  }
  options.device = kGpu;
  return std::make_unique<Offloader>(options);
}

// What is saved, with the nodes that a graph would keep alive.
struct Tensors {
  std::vector<at::Tensor> tensors;
  std::vector<torch::autograd::Edge> accumulators;
};

Tensors make_tensors(const Kind& kind, std::int64_t count) {
  const at::TensorOptions options = at::TensorOptions().device(device_of(kind));
  const at::Tensor leaf = at::zeros({kind.floats}, options).requires_grad_();
  Tensors made;
  for (std::int64_t i = 0; i < count; ++i) {
    if (kind.saved == Saved::kParameter) {
      made.tensors.push_back(at::zeros({kind.floats}, options).requires_grad_());
      made.accumulators.push_back(torch::autograd::impl::gradient_edge(made.tensors.back()));
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

// Saves, unpacks in reverse, and ends, over and over.
class Passes {
 public:
  Passes(const Kind& kind, std::int64_t live, Caches caches)
      : kind_(kind), live_(live), caches_(caches), offloader_(make_offloader(kind)) {
    saved_.reserve(live);
  }

  // The seconds of one part of one pass.
  double run(Part part) {
    if (made_.tensors.empty()) {
      made_ = make_tensors(kind_, live_);
    }
    std::optional<DefaultHooksInForce> hooks;
    std::optional<OffloadGuard> guard;
    if (kind_.with == With::kHooks) {
      hooks.emplace(kind_.hooks);
    } else {
      guard.emplace(*offloader_);
    }
    double seconds = 0;
    prepare(part == Part::kSave);
    {
      const Stopwatch watch(part == Part::kSave);
      for (const at::Tensor& tensor : made_.tensors) {
        saved_.emplace_back(tensor, /*is_output=*/false);
      }
      seconds += watch.seconds();
    }
    if (moves(kind_)) {  // else nothing would have to be brought back
      made_ = {};
      offloader_->drain();
    }
    prepare(part == Part::kUnpack);
    {
      const Stopwatch watch(part == Part::kUnpack);
      for (auto each = saved_.rbegin(); each != saved_.rend(); ++each) {
        benchmark::DoNotOptimize(each->unpack());
      }
      seconds += watch.seconds();
    }
    prepare(part == Part::kEnd);
    {
      const Stopwatch watch(part == Part::kEnd);
      saved_.clear();
      seconds += watch.seconds();
    }
    return seconds;
  }

  // Every storage that was offloaded came back by a copy.
  [[nodiscard]] bool restored() const {
    const Stats stats = offloader_->stats();
    return stats.fetched.tensors == stats.offloaded.tensors && stats.reused.tensors == 0 &&
           (stats.offloaded.tensors > 0) == moves(kind_);
  }

 private:
  // A device that still works could hold up the host, whose next call then waits for room in a queue.
  void prepare(bool timed) const {
    synchronize(device_of(kind_));
    if (timed && caches_ == Caches::kCold) {
      cool_caches();
    }
  }

  const Kind kind_;
  const std::int64_t live_;
  const Caches caches_;
  const std::unique_ptr<Offloader> offloader_;  // where it is not used, its engine is there all the same
  Tensors made_;
  std::vector<SavedVariable> saved_;
};

void run_saves(benchmark::State& state, const Kind& kind, Part part, Caches caches) {
  const std::int64_t live = state.range(0);
  Passes passes(kind, live, caches);
  passes.run(part);  // pools and tables grow
  double total = 0;
  for (auto _ : state) {
    const double seconds = passes.run(part);
    state.SetIterationTime(seconds);
    total += seconds;
  }
  state.counters["ns_per_save"] = kNanoseconds * total / static_cast<double>(state.iterations() * live);
  if (!passes.restored()) {
    state.SkipWithError("not every offloaded storage came back by a copy, or what was to pass did not");
  }
}

struct Timed {
  const char* name;
  Part part;
};

void register_part(const Kind& kind, const Timed& part) {
  const std::string name = std::string(kind.name) + "_" + part.name;
  const auto run = [kind, part = part.part](Caches caches) {
    return [kind, part, caches](benchmark::State& state) { run_saves(state, kind, part, caches); };
  };
  benchmark::RegisterBenchmark(name.c_str(), run(Caches::kWarm))->Arg(100)->UseManualTime();
  benchmark::RegisterBenchmark((name + "_cold").c_str(), run(Caches::kCold))->Arg(100)->Iterations(30)->UseManualTime();
  if (needs_gpu(kind)) {  // more copies than the device's queues take would have the host wait
    return;
  }
  benchmark::RegisterBenchmark(name.c_str(), run(Caches::kWarm))->Arg(10'000)->UseManualTime();
  // Only a part of each pass is timed, so time alone would have it repeat this for minutes.
  benchmark::RegisterBenchmark(name.c_str(), run(Caches::kWarm))->Arg(1'000'000)->Iterations(1)->UseManualTime();
}

}  // namespace

void register_saves() {
  constexpr std::array kParts{Timed{"save", Part::kSave}, Timed{"unpack", Part::kUnpack}, Timed{"end", Part::kEnd}};
  for (const Kind& kind : kKinds) {
    if (needs_gpu(kind) && !has_gpu()) {
      skip_without_gpu(kind.name);
      continue;
    }
    for (const Timed& part : kParts) {
      register_part(kind, part);
    }
  }
}

}  // namespace ebb
