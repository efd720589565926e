// As many graphs as a row says stay alive, each of a tiny step that has gone backward with retain_graph: what
// meta-learning and unrolled optimizers do. Then a save, an unpack and a whole such step are timed, again and again.
// The first save of a row's step begins a new step of ebb's, so each of the ten that are timed together pays a tenth of
// that.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <benchmark/benchmark.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "bench/common/percentile.h"
#include "bench/overhead/default_hooks.h"
#include "bench/overhead/null_tier.h"
#include "bench/overhead/rows.h"
#include "offload/guard.h"
#include "offload/offloader.h"
#include "policy/policies.h"

namespace ebb {
namespace {

using torch::autograd::SavedVariable;

enum class Under : std::uint8_t { kPlainAutograd, kGuard };

constexpr int kSaves = 10;
constexpr int kSamples = 300;
constexpr double kMostSeconds = 60;  // that the graphs may take to build; linear in their number it is a few

class LiveGraphs {
 public:
  explicit LiveGraphs(Under under) {
    Options options;
    options.policy = offload_everything();
    offloader_.emplace(options, std::make_shared<NullTier>());
    if (under == Under::kPlainAutograd) {
      plain_.emplace(DefaultHooks::kNone);
    }
  }

  // How many there were in the end: fewer than asked for where they took too long.
  std::int64_t build(std::int64_t count) {
    const Stopwatch watch;
    losses_.reserve(count);
    while (std::ssize(losses_) < count && watch.seconds() < kMostSeconds) {
      losses_.push_back(step(/*retain_graph=*/true));
    }
    return std::ssize(losses_);
  }

  struct Seconds {
    double save;
    double unpack;
    double step;
  };

  Seconds measure() {
    Seconds seconds{};
    const at::Tensor saved = leaf_.neg();
    {
      std::optional<OffloadGuard> guard;
      enter(guard);
      std::vector<SavedVariable> saves;
      saves.reserve(kSaves);
      const Stopwatch saving;
      for (int i = 0; i < kSaves; ++i) {
        saves.emplace_back(saved, /*is_output=*/false);
      }
      seconds.save = saving.seconds() / kSaves;
      const Stopwatch unpacking;
      for (const SavedVariable& each : saves) {
        benchmark::DoNotOptimize(each.unpack());
      }
      seconds.unpack = unpacking.seconds() / kSaves;
    }
    const Stopwatch stepping;
    step(/*retain_graph=*/false);
    seconds.step = stepping.seconds();
    return seconds;
  }

 private:
  void enter(std::optional<OffloadGuard>& guard) {
    if (!plain_) {
      guard.emplace(*offloader_);
    }
  }

  at::Tensor step(bool retain_graph) {
    std::optional<OffloadGuard> guard;
    enter(guard);
    at::Tensor loss = leaf_.neg().sin().cos().sum();
    torch::autograd::grad({loss}, {leaf_}, /*grad_outputs=*/{}, retain_graph);
    return loss;
  }

  std::optional<Offloader> offloader_;  // older than `plain_`, which needs its engine to be there
  std::optional<DefaultHooksInForce> plain_;
  const at::Tensor leaf_ = at::ones({4}).requires_grad_();
  std::vector<at::Tensor> losses_;
};

void run(benchmark::State& state, Under under) {
  const std::int64_t wanted = state.range(0);
  LiveGraphs graphs(under);
  const std::int64_t built = graphs.build(wanted);
  if (built < wanted) {
    const std::string error = "each step costs more the more graphs are alive: only " + std::to_string(built) +
                              " could be built in " + std::to_string(static_cast<int>(kMostSeconds)) + " s";
    state.SkipWithError(error.c_str());
    return;
  }
  graphs.measure();
  std::vector<double> save;
  std::vector<double> unpack;
  std::vector<double> step;
  for (auto _ : state) {
    const LiveGraphs::Seconds seconds = graphs.measure();
    state.SetIterationTime(seconds.step);
    save.push_back(kNanoseconds * seconds.save);
    unpack.push_back(kNanoseconds * seconds.unpack);
    step.push_back(kNanoseconds * seconds.step);
  }
  state.counters["ns_per_save"] = percentile(save, 0.5);
  state.counters["ns_per_unpack"] = percentile(unpack, 0.5);
  state.counters["ns_per_step"] = percentile(step, 0.5);
}

}  // namespace

void register_live_graphs() {
  struct Named {
    const char* name;
    Under under;
  };
  constexpr std::array kRows{Named{"live_graphs_plain", Under::kPlainAutograd},
                             Named{"live_graphs_null_tier", Under::kGuard}};
  for (const Named& row : kRows) {
    auto* const registered =
        benchmark::RegisterBenchmark(row.name, [under = row.under](benchmark::State& state) { run(state, under); });
    for (const std::int64_t graphs : {0, 100, 1'000, 10'000, 100'000}) {
      registered->Arg(graphs);
    }
    registered->Iterations(kSamples)->UseManualTime();  // so that graphs are built once
  }
}

}  // namespace ebb
