// Question: what does moving saved activations away cost a training step in time, and what does it save in memory,
// beside plain autograd, with the same gradients to the last bit?
//
// Steps of plain autograd and of each configuration alternate, so that drift of the machine's clocks meets both alike.
// Times are the host's, from before the first launch to after a device synchronisation, in default mode. Gradients are
// compared in deterministic mode, in a process of its own: cuBLAS reads its part of that mode once. "float32"
// multiplies matrices in full precision, LibTorch's default; "tf32" is float32 whose matrix products may use TF32.

#include <chrono>
#include <filesystem>
#include <iostream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <nlohmann/json.hpp>

#include "bench/common/chrome_trace.h"
#include "bench/common/percentile.h"
#include "bench/common/result_rows.h"
#include "bench/common/subprocess.h"
#include "bench/step/measure.h"
#include "bench/step/options.h"
#include "bench/step/shape.h"
#include "bench/step/workload.h"
#include "examples/common/atomic_file.h"
#include "examples/common/device.h"
#include "offload/offloader.h"

namespace ebb {
namespace {

struct Numbers {
  at::ScalarType type;
  const char* matmul_precision;  // of float32: what LibTorch's "highest" and "high" are
};

const std::map<std::string, Numbers> kDtypes{
    {"float32", {at::kFloat, "highest"}}, {"tf32", {at::kFloat, "high"}}, {"bfloat16", {at::kBFloat16, "highest"}}};

// The dtype of tensors, once the process computes as `name` says.
at::ScalarType use_dtype(const std::string& name) {
  const Numbers& numbers = kDtypes.at(name);
  at::globalContext().setFloat32MatmulPrecision(numbers.matmul_precision);
  return numbers.type;
}

Options offload_options(const StepOptions& options, c10::Device device) {
  Options ebb;
  ebb.device = device;
  ebb.stash_bytes = options.stash_bytes;
  ebb.window_bytes = options.window_bytes;
  return ebb;
}

// For each configuration of one dtype: are its gradients those of plain autograd, and was its budget met meanwhile
// (null without a plan)?
int compare(const StepOptions& options, c10::Device device) {
  use_deterministic_algorithms();
  StepWorkload workload(chosen_shape(options), use_dtype(options.dtypes.front()), device);
  const std::vector<at::Tensor> expected = expected_gradients(workload);
  nlohmann::json compared;
  for (const std::string& name : options.configs) {
    Offloader offloader(config_options(name, offload_options(options, device)));
    const bool equal = gradients_equal(expected, workload, config_method(name, offloader));
    const auto plan = offloader.plan_report();
    compared[name] = {{"equal", equal}, {"fits", plan ? nlohmann::json(plan->fits) : nlohmann::json()}};
  }
  write_atomic_file(options.out, compared.dump());
  return 0;
}

// The same, from a process of its own.
nlohmann::json compare_in_subprocess(const StepOptions& options, const std::string& dtype) {
  std::vector<std::string> arguments{"--compare-only", "--shape",  options.shape, "--device",
                                     options.device,   "--dtypes", dtype};
  const auto pass_on = [&](const char* flag, const auto& value) {
    if (value) {
      arguments.insert(arguments.end(), {flag, std::to_string(*value)});
    }
  };
  pass_on("--layers", options.layers);
  pass_on("--stash", options.stash_bytes);
  pass_on("--window", options.window_bytes);
  arguments.emplace_back("--configs");
  arguments.insert(arguments.end(), options.configs.begin(), options.configs.end());
  return run_subprocess(arguments);
}

void add_plan(nlohmann::json& result, const PlanReport& plan) {
  result["budget_bytes"] = plan.budget_bytes;
  result["fits"] = plan.fits;
  result["planned_bytes"] =
      plan.predicted.kept_bytes + plan.predicted.offloaded_bytes + plan.predicted.recomputed_bytes;
  result["predicted_ms"] = plan.predicted.step_ms;
  result["predicted_none_ms"] = plan.all_kept_ms;
  result["predicted_stalled_ms"] = plan.predicted.stalled_ms;
  result["predicted_recompute_ms"] = plan.predicted.recompute_ms;
  result["predicted_peak_bytes"] = plan.predicted.peak_bytes;
  if (plan.actual) {
    result["checked_ms"] = plan.actual->ms;
    result["checked_peak_bytes"] = plan.actual->peak_bytes;
  }
}

// All that the plan was made from, for studies of the planner.
nlohmann::json record_json(const PlanReport& plan) {
  nlohmann::json storages = nlohmann::json::array();
  for (const StorageRecord& each : plan.record.storages) {
    storages.push_back({each.bytes, each.saved_ms, each.idle_ms, each.needed_ms, each.released_ms,
                        static_cast<int>(each.recompute), each.recompute_ms, each.inputs, each.made_with,
                        each.recompute_bytes, each.other_bytes, each.is_for_recipes});
  }
  nlohmann::json other = nlohmann::json::array();
  for (const StepRecord::Level& level : plan.record.other) {
    other.push_back({level.ms, level.bytes});
  }
  return {{"storages", storages},
          {"other", other},
          {"backward_ms", plan.record.backward_ms},
          {"end_ms", plan.record.end_ms},
          {"out_bytes_per_ms", plan.rates.out_bytes_per_ms},
          {"in_bytes_per_ms", plan.rates.in_bytes_per_ms},
          {"ms_per_copy", plan.rates.ms_per_copy}};
}

nlohmann::json measure(StepWorkload& workload, const StepOptions& options, const std::string& name,
                       const std::string& dtype, DeviceMemory& device_memory, c10::Device device) {
  const Options chosen = config_options(name, offload_options(options, device));
  Offloader offloader(chosen);
  const StepMethod method = config_method(name, offloader);

  const StepTimes times = time_pairs(workload, method, options.warm_up, options.pairs, device);
  std::vector<double> ratios;
  for (std::size_t i = 0; i < times.none_ms.size(); ++i) {
    ratios.push_back(times.config_ms[i] / times.none_ms[i]);
  }
  offloader.reset_stats();
  workload.step(method);
  synchronize(device);  // stalls are counted by events, which must have happened
  const Stats stats = offloader.stats();
  const StepMemory memory = measure_memory(workload, method, device_memory, device);

  nlohmann::json result{
      {"config", name},
      {"none_ms_median", percentile(times.none_ms, 0.5)},
      {"ratio_of_medians", percentile(times.config_ms, 0.5) / percentile(times.none_ms, 0.5)},
      {"median_of_pair_ratios", percentile(ratios, 0.5)},
      {"forward_ms_median", percentile(times.config_forward_ms, 0.5)},
      {"gradient_norm", gradient_norm(workload, method)},
      {"first_step_ms", times.first_config_ms},
      {"pairs", options.pairs},
      {"after_forward_bytes", memory.after_forward_bytes},
      {"undrained_after_forward_bytes", memory.undrained_after_forward_bytes},
      {"peak_bytes", memory.peak_bytes},
      {"offloaded_bytes", stats.offloaded.bytes},
      {"offloaded_storages", stats.offloaded.tensors},
      {"fetched_bytes", stats.fetched.bytes},
      {"reused_bytes", stats.reused.bytes},
      {"dropped_bytes", stats.dropped.bytes},
      {"recomputed_bytes", stats.recomputed.bytes},
      {"stalls", stats.stalls},
      {"stalled_ms", stats.stalled_ms},
      {"stash_peak_bytes", stats.stash.peak_bytes},
      {"stash_limit_bytes", stats.stash.capacity_bytes},
      {"window_peak_bytes", stats.window.peak_bytes},
      {"window_limit_bytes", stats.window.capacity_bytes},
      {"host_bytes", stats.pool.peak_bytes},
      {"host_capacity_bytes", stats.pool.capacity_bytes},
  };
  add_spread(result, "ms", times.config_ms);
  if (const auto plan = offloader.plan_report()) {
    add_plan(result, *plan);
    if (!options.records.empty()) {
      write_atomic_file(options.records / (dtype + "_" + name + ".json"), record_json(*plan).dump());
    }
  }
  if (options.peaks) {
    result["steps_watched"] = *options.peaks;
    result["largest_peak_bytes"] = largest_peak(workload, method, *options.peaks, device_memory, device);
  }
  if (options.norms) {
    result["gradient_norms"] = gradient_norms(workload, method, *options.norms);
    result["none_gradient_norms"] = gradient_norms(workload, nullptr, *options.norms);
  }
  if (method.offloader != nullptr && options.steady) {
    const SteadyState steady = run_steadily(workload, offloader, *options.steady, device);
    result["steady"] = {{"steps", steady.steps},
                        {"pool_growths", steady.pool_growths},
                        {"device_allocations", steady.device_allocations},
                        {"events_made", steady.events_made},
                        {"most_pool_bytes_between_steps", steady.most_pool_bytes_between_steps}};
  }
  return result;
}

// One step in steady state, for Perfetto.
void trace_step(StepWorkload& workload, const StepOptions& options, const std::string& name, const std::string& dtype,
                c10::Device device) {
  Options chosen = config_options(name, offload_options(options, device));
  chosen.record_trace = true;
  Offloader offloader(chosen);
  std::vector<TraceSpan> spans;
  constexpr int kSteps = 6;
  for (int i = 0; i < kSteps; ++i) {
    static_cast<void>(offloader.take_trace());
    const auto begin = std::chrono::steady_clock::now();
    workload.step(&offloader);
    synchronize(device);
    spans = offloader.take_trace();
    spans.push_back({"step", TraceTrack::kHost, begin, std::chrono::steady_clock::now(), 0, 0});
  }
  write_atomic_file(options.trace / (dtype + "_" + name + ".json"), chrome_trace(spans));
}

int run(int argc, char** argv) {
  StepOptions options;
  if (const auto code = parse_options(argc, argv, options)) {
    return *code;
  }
  const c10::Device device = pick_device(options.device);
  DeviceMemory device_memory(device);  // before any weights, which it is to count
  // The first offloader of a process brings an engine whose threads have cuBLAS workspaces of their own, 32 MiB on an
  // H200. Steps of plain autograd that run before would leave a second one behind.
  const Offloader first(offload_options(options, device));
  ResultRows rows(options.out);
  if (options.compare_only) {
    return compare(options, device);
  }
  for (const std::filesystem::path& folder : {options.trace, options.records}) {
    if (!folder.empty()) {
      make_folder(folder);
    }
  }
  const StepShape shape = chosen_shape(options);
  bool all_equal = true;
  bool plans_alike = true;
  for (const std::string& dtype : options.dtypes) {
    const nlohmann::json compared = compare_in_subprocess(options, dtype);
    StepWorkload workload(shape, use_dtype(dtype), device);
    for (const std::string& name : options.configs) {
      nlohmann::json result = measure(workload, options, name, dtype, device_memory, device);
      if (!options.trace.empty() && name != "none" && name != "checkpoint") {
        trace_step(workload, options, name, dtype, device);
      }
      result["dtype"] = dtype;
      result["shape"] = shape.name;
      result["layers"] = layers(shape);
      result["device"] = device_name(device);
      const bool equal = compared.at(name).at("equal");
      result["gradients_equal"] = equal;
      if (result.value("fits", nlohmann::json()) != compared.at(name).at("fits")) {
        std::cerr << "step: error: the gradients of " << name
                  << " were not compared under such a plan as was timed: one meets the budget, the other does not\n";
        plans_alike = false;
        result["gradients_equal"] = nullptr;
      }
      result["overhead"] = result.at("ratio_of_medians").get<double>() - 1;
      all_equal = all_equal && equal;
      rows.add(std::move(result));
    }
  }
  if (!all_equal) {
    std::cerr << "step: error: gradients differ from plain autograd's\n";
  }
  return all_equal && plans_alike ? 0 : 1;
}

}  // namespace
}  // namespace ebb

int main(int argc, char** argv) {
  return ebb::run_benchmark("step", [&] { return ebb::run(argc, argv); });
}
