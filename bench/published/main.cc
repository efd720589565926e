// Question: what does ebb make of the cases with which others have published their figures?
//
// "stack" and "llama" are the models of Lightning thunder's CPU-offloading tutorial: 100 layers of relu(linear(x)) over
// [128, 16], and Llama-3-8B with 9 layers, batch 8 and 1024 tokens, both in float32. For the second they report 38.90
// GB after forward and 46.25 GB at the peak, and with offloading 16.41 GB, 35.55 GB and 18 % more time. Their transform
// also takes a policy, for which they name the tensors of certain operations, without saying which. Here these are what
// the MLP's first two linears, SiLU and the product make, and relu for the stack. Times are in default mode, and in
// pairs with plain autograd as bench/step/main.cc does it.
//
// "chain", "sum" and "trained" are the parallel paths of thunder's issue 1337 (paths.h): what does backward take
// above the memory with which it begins, if each path is recomputed? Theirs is 0.75 MiB, whatever the number of paths,
// where the order is right, and grows with it where it is not.
//
// Gradients are compared in deterministic mode, in a process of its own.

#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "bench/common/percentile.h"
#include "bench/common/result_rows.h"
#include "bench/common/subprocess.h"
#include "bench/published/paths.h"
#include "bench/step/measure.h"
#include "bench/step/shape.h"
#include "bench/step/workload.h"
#include "examples/common/atomic_file.h"
#include "examples/common/command_line.h"
#include "examples/common/device.h"
#include "offload/offloader.h"

