// Question: does anything grow, or stay behind, over a long run of steps?
//
// Steps of random sizes, some of them dropped or interrupted, run one after another under one Offloader. After each,
// the bytes that ebb holds on the device, those that the device's allocator has handed out and those leased from the
// pool must be what they were before. Over the second half of the run, the heap and RSS must not slope upwards.
//
// With --held, all steps are alike and something lives on beside them: the heap must not slope upwards either.
//
// Note [What is a leak]
// The heap's bytes in use are exact, but for a few KiB of caches that depend on the last sizes, so their slope says
// something after some thousand steps. RSS also has what glibc holds free between live blocks, which comes in steps of
// hundreds of KiB and then stays, so it takes a run in which such a step is small. Both are always shown; each is
// judged in runs that are long enough for it.
//
// With --managed, the order of uses is remembered, up to 131,072 of them (UseHistory), which takes 12,000 steps and
// 1.5 MiB of the heap: only the slope of a run of twice as many steps says something.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include "examples/common/device.h"
#include "test/soak/footprint.h"
#include "test/soak/held_graphs.h"
#include "test/soak/tiny_training.h"
#include "test/soak/trend.h"

namespace ebb {
namespace {

constexpr std::int64_t kCompareEvery = 64;  // shares no factor with the number of kinds, so all are compared
constexpr std::int64_t kWarmUpSteps = 4 * kCompareEvery;
constexpr double kStepsOfSlope = 100'000;
constexpr double kMostSlopeKib = 1024;
constexpr std::int64_t kStepsToJudgeHeap = 10'000;
constexpr std::int64_t kStepsToJudgeRss = 200'000;
constexpr double kKib = 1024;

struct SoakOptions {
  std::int64_t steps = 20'000;
  std::string held;  // empty: nothing is, and steps train
  bool managed = false;
  bool budget = false;
  bool plain = false;
  std::string device = "auto";
  std::uint64_t seed = 1;
};

// What must be the same after every step.
struct Boundary {
  std::uint64_t allocated = 0;
  std::uint64_t saved_on_device = 0;
  std::uint64_t leased = 0;

  bool operator==(const Boundary&) const = default;
};

class Soak {
 public:
  explicit Soak(const SoakOptions& options)
      : options_(options),
        device_(pick_device(options.device)),
        memory_(device_),
        training_(device_, options.seed, options.managed) {}

  int run() {
    for (std::int64_t i = 0; i < kWarmUpSteps; ++i) {  // LibTorch's own lazy allocations: workspaces, registries
      step(i);
    }
    baseline_ = boundary();
    baseline_.saved_on_device = 0;
    baseline_.leased = options_.managed ? baseline_.leased : 0;  // the weights' homes
    for (std::int64_t i = 0; i < options_.steps; ++i) {
      step(i);
      look(i);
    }
    return finish();
  }

 private:
  void step(std::int64_t i) {
    if (!training_.step(/*compare=*/i % kCompareEvery == 0)) {
      wrong(i, "its gradients are not those of plain autograd");
    }
  }

  Boundary boundary() {
    training_.offloader().drain();
    synchronize(device_);
    const Stats stats = training_.offloader().stats();
    return {memory_.now_bytes() - stats.managed_on_device.now_bytes, stats.saved_on_device.now_bytes,
            stats.pool.now_bytes};
  }

  void look(std::int64_t i) {
    const Boundary now = boundary();
    if (now != baseline_) {
      wrong(i, "allocated " + std::to_string(now.allocated) + " bytes for " + std::to_string(baseline_.allocated) +
                   ", saved on the device " + std::to_string(now.saved_on_device) + ", leased " +
                   std::to_string(now.leased));
    }
    const auto heap = static_cast<double>(heap_bytes());
    const auto resident = static_cast<double>(resident_bytes());
    if (i >= options_.steps / 2) {
      heap_.add(static_cast<double>(i), heap);
      resident_.add(static_cast<double>(i), resident);
    }
    const std::int64_t tenth = std::max<std::int64_t>(1, options_.steps / 10);
    if ((i + 1) % tenth == 0) {
      const Stats stats = training_.offloader().stats();
      std::printf("%lld steps: heap %.1f KiB, RSS %.1f KiB, allocated %.1f KiB, spilled %.1f MiB, pool %.1f KiB\n",
                  static_cast<long long>(i + 1), heap / kKib, resident / kKib,
                  static_cast<double>(now.allocated) / kKib, static_cast<double>(stats.offloaded.bytes) / kKib / kKib,
                  static_cast<double>(stats.pool.capacity_bytes) / kKib);
      std::fflush(stdout);
    }
  }

