// Question: what would a recorded step take, by the bytes that the device may have? For studies of the planner without
// a GPU: times are predicted.
//
// recorded FILE... prints a row for each budget of each record in the files, which `./dev bench plan --programs
// --records --out FILE` has written on a GPU: ten budgets from the least to all.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <set>
#include <string>

#include <nlohmann/json.hpp>

#include "policy/planner.h"
#include "policy/predict.h"

namespace ebb {
namespace {

using nlohmann::json;

StorageRecord storage_of(const json& from) {
  std::size_t next = 0;
  const auto take = [&](auto& to) { from.at(next++).get_to(to); };
  StorageRecord storage;
  int recompute = 0;
  take(storage.bytes);
  take(storage.saved_ms);
  take(storage.idle_ms);
  take(storage.needed_ms);
  take(storage.released_ms);
  take(recompute);
  take(storage.recompute_ms);
  take(storage.inputs);
  take(storage.made_with);
  take(storage.recompute_bytes);
  take(storage.other_bytes);
  take(storage.is_for_recipes);
  storage.recompute = static_cast<Recompute>(recompute);
  return storage;
}

StepRecord record_of(const json& from) {
  StepRecord record;
  for (const json& each : from.at("storages")) {
    record.storages.push_back(storage_of(each));
  }
  for (const json& each : from.at("other")) {
    record.other.push_back({.ms = each.at(0).get<double>(), .bytes = each.at(1).get<std::uint64_t>()});
  }
  record.backward_ms = from.at("backward_ms").get<double>();
  record.end_ms = from.at("end_ms").get<double>();
  return record;
}

void print_plans(const std::string& program, const json& from) {
  constexpr int kBudgets = 10;
  constexpr double kGigabyte = 1e9;
  const StepRecord record = record_of(from);
  const LinkRates rates{.out_bytes_per_ms = from.at("out_bytes_per_ms").get<double>(),
                        .in_bytes_per_ms = from.at("in_bytes_per_ms").get<double>(),
                        .ms_per_copy = from.at("ms_per_copy").get<double>()};
  const Prediction kept = make_plan(record, {}, rates).predicted;
  const std::uint64_t least = make_least_plan(record, kUnlimited, rates).predicted.peak_bytes;
  for (int i = 0; i < kBudgets; ++i) {
    const std::uint64_t budget = least + (kept.peak_bytes - least) * static_cast<std::uint64_t>(i) / (kBudgets - 1);
    const auto begin = std::chrono::steady_clock::now();
    const Plan plan = make_plan(record, {.device_bytes = budget}, rates);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    const Prediction& predicted = plan.predicted;
    std::printf(
        "%-18s %7.2f GB %9.1f ms %+6.1f %%  waits %7.1f  runs %7.1f  kept %6.2f  moved %6.2f  again %6.2f GB%s  "
        "planned in %.0f ms\n",
        program.c_str(), static_cast<double>(budget) / kGigabyte, predicted.step_ms,
        100 * (predicted.step_ms / kept.step_ms - 1), predicted.stalled_ms, predicted.recompute_ms,
        static_cast<double>(predicted.kept_bytes) / kGigabyte,
        static_cast<double>(predicted.offloaded_bytes) / kGigabyte,
        static_cast<double>(predicted.recomputed_bytes) / kGigabyte, plan.fits ? "" : " (over)", took.count());
  }
}

int print_all(int count, char** files) {
  for (int i = 1; i < count; ++i) {
    std::ifstream in(files[i]);
    std::set<std::string> printed;  // one record of each program
    const json results = json::parse(in);
    for (const json& row : results.at("rows")) {
      if (row.contains("record") && printed.insert(row.at("program").get<std::string>()).second) {
        print_plans(row.at("program").get<std::string>(), row.at("record"));
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace ebb

int main(int count, char** files) {
  try {
    return ebb::print_all(count, files);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "recorded: error: %s\n", error.what());
    return 1;
  }
}
