// What an offloader says of itself at its end.

#include "offload/accounts/summary.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>

#include "policy/policies.h"
#include "test/offload/parity.h"
#include "test/offload/plans/planning_rig.h"
#include "test/offload/printed.h"

namespace ebb {
namespace {

using Catch::Contains;

constexpr std::uint64_t kMiB = 1 << 20;

// Saved tensors that took so much of 100 MiB, in steps of which each moved so much.
Stats with(std::uint64_t peak_mib, std::uint64_t moved_mib, std::uint64_t steps = kEnoughSteps) {
  Stats stats;
  stats.steps = steps;
  stats.saved_on_device.peak_bytes = peak_mib * kMiB;
  stats.saved_if_kept.peak_bytes = 100 * kMiB;
  stats.offloaded = {steps, steps * moved_mib * kMiB};
  stats.stalled_ms = 12.34;
  return stats;
}

TEST_CASE("a summary has the peak, what it would have been, what moved, and what was waited for") {
  Stats stats = with(25, 60);
  stats.recomputed = {1, 7 * kMiB};
  const std::string text = summary(stats);
  CHECK_THAT(text, Contains("3 steps") && Contains("25.0 MiB") && Contains("100.0 MiB") && Contains("-75 %"));
  CHECK_THAT(text, Contains("180.0 MiB were offloaded") && Contains("7.0 MiB recomputed") && Contains("12.3 ms"));
  CHECK_THAT(text, !Contains("\n"));
}

TEST_CASE("where no policy was asked a summary counts no steps") {
  Stats stats;
  CHECK_THAT(summary(stats), Contains("nothing") && !Contains("steps"));
  stats.saved = {3, 5 * kMiB};
  stats.saved_on_device.peak_bytes = 5 * kMiB;
  CHECK_THAT(summary(stats), Contains("5.0 MiB") && Contains("none was one that may leave") && !Contains("steps"));
}

TEST_CASE("where nothing left the device a summary says so") {
  CHECK_THAT(summary(with(100, 0)), Contains("100.0 MiB") && Contains("none left"));
}

TEST_CASE("a summary has what was on the device of managed tensors, and what was fetched in time and late") {
  Stats stats;
  stats.managed_on_device.peak_bytes = 3 * kMiB;
  stats.managed_prefetched = {4, 40 * kMiB};
  stats.managed_fetched_late = {1, 2 * kMiB};
  CHECK_THAT(summary(stats), Contains("managed tensors took at most 3.0 MiB"));
  CHECK_THAT(summary(stats), Contains("42.0 MiB were fetched") && Contains("2.0 MiB of them late"));
  CHECK_THAT(summary(with(25, 60)), !Contains("managed"));
}

TEST_CASE(
    "a peak within a few percent of what it would have been is warned of, if much has moved and steps were enough") {
  CHECK(warnings(with(96, 60), {}).size() == 1);
  CHECK(warnings(with(120, 60), {}).size() == 1);
  CHECK_THAT(warnings(with(96, 60), {}).front(), Contains("96.0 MiB") && Contains("100.0 MiB"));
  CHECK(warnings(with(90, 60), {}).empty());
  CHECK(warnings(with(96, 1), {}).empty());
  CHECK(warnings(with(96, 60, kEnoughSteps - 1), {}).empty());
}

TEST_CASE("a policy that has matched nothing is warned of by its name") {
  const Stats stats = with(25, 60);
  const std::vector<std::string> found = warnings(stats, {{"recompute", 5, 1}, {"except_operations", 7, 0}});
  REQUIRE(found.size() == 1);
  CHECK_THAT(found.front(), Contains("except_operations") && Contains("7") && !Contains("recompute"));
  CHECK(warnings(with(25, 60, kEnoughSteps - 1), {{"recompute", 5, 0}}).empty());
}

constexpr std::int64_t kRows = 64;
constexpr std::uint64_t kActivation = kRows * kRows * sizeof(float);

at::Tensor chain(Inputs& in) {
  at::Tensor x = in.activation({kRows, kRows});
  for (int i = 0; i < 6; ++i) {
    x = at::silu(x.matmul(in.leaf({kRows, kRows}))).sin();
  }
  return x + in.activation({8}).exp().sum();
}

// Its only storage is wanted as soon as backward begins.
at::Tensor one_save(Inputs& in) { return in.activation({kRows, kRows}).exp(); }

TEST_CASE_METHOD(NoLeak, "what saved tensors would have taken is what they take when all stay") {
  Setting keeping = late();
  keeping.options.policy = keep_everything(/*least_bytes=*/kActivation);
  Rig kept(keeping);
  const std::uint64_t peak = counted(kept, chain).saved_on_device.peak_bytes;
  CHECK(peak > 10 * kActivation);
  CHECK(kept.stats().saved_if_kept.peak_bytes == peak);
  Setting moving = late_without_stash();
  moving.options.policy = minimum_size(kActivation);
  Setting dropping = moving;
  dropping.options.policy = minimum_size(kActivation, recompute(Recompute::kComputeBound));
  for (const Setting& setting : {moving, dropping}) {
    Rig rig(setting);
    const Stats stats = counted(rig, chain);
    CHECK(stats.saved_if_kept.peak_bytes == peak);
    CHECK(stats.saved_on_device.peak_bytes < peak);
    CHECK(rig.stats().saved_if_kept.now_bytes == 0);
    rig.offloader().reset_stats();
    CHECK(rig.stats().saved_if_kept.peak_bytes == 0);
  }
}

// What an offloader prints from when it is made until it has ended, after so many steps.
std::string printed_by(const Setting& setting, const Forward& forward, std::uint64_t steps) {
  Printed printed;
  {
    Rig rig(setting);
    for (std::uint64_t step = 0; step < steps; ++step) {
      (void)counted(rig, forward);
    }
  }
  return printed.take();
}

std::ptrdiff_t lines(const std::string& text) { return std::ranges::count(text, '\n'); }

TEST_CASE_METHOD(NoLeak, "an offloader says at its end what came of it, once there were enough steps") {
  const Setting setting = late_without_stash();
  CHECK(printed_by(setting, chain, 0).empty());
  CHECK(printed_by(setting, chain, kEnoughSteps - 1).empty());
  const std::string text = printed_by(setting, chain, kEnoughSteps);
  CHECK_THAT(text, Contains("in 3 steps") && Contains("[info]") && !Contains("[warning]"));
  CHECK(lines(text) == 1);
}

TEST_CASE_METHOD(NoLeak, "an offloader that has moved for nothing warns of it once") {
  const std::string text = printed_by(late_without_stash(), one_save, kEnoughSteps);
  CHECK_THAT(text, Contains("[warning]") && Contains("for nothing"));
  CHECK(lines(text) == 2);
}

TEST_CASE_METHOD(NoLeak, "a policy that matched nothing is warned of once, and one that matched is not") {
  Setting setting = late_without_stash();
  setting.options.policy = recompute(Recompute::kMemoryBound, except_operations({"NoSuchBackward0"}));
  const std::string text = printed_by(setting, chain, kEnoughSteps);
  CHECK_THAT(text, Contains("except_operations matched none") && !Contains("recompute matched"));
  CHECK(lines(text) == 2);
}

TEST_CASE_METHOD(NoLeak, "a plan is not warned of, whose first steps move all though the budget lets all stay") {
  Printed printed;
  {
    Rig rig(planned(DeviceBytes{kUnlimited}));
    for (std::uint64_t step = 0; step < kEnoughSteps; ++step) {
      train_step(&rig.offloader());
    }
  }
  const std::string text = printed.take();
  CHECK_THAT(text, Contains("in 3 steps") && !Contains("[warning]"));
  CHECK(lines(text) == 1);
}

TEST_CASE_METHOD(NoLeak, "Offloader::summary is the line of its end, and one that is switched off says so") {
  Rig rig(late_without_stash());
  (void)counted(rig, chain);
  CHECK(rig.offloader().summary() == summary(rig.stats()));
  Options off;
  off.enabled = false;
  CHECK_THAT(Offloader(off).summary(), Contains("switched off"));
}

TEST_CASE_METHOD(NoLeak, "statistics are printed as a table") {
  Rig rig(late_without_stash());
  const Stats stats = counted(rig, chain);
  std::ostringstream out;
  out << stats;
  const auto line_of = [&](const std::string& name) {
    const auto at = out.str().find("\n" + name + "  ");
    REQUIRE(at != std::string::npos);
    return out.str().substr(at + 1, out.str().find('\n', at + 1) - at - 1);
  };
  CHECK_THAT(out.str(), Catch::StartsWith("in 1 steps"));
  CHECK_THAT(line_of("  offloaded"), Contains(" " + std::to_string(stats.offloaded.tensors) + " "));
  CHECK_THAT(line_of("  kept: parameter"), Contains("KiB"));
  CHECK_THAT(line_of("saved on the device"), Contains("0 B") && Contains("KiB"));
  CHECK_THAT(line_of("  if all had stayed"), Contains("0 B") && Contains("KiB"));
  CHECK_THAT(out.str(), Contains("waited " + std::to_string(stats.stalls) + " times"));
  CHECK_THAT(out.str(), !Contains("kept: no room") && Catch::EndsWith("\n"));
}

}  // namespace
}  // namespace ebb
