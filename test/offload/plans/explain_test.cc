#include "offload/plans/explain.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <catch2/catch.hpp>

#include "test/offload/plans/planning_rig.h"

namespace ebb {
namespace {

using Catch::Contains;

// What becomes of storages of 1 MiB: one that something else keeps alive, one that stays, two that move, of which one
// could be recomputed, and two that are recomputed, in one run.
std::string explanation(const Goal& goal, bool fits) {
  constexpr std::uint64_t kBytes = 1 << 20;
  const StorageRecord record{.bytes = kBytes};
  StorageRecord alive = record;
  alive.bytes = 0;
  StorageRecord with_recipe = record;
  with_recipe.recompute = Recompute::kMemoryBound;
  with_recipe.recompute_ms = 6;
  StorageRecord first = with_recipe;
  first.made_with = 5;
  StorageRecord second = with_recipe;
  second.made_with = 4;
  Plan plan;
  plan.decisions = {Decision::kKeep,    Decision::kKeep,      Decision::kOffload,
                    Decision::kOffload, Decision::kRecompute, Decision::kRecompute};
  StepPlanner::Known known;
  known.signature = {{kBytes, "Alive"}, {kBytes, "Stays"}, {kBytes, "Moves"},
                     {kBytes, "Dear"},  {kBytes, "Again"}, {kBytes, "Together"}};
  known.record.storages = {alive, record, record, with_recipe, first, second};
  known.plan = std::make_shared<const Plan>(std::move(plan));
  PlanReport report;
  report.fits = fits;
  return explain_plan(known, goal, report);
}

TEST_CASE("a plan's table ends with what managed storages take") {
  ManagedShare share;
  share.device_bytes = 6 << 20;
  share.traffic.in[0].bytes = 1 << 20;
  share.traffic.in[2].bytes = 4 << 20;
  share.traffic.out[1].bytes = 2 << 20;
  StepPlanner::Known known;
  known.plan = std::make_shared<const Plan>();
  PlanReport report;
  report.fits = true;
  CHECK_THAT(explain_plan(known, DeviceBytes{1}, report), !Contains("managed"));
  report.managed = share;
  CHECK_THAT(explain_plan(known, DeviceBytes{1}, report),
             Contains("managed: at most 6.0 MiB on the device; 5.0 MiB in and 2.0 MiB out"));
}

std::string line_of(const std::string& text, const std::string& operation) {
  const auto at = text.find("\n" + operation + " ");
  REQUIRE(at != std::string::npos);
  return text.substr(at + 1, text.find('\n', at + 1) - at - 1);
}

TEST_CASE("a plan's table says why each storage stays, moves or is recomputed") {
  const std::string text = explanation(DeviceBytes{1}, true);
  CHECK_THAT(line_of(text, "Alive"), Contains("keep") && Contains("something else keeps it"));
  CHECK_THAT(line_of(text, "Stays"), Contains("keep") && Contains("fits without moving it"));
  CHECK_THAT(line_of(text, "Moves"), Contains("offload") && Contains("no way to recompute it"));
  CHECK_THAT(line_of(text, "Dear"), Contains("offload") && Contains("less than recomputing"));
  CHECK_THAT(line_of(text, "Again"), Contains("recompute") && Contains("less than copying") && Contains(" 3.0 ms"));
  CHECK_THAT(line_of(text, "Together"), Contains("recompute") && Contains(" 3.0 ms"));  // the run's 6 ms, shared
  CHECK_THAT(text, !Contains("over the budget"));
}

TEST_CASE("where there is no budget to meet, or it is not met, what stays does so for want of something") {
  const std::string unmet = explanation(DeviceBytes{1}, false);
  CHECK_THAT(line_of(unmet, "Stays"), Contains("no gain, time or host room"));
  CHECK_THAT(unmet, Contains("over the budget"));
  CHECK_THAT(line_of(explanation(Slowdown{0.1}, true), "Stays"), Contains("no gain, time or host room"));
  CHECK_THAT(line_of(explanation(LeastMemory{}, true), "Stays"), Contains("no gain, time or host room"));
}

std::string time_line(const PlanReport& report) {
  StepPlanner::Known known;
  known.plan = std::make_shared<const Plan>();
  const std::string text = explain_plan(known, LeastMemory{}, report);
  return text.substr(text.find("time: "));
}

TEST_CASE("a predicted time that was off by more than a tenth, or is not checked yet on a CPU, is not to be trusted") {
  PlanReport report;
  report.predicted.step_ms = 400;
  CHECK_THAT(time_line(report), Contains("not known yet") && !Contains("trusted"));
  report.on_cpu = true;
  CHECK_THAT(time_line(report), Contains("on a CPU") && Contains("not to be trusted before"));
  for (const double ms : {488.0, 320.0}) {
    report.actual = StepCost{ms, 1};
    CHECK_THAT(time_line(report), Contains(ms > 400 ? "+22 %" : "-20 %") && Contains("not to be trusted"));
  }
  for (const double ms : {439.0, 361.0}) {
    report.actual = StepCost{ms, 1};
    CHECK_THAT(time_line(report), !Contains("trusted"));
  }
}

TEST_CASE("a plan that was made without a meter says that its peaks are of saved tensors only") {
  StepPlanner::Known known;
  known.plan = std::make_shared<const Plan>();
  PlanReport report;
  report.predicted.peak_bytes = 3 << 20;
  report.actual = StepCost{1, 2 << 20};
  const std::string text = explain_plan(known, LeastMemory{}, report);
  CHECK_THAT(text, Contains("predicted 3.0 MiB") && Contains("actual 2.0 MiB") && Contains("saved tensors only"));
  report.metered = true;
  CHECK_THAT(explain_plan(known, LeastMemory{}, report), !Contains("saved tensors only"));
}

TEST_CASE_METHOD(NoLeak, "a plan is explained by operation") {
  MeteredDevice device;
  Rig rig(planned(DeviceBytes{between(device, 0.5)}, &device));
  CHECK_THAT(rig.offloader().explain(), Contains("no plan yet") && Contains("at least 16.0 KiB"));
  for (int step = 0; step < kUntilSettled; ++step) {
    train_step(&rig.offloader());
  }
  const std::string text = rig.offloader().explain();
  CHECK_THAT(text, Contains("SiluBackward0") && Contains("MmBackward0") && Contains("at most"));
  CHECK_THAT(text, Contains("offload") || Contains("recompute"));
  CHECK_THAT(text, Contains("peak: predicted") && !Contains("not known"));
}

}  // namespace
}  // namespace ebb
