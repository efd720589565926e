// What an offloader says of itself: counts, plans, samples.
#include "offload/stats.h"

#include <cstdint>
#include <map>
#include <sstream>
#include <string>

#include <pybind11/stl.h>

#include "offload/plan_report.h"
#include "python/src/bind.h"

namespace ebb::python {
namespace {

std::string to_text(const Stats& stats) {
  std::ostringstream text;
  text << stats;
  return text.str();
}

std::map<std::string, Count> kept_by_reason(const Stats& stats) {
  std::map<std::string, Count> kept;
  for (std::size_t i = 0; i < kKeptReasons; ++i) {
    kept[std::string(to_string(static_cast<KeptReason>(i)))] = stats.kept[i];
  }
  return kept;
}

std::string plan_in_a_line(const PlanReport& report) {
  std::ostringstream text;
  text << "<ebb.PlanReport: " << report.predicted.peak_bytes << " bytes of " << report.budget_bytes << " and "
       << report.predicted.step_ms << " ms predicted";
  if (report.actual) {
    text << ", " << report.actual->peak_bytes << " bytes and " << report.actual->ms << " ms taken";
  }
  text << '>';
  return text.str();
}

// As bench/step writes records; for studies of the planner (bench/planning/recorded.cc).
py::dict record_of(const PlanReport& report) {
  py::list storages;
  for (const StorageRecord& each : report.record.storages) {
    storages.append(py::make_tuple(each.bytes, each.saved_ms, each.idle_ms, each.needed_ms, each.released_ms,
                                   static_cast<int>(each.recompute), each.recompute_ms, each.inputs, each.made_with,
                                   each.recompute_bytes, each.other_bytes, each.is_for_recipes));
  }
  py::list other;
  for (const StepRecord::Level& level : report.record.other) {
    other.append(py::make_tuple(level.ms, level.bytes));
  }
  py::dict record;
  record["storages"] = storages;
  record["other"] = other;
  record["backward_ms"] = report.record.backward_ms;
  record["end_ms"] = report.record.end_ms;
  record["out_bytes_per_ms"] = report.rates.out_bytes_per_ms;
  record["in_bytes_per_ms"] = report.rates.in_bytes_per_ms;
  record["ms_per_copy"] = report.rates.ms_per_copy;
  return record;
}

}  // namespace

void bind_stats(py::module_& module) {
  py::class_<Count>(module, "Count", "Saved tensors, and the bytes of their storages.")
      .def_readonly("tensors", &Count::tensors)
      .def_readonly("bytes", &Count::bytes)
      .def("__repr__", [](const Count& count) {
        return "Count(tensors=" + std::to_string(count.tensors) + ", bytes=" + std::to_string(count.bytes) + ")";
      });
  py::class_<Level>(module, "Level", "Bytes in use.")
      .def_readonly("now_bytes", &Level::now_bytes)
      .def_readonly("peak_bytes", &Level::peak_bytes)
      .def_readonly("capacity_bytes", &Level::capacity_bytes, "The bound in force; 0 where there is none.")
      .def("__repr__", [](const Level& level) {
        return "Level(now_bytes=" + std::to_string(level.now_bytes) +
               ", peak_bytes=" + std::to_string(level.peak_bytes) +
               ", capacity_bytes=" + std::to_string(level.capacity_bytes) + ")";
      });
  py::class_<Stats>(module, "Stats", "Counts since the offloader was made or reset_stats(). str() gives a table.")
      .def_readonly("saved", &Stats::saved, "Every tensor that autograd has saved under the guards.")
      .def_readonly("offloaded", &Stats::offloaded, "Storages copied out.")
      .def_readonly("dropped", &Stats::dropped, "Storages let go of, to be computed again.")
      .def_readonly("evicted", &Stats::evicted,
                    "Storages that the policy kept, and that left when the device was full.")
      .def_readonly("deduplicated", &Stats::deduplicated, "Saves of a storage that was saved already.")
      .def_property_readonly("kept", &kept_by_reason, "What stayed, by reason: 'parameter', 'policy', 'no room', ...")
      .def_readonly("fetched", &Stats::fetched, "Copies in.")
      .def_readonly("recomputed", &Stats::recomputed, "Storages computed again.")
      .def_readonly("reused", &Stats::reused, "Fetches that found the storage still on the device.")
      .def_readonly("still_held", &Stats::still_held, "Of these, those that the program itself has held.")
      .def_readonly("stalls", &Stats::stalls, "Waits that held the compute stream up.")
      .def_readonly("stalled_ms", &Stats::stalled_ms, "How long they took, in milliseconds.")
      .def_readonly("steps", &Stats::steps, "Forward passes under a guard.")
      .def_readonly("pool", &Stats::pool, "Host memory, or spill file.")
      .def_readonly("pool_growths", &Stats::pool_growths, "How often the pool has asked the system for more.")
      .def_readonly("stash", &Stats::stash, "Sources whose copy out is not done.")
      .def_readonly("window", &Stats::window, "What is prefetched, and not used yet.")
      .def_readonly("saved_on_device", &Stats::saved_on_device, "All that is held in device memory for saves.")
      .def_readonly("saved_if_kept", &Stats::saved_if_kept, "What that would be had every storage stayed.")
      .def_readonly("managed", &Stats::managed, "Storages given to manage(), with gradients and states beside them.")
      .def_readonly("managed_on_device", &Stats::managed_on_device, "What of these is on the device.")
      .def_readonly("managed_resident", &Stats::managed_resident, "What was given to manage() and stays on the device.")
      .def_readonly("managed_prefetched", &Stats::managed_prefetched,
                    "Copies to the device before a use asked for them.")
      .def_readonly("managed_fetched_late", &Stats::managed_fetched_late,
                    "Copies to the device that a use asked for, and waited for.")
      .def_readonly("managed_evicted", &Stats::managed_evicted,
                    "Managed storages that were sent home because the device was full.")
      .def("__repr__", &to_text);

  py::class_<TimelineSample>(module, "TimelineSample", "What is held in device memory for saves, at one time.")
      .def_readonly("ms", &TimelineSample::ms, "Milliseconds since the timeline was last taken.")
      .def_readonly("saved_on_device", &TimelineSample::saved_on_device, "Bytes.")
      .def_readonly("backward", &TimelineSample::backward, "Whether it was taken in backward.");

  py::class_<Prediction>(module, "Prediction", "What a step costs under a plan.")
      .def_readonly("step_ms", &Prediction::step_ms)
      .def_readonly("stalled_ms", &Prediction::stalled_ms)
      .def_readonly("recompute_ms", &Prediction::recompute_ms)
      .def_readonly("peak_bytes", &Prediction::peak_bytes)
      .def_readonly("kept_bytes", &Prediction::kept_bytes)
      .def_readonly("offloaded_bytes", &Prediction::offloaded_bytes)
      .def_readonly("recomputed_bytes", &Prediction::recomputed_bytes);
  py::class_<StepCost>(module, "StepCost", "What a step took that followed a plan.")
      .def_readonly("ms", &StepCost::ms)
      .def_readonly("peak_bytes", &StepCost::peak_bytes);
  py::class_<PlanReport>(module, "PlanReport", "A plan in figures.")
      .def_readonly("budget_bytes", &PlanReport::budget_bytes, "That it was made for.")
      .def_readonly("all_kept_ms", &PlanReport::all_kept_ms, "What the step would take with everything kept.")
      .def_readonly("metered", &PlanReport::metered,
                    "Whether peaks are of all device memory; False: of saved tensors only.")
      .def_readonly("predicted", &PlanReport::predicted)
      .def_readonly("fits", &PlanReport::fits, "Into the budget.")
      .def_readonly("actual", &PlanReport::actual, "Of a step that followed it, once that is over; else None.")
      .def_property_readonly(
          "managed_device_bytes",
          [](const PlanReport& report) {
            return report.managed ? std::optional(report.managed->device_bytes) : std::nullopt;
          },
          "The bound of managed tensors on the device, where the plan sets it; else None.")
      .def_property_readonly("storages", [](const PlanReport& report) { return report.record.storages.size(); })
      .def_property_readonly("record", &record_of, "What the plan was made from, for studies of the planner.")
      .def("__repr__", &plan_in_a_line);
}

}  // namespace ebb::python