  void wrong(std::int64_t i, const std::string& what) {
    constexpr std::int64_t kMostPrinted = 20;
    if (++wrong_ <= kMostPrinted) {
      std::printf("WRONG after step %lld: %s\n", static_cast<long long>(i), what.c_str());
    }
  }

  int finish() {
    const double heap = heap_.slope() * kStepsOfSlope / kKib;
    const double resident = resident_.slope() * kStepsOfSlope / kKib;
    const bool judge_heap = options_.steps >= kStepsToJudgeHeap;
    const bool judge_rss = options_.steps >= kStepsToJudgeRss;
    std::printf("heap: %+.1f KiB, RSS: %+.1f KiB per 100,000 steps; judged: %s\n", heap, resident,
                judge_rss ? "both" : (judge_heap ? "the heap" : "neither, the run is too short"));
    const Stats stats = training_.offloader().stats();
    const bool moved = stats.offloaded.tensors > 0 && stats.fetched.tensors > 0;
    if (!moved) {
      std::printf("nothing went away and came back: this run shows nothing\n");
    }
    const double slope = judge_rss ? std::max(heap, resident) : heap;
    std::printf("soak: %lld steps, slope: %.1f KiB per 100,000 steps, wrong: %lld\n",
                static_cast<long long>(options_.steps), slope, static_cast<long long>(wrong_));
    return moved && wrong_ == 0 && (slope < kMostSlopeKib || !judge_heap) ? 0 : 1;
  }

  const SoakOptions options_;
  const c10::Device device_;
  const DeviceMemory memory_;  // before the weights, which it is to count
  TinyTraining training_;
  Boundary baseline_;
  Trend heap_;
  Trend resident_;
  std::int64_t wrong_ = 0;
};

// Steps beside something that is held. The heap has to be flat once as much is held as ever will be.
class HeldSoak {
 public:
  explicit HeldSoak(const SoakOptions& options)
      : options_(options),
        graphs_(pick_device(options.device), {held_names().at(options.held), options.budget, options.plain}) {}

  int run() {
    const auto start = std::chrono::steady_clock::now();
    for (std::int64_t i = 0; i < options_.steps; ++i) {
      graphs_.step();
      if (i >= options_.steps / 2) {
        heap_.add(static_cast<double>(i), static_cast<double>(heap_bytes()));
      }
      if ((i + 1) % std::max<std::int64_t>(1, options_.steps / 10) == 0) {
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        std::printf("%lld steps: heap %.1f KiB, RSS %.1f KiB, %.2f s\n", static_cast<long long>(i + 1),
                    static_cast<double>(heap_bytes()) / kKib, static_cast<double>(resident_bytes()) / kKib,
                    seconds.count());
        std::fflush(stdout);
      }
    }
    const bool released = graphs_.release();
    const bool moved = options_.plain || graphs_.offloader().stats().saved.tensors > 0;
    const double slope = heap_.slope() * kStepsOfSlope / kKib;
    const bool judged = options_.steps >= kStepsToJudgeHeap;
    std::printf("soak: %lld steps beside %s, slope: %.1f KiB per 100,000 steps%s, wrong: %d\n",
                static_cast<long long>(options_.steps), options_.held.c_str(), slope,
                judged ? "" : " (not judged: too short)", released ? 0 : 1);
    return released && moved && (slope < kMostSlopeKib || !judged) ? 0 : 1;
  }

 private:
  const SoakOptions options_;
  HeldGraphs graphs_;
  Trend heap_;
};

int parse_and_run(int argc, char** argv) {
  SoakOptions options;
  CLI::App app("Runs many tiny training steps under one Offloader and looks for what grows.", "soak");
  app.add_option("--steps", options.steps)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--device", options.device, "auto, cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--seed", options.seed)->capture_default_str();
  app.add_option("--held", options.held,
                 "What lives on meanwhile: one-save, many-graphs or one-graph; nothing if empty")
      ->check(CLI::IsMember(held_names()));
  app.add_flag("--managed", options.managed, "The offloader manages the weights, too")->excludes("--held");
  app.add_flag("--budget", options.budget, "Of held graphs: with the least memory as a budget")->needs("--held");
  app.add_flag("--plain", options.plain, "Of held graphs: without ebb, to see that LibTorch is flat")->needs("--held");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  keep_heap_compact();
  at::set_num_threads(1);  // the tensors are too small to share, and waking threads would take longer than the work
  use_deterministic_algorithms();
  return options.held.empty() ? Soak(options).run() : HeldSoak(options).run();
}

}  // namespace
}  // namespace ebb

int main(int argc, char** argv) {
  try {
    return ebb::parse_and_run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "soak: error: %s\n", error.what());
    return 1;
  }
}
