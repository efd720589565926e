#include "offload/plans/explain.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include <fmt/format.h>

#include "offload/base/human_bytes.h"

namespace ebb {
namespace {

struct Row {
  std::string_view operation;
  Decision decision = Decision::kKeep;
  std::string_view why;
  std::size_t storages = 0;
  std::uint64_t bytes = 0;
  double recompute_ms = 0;
};

// The reason for a decision. `met`: whether the plan meets a budget in bytes.
std::string_view why(const StorageRecord& storage, Decision decision, bool met) {
  switch (decision) {
    case Decision::kKeep:
      return storage.bytes == 0 ? "something else keeps it"
             : met              ? "fits without moving it"
                                : "no gain, time or host room";
    case Decision::kOffload:
      return storage.recompute == Recompute::kNo ? "no way to recompute it" : "less than recomputing";
    case Decision::kRecompute:
      break;
  }
  return "less than copying";
}

// One row for each operation, decision and reason, the row with the most bytes first.
std::vector<Row> rows_of(const StepPlanner::Known& known, bool met) {
  std::map<std::tuple<std::string_view, Decision, std::string_view>, Row> found;
  const std::vector<bool> nowhere = not_held(known.record, known.plan->decisions);
  for (std::size_t i = 0; i < known.signature.size(); ++i) {
    if (!nowhere.empty() && nowhere[i]) {
      continue;
    }
    const StorageRecord& storage = known.record.storages[i];
    const Decision decision = known.plan->decisions[i];
    const std::string_view name = known.signature[i].operation;
    Row& row = found[{name, decision, why(storage, decision, met)}];
    ++row.storages;
    row.bytes += known.signature[i].bytes;
    std::size_t together = 0;  // dropped ones that one run makes
    for_each_made_with(known.record, static_cast<std::uint32_t>(i), [&](std::uint32_t made) {
      together += known.plan->decisions[made] == Decision::kRecompute ? 1 : 0;
    });
    row.recompute_ms += together == 0 ? 0 : storage.recompute_ms / static_cast<double>(together);
  }
  std::vector<Row> rows;
  for (auto& [key, row] : found) {
    std::tie(row.operation, row.decision, row.why) = key;
    row.operation = row.operation.empty() ? "no grad_fn" : row.operation;
    rows.push_back(row);
  }
  std::ranges::stable_sort(rows, std::greater{}, &Row::bytes);
  return rows;
}

// The decision, and what it costs.
std::pair<const char*, std::string> cost(const Row& row, const LinkRates& rates) {
  switch (row.decision) {
    case Decision::kKeep:
      return {"keep", "-"};
    case Decision::kOffload:
      return {"offload", fmt::format("link {:.1f} + {:.1f} ms", rates.out_ms(row.bytes, 0), rates.in_ms(row.bytes, 0))};
    case Decision::kRecompute:
      break;
  }
  return {"recompute", fmt::format("compute {:.1f} ms", row.recompute_ms)};
}

struct GoalText {
  std::string operator()(const DeviceBytes& goal) const {
    return goal.bytes == kUnlimited ? "as fast as possible" : "at most " + human_bytes(goal.bytes) + " on the device";
  }
  std::string operator()(const Slowdown& goal) const {
    return fmt::format("the least memory for at most {:g} % more time", 100 * goal.fraction);
  }
  std::string operator()(const LeastMemory& /*goal*/) const { return "the least memory"; }
};

// A warning where the predicted time is not to be trusted; empty otherwise.
std::string trust(const PlanReport& report) {
  constexpr double kFar = 0.1;
  if (!report.actual) {
    return report.on_cpu ? "; on a CPU the time is not to be trusted before a step has been checked" : "";
  }
  const double off = report.actual->ms / report.predicted.step_ms - 1;
  return off < -kFar || off > kFar ? fmt::format("; off by {:+.0f} %, so the time is not to be trusted", 100 * off)
                                   : "";
}

}  // namespace

std::string explain_plan(const StepPlanner::Known& known, const Goal& goal, const PlanReport& report) {
  const Prediction& predicted = report.predicted;
  const std::optional<StepCost>& actual = report.actual;
  const std::vector<Row> rows = rows_of(known, report.fits && std::holds_alternative<DeviceBytes>(goal));
  std::size_t width = std::string_view("operation").size();
  for (const Row& row : rows) {
    width = std::max(width, row.operation.size());
  }
  std::string out =
      fmt::format("plan: {}; {} saved storages\n{:<{}}{:>10}{:>12}  {:<10}{:<28}{}\n", std::visit(GoalText(), goal),
                  known.signature.size(), "operation", width, "storages", "bytes", "decision", "why", "predicted cost");
  for (const Row& row : rows) {
    const auto [decision, text] = cost(row, report.rates);
    out += fmt::format("{:<{}}{:>10}{:>12}  {:<10}{:<28}{}\n", row.operation, width, row.storages,
                       human_bytes(row.bytes), decision, row.why, text);
  }
  if (report.managed) {
    out += fmt::format("managed: at most {} on the device; {} in and {} out from one step's beginning to the next's\n",
                       human_bytes(report.managed->device_bytes), human_bytes(report.managed->traffic.in_bytes()),
                       human_bytes(report.managed->traffic.out_bytes()));
  }
  out +=
      fmt::format("peak: predicted {}{}, actual {}{}\n", human_bytes(predicted.peak_bytes),
                  report.fits ? "" : " (over the budget)", actual ? human_bytes(actual->peak_bytes) : "not known yet",
                  report.metered   ? ""
                  : report.managed ? ", the first of saved and managed tensors only, the second of saved ones: "
                                     "Options::device_meter is not set"
                                   : ", both of saved tensors only: Options::device_meter is not set");
  out += fmt::format(
      "time: predicted {:.1f} ms ({:.1f} with all kept; {:.1f} of waits and {:.1f} of recomputation), "
      "actual {}{}\n",
      predicted.step_ms, report.all_kept_ms, predicted.stalled_ms, predicted.recompute_ms,
      actual ? fmt::format("{:.1f} ms", actual->ms) : "not known yet", trust(report));
  return out;
}

}  // namespace ebb