namespace ebb {
namespace {

// What a user of this benchmark may set, after parsing.
struct PublishedOptions {
  std::vector<std::string> cases{"stack", "llama", "chain", "sum", "trained"};
  std::string device = "auto";
  bool tiny = false;  // a Llama for a CPU
  int warm_up = 3;
  int pairs = 10;
  bool compare_only = false;
  std::filesystem::path out;
};

std::optional<int> parse_options(int argc, char** argv, PublishedOptions& options) {
  CLI::App app("Measures cases that others have published, without ebb and with it.", "published");
  app.add_option("--cases", options.cases)
      ->check(CLI::IsMember({"stack", "llama", "chain", "sum", "trained"}))
      ->capture_default_str();
  app.add_option("--device", options.device, "auto, cpu, cuda or cuda:N")->capture_default_str();
  app.add_flag("--tiny", options.tiny, "Instead of Llama-3-8B's width, one for a CPU");
  app.add_option("--warm-up", options.warm_up, "Steps of each before timing")->check(positive())->capture_default_str();
  app.add_option("--pairs", options.pairs, "Timed steps of each")->check(positive())->capture_default_str();
  auto* const out = app.add_option("--out", options.out, "Write the results here as JSON")->type_name("FILE");
  app.add_flag("--compare-only", options.compare_only, "Only compare the gradients, into --out")->needs(out);
  return parse_command_line(app, argc, argv);
}

constexpr int kPathCounts[] = {10, 100};

bool is_model(const std::string& name) { return name == "stack" || name == "llama"; }

StepShape model_shape(const std::string& name, bool tiny) {
  constexpr std::int64_t kTinyLayers = 2;
  return name == "stack" ? step_shape("stack") : tiny ? with_layers(step_shape("tiny"), kTinyLayers) : step_shape("w1");
}

std::vector<std::string> model_configs(const std::string& name) {
  return {"none",
          name == "stack" ? "operations:ReluBackward0" : "operations:UnsafeViewBackward0,SiluBackward0,MulBackward0",
          "offload"};
}

Options on(c10::Device device) {
  Options options;
  options.device = device;
  return options;
}

// Whether gradients are those of plain autograd, by case and configuration, and for paths by their number.
nlohmann::json compare(const PublishedOptions& options, c10::Device device) {
  nlohmann::json equal;
  for (const std::string& name : options.cases) {
    if (is_model(name)) {
      StepWorkload workload(model_shape(name, options.tiny), at::kFloat, device);
      const std::vector<at::Tensor> expected = expected_gradients(workload);
      for (const std::string& config : model_configs(name)) {
        Offloader offloader(config_options(config, on(device)));
        equal[name][config] = gradients_equal(expected, workload, config_method(config, offloader));
      }
      continue;
    }
    for (const int n : kPathCounts) {
      const Paths paths(paths_case(name), n, device);
      for (const std::string& config : paths_configs(paths_case(name))) {
        equal[name][config][std::to_string(n)] = paths.gradients_equal(config);
      }
    }
  }
  return equal;
}

nlohmann::json compare_in_subprocess(const PublishedOptions& options) {
  std::vector<std::string> arguments{"--compare-only", "--device", options.device, "--cases"};
  arguments.insert(arguments.end(), options.cases.begin(), options.cases.end());
  if (options.tiny) {
    arguments.emplace_back("--tiny");
  }
  return run_subprocess(arguments);
}

nlohmann::json measure_model(StepWorkload& workload, const std::string& config, const PublishedOptions& options,
                             DeviceMemory& device_memory, c10::Device device) {
  Offloader offloader(config_options(config, on(device)));
  const StepMethod method = config_method(config, offloader);
  const StepTimes times = time_pairs(workload, method, options.warm_up, options.pairs, device);
  offloader.reset_stats();
  const StepMemory memory = measure_memory(workload, method, device_memory, device);
  const double none_ms = percentile(times.none_ms, 0.5);
  nlohmann::json row{{"ms_median", percentile(times.config_ms, 0.5)},
                     {"none_ms_median", none_ms},
                     {"overhead", percentile(times.config_ms, 0.5) / none_ms - 1},
                     {"pairs", options.pairs},
                     {"undrained_after_forward_bytes", memory.undrained_after_forward_bytes},
                     {"after_forward_bytes", memory.after_forward_bytes},
                     {"peak_bytes", memory.peak_bytes}};
  constexpr std::uint64_t kSteps = 2;  // that measure_memory takes
  row["offloaded_bytes"] = offloader.stats().offloaded.bytes / kSteps;
  row["offloaded_storages"] = offloader.stats().offloaded.tensors / kSteps;
  return row;
}

int run(int argc, char** argv) {
  PublishedOptions options;
  if (const auto code = parse_options(argc, argv, options)) {
    return *code;
  }
  const c10::Device device = pick_device(options.device);
  if (options.compare_only) {
    use_deterministic_algorithms();
    ResultRows(options.out).save();
    write_atomic_file(options.out, compare(options, device).dump());
    return 0;
  }
  DeviceMemory memory(device);        // before any weights, which it is to count
  const Offloader first(on(device));  // brings the engine, whose threads have memory of their own (bench/step/main.cc)
  ResultRows rows(options.out);
  const nlohmann::json equal = compare_in_subprocess(options);
  bool all_equal = true;
  const auto add = [&](nlohmann::json row, const std::string& name, const std::string& config,
                       const nlohmann::json& same) {
    row["case"] = name;
    row["config"] = config;
    row["device"] = device_name(device);
    row["gradients_equal"] = same;
    all_equal = all_equal && same.get<bool>();
    rows.add(std::move(row));
  };
  for (const std::string& name : options.cases) {
    if (is_model(name)) {
      const StepShape shape = model_shape(name, options.tiny);
      StepWorkload workload(shape, at::kFloat, device);
      for (const std::string& config : model_configs(name)) {
        nlohmann::json row = measure_model(workload, config, options, memory, device);
        row["shape"] = shape.name;
        add(std::move(row), name, config, equal.at(name).at(config));
      }
      continue;
    }
    for (const int n : kPathCounts) {
      const Paths paths(paths_case(name), n, device);
      for (const std::string& config : paths_configs(paths_case(name))) {
        const Paths::Memory taken = paths.measure(config, memory);
        add({{"n", n},
             {"held_bytes", taken.held_bytes},
             {"peak_over_start_bytes", taken.peak_over_start_bytes},
             {"recomputed_bytes", taken.recomputed_bytes}},
            name, config, equal.at(name).at(config).at(std::to_string(n)));
      }
    }
  }
  if (!all_equal) {
    std::cerr << "published: error: gradients differ from plain autograd's\n";
  }
  return all_equal ? 0 : 1;
}

}  // namespace
}  // namespace ebb

int main(int argc, char** argv) {
  return ebb::run_benchmark("published", [&] { return ebb::run(argc, argv); });
}
