// Question: what does it cost to train a Llama whose weights, gradients and AdamW's states live in host memory, and how
// large a model trains so? "resident" is the same program with all of them on the device: the same checkpointed blocks,
// whose inputs move, and the same operations of AdamW, so the difference is what moving weights and states costs. A
// fused AdamW updates resident tensors faster.
//
// Times are the host's, each until the loss is read, as a program reads it; the last one, until all copies are done,
// too, but not until a thread that updates on the CPU has done the last updates. With --update step the pass of the
// optimizer is timed by itself after the others. Tokens a second are of all timed steps together. The peak is what
// LibTorch's allocator has handed out, from the first weight on, and "taken" is what it has taken from the device. With
// --budget both are since the last step that was recorded or checked, because a recorder starts the allocator's peaks
// anew. --cap bounds what is taken. Without a GPU the home is a spill file, which says whether the program is right,
// and nothing about time.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include "bench/common/chrome_trace.h"
#include "bench/common/memory_cap.h"
#include "bench/common/result_rows.h"
#include "bench/model/options.h"
#include "bench/model/training.h"
#include "examples/common/atomic_file.h"
#include "examples/common/device.h"

namespace ebb {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;
using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// The most memory that LibTorch has taken from the device; 0 without a GPU.
std::uint64_t taken_bytes(c10::Device device) {
  return device.is_cpu() ? 0
                         : static_cast<std::uint64_t>(allocator::getDeviceStats(device.index()).reserved_bytes[0].peak);
}

// What a plan predicts, and what a step that followed the plan took.
nlohmann::json json_of(const PlanReport& plan) {
  nlohmann::json row{{"all_kept_ms", plan.all_kept_ms},
                     {"predicted_ms", plan.predicted.step_ms},
                     {"predicted_peak_bytes", plan.predicted.peak_bytes},
                     {"kept_bytes", plan.predicted.kept_bytes},
                     {"offloaded_bytes", plan.predicted.offloaded_bytes},
                     {"recomputed_bytes", plan.predicted.recomputed_bytes},
                     {"recompute_ms", plan.predicted.recompute_ms},
                     {"fits", plan.fits}};
  if (plan.actual) {
    row["actual_ms"] = plan.actual->ms;
    row["actual_peak_bytes"] = plan.actual->peak_bytes;
  }
  if (plan.managed) {
    row["managed_bytes"] = plan.managed->device_bytes;
    row["managed_in_bytes"] = plan.managed->traffic.in_bytes();
    row["managed_out_bytes"] = plan.managed->traffic.out_bytes();
    row["between_ms"] = plan.managed->between_ms;
  }
  return row;
}

// How long the optimizer's pass over all parameters takes by itself, and what the pass brings to the device.
void add_update(nlohmann::json& row, Training& training, c10::Device device) {
  static_cast<void>(training.forward_and_backward());
  synchronize(device);
  training.offloader().reset_stats();
  const auto begin = Clock::now();
  training.update();
  synchronize(device);
  row["update_ms"] = since(begin);
  const Stats stats = training.offloader().stats();
  row["update_in_bytes"] = stats.managed_prefetched.bytes + stats.managed_fetched_late.bytes;
}

nlohmann::json measure(const ModelOptions& options, const std::string& config, c10::Device device,
                       DeviceMemory& memory) {
  const auto parameters = static_cast<double>(parameter_count(options.model()));
  const double tokens = static_cast<double>(options.batch) * static_cast<double>(options.sequence);
  memory.reset();
  const auto start = Clock::now();
  Training training(options, device, config == "managed");
  synchronize(device);
  nlohmann::json row{{"config", config},
                     {"shape", options.shape},
                     {"layers", options.model().layers},
                     {"parameters", parameter_count(options.model())},
                     {"dtype", options.dtype},
                     {"update", options.update_name()},
                     {"update_on", options.update_on == UpdateOn::kCpu ? "cpu" : "device"},
                     {"home", options.home},
                     {"batch", options.batch},
                     {"sequence", options.sequence},
                     {"budget_bytes", config == "managed" ? options.budget_bytes.value_or(0) : 0},
                     {"cap_bytes", options.cap_bytes.value_or(0)},
                     {"device", device_name(device)},
                     {"made_ms", since(start)}};
  std::vector<double> losses;
  std::vector<double> warm_up_ms;
  std::vector<double> ms;
  for (int i = 0; i < options.warm_up + options.steps; ++i) {
    const bool is_traced = !options.trace.empty() && i == options.warm_up + options.steps - 1;
    if (is_traced) {
      static_cast<void>(training.offloader().take_trace());
    }
    const auto begin = Clock::now();
    const at::Tensor loss = training.forward_and_backward();
    training.update();
    losses.push_back(loss.item<double>());
    if (i == options.warm_up - 1 || i == options.warm_up + options.steps - 1) {
      synchronize(device);  // the copies, too
    }
    if (i == options.warm_up - 1) {
      training.offloader().reset_stats();
    }
    (i < options.warm_up ? warm_up_ms : ms).push_back(since(begin));
    std::fprintf(stderr, "model: %s, step %d of %d\n", config.c_str(), i + 1, options.warm_up + options.steps);
    if (is_traced && config == "managed") {
      write_atomic_file(options.trace, chrome_trace(training.offloader().take_trace()));
    }
  }
  const Stats stats = training.offloader().stats();
  row["losses"] = losses;
  row["warm_up_ms"] = warm_up_ms;
  add_spread(row, "ms", ms);
  row["ms_mean"] = std::accumulate(ms.begin(), ms.end(), 0.0) / static_cast<double>(ms.size());
  row["tokens_per_s"] = tokens / row["ms_mean"].get<double>() * 1e3;
  row["peak_bytes"] = memory.peak_bytes();
  row["taken_bytes"] = taken_bytes(device);
  row["managed_bound_bytes"] = stats.managed_on_device.capacity_bytes;
  row["managed_bytes"] = stats.managed.bytes;
  row["managed_bytes_per_parameter"] = static_cast<double>(stats.managed.bytes) / parameters;
  row["managed_peak_bytes"] = stats.managed_on_device.peak_bytes;
  row["prefetched_bytes"] = stats.managed_prefetched.bytes;  // of the timed steps
  row["fetched_late_bytes"] = stats.managed_fetched_late.bytes;
  row["evicted_bytes"] = stats.managed_evicted.bytes;
  row["resident_bytes"] = stats.managed_resident.now_bytes;
  row["pool_bytes"] = stats.pool.capacity_bytes;  // homes, and inputs of blocks
  row["pool_peak_bytes"] = stats.pool.peak_bytes;
  if (config == "managed" && options.update == UpdateIn::kStep) {
    add_update(row, training, device);
  }
  row["weights"] = training.weights();
  if (const std::optional<PlanReport> plan = training.offloader().plan_report()) {
    row["plan"] = json_of(*plan);
  }
  return row;
}

int run(int argc, char** argv) {
  ModelOptions options;
  if (const auto code = parse_options(argc, argv, options)) {
    return *code;
  }
  const c10::Device device = pick_device(options.device);
  if (options.cap_bytes && device.is_cuda()) {
    cap_memory(*options.cap_bytes, device);
  }
  if (options.deterministic) {
    use_deterministic_algorithms();
  }
  if (device.is_cpu()) {
    std::fprintf(stderr,
                 "model: no GPU is used: homes are in a spill file, times say nothing, and --cap bounds nothing\n");
  }
  ResultRows rows(options.out);
  DeviceMemory memory(device);
  for (const std::string& config : options.configs) {
    try {
      rows.add(measure(options, config, device, memory));
    } catch (const c10::OutOfMemoryError& error) {
      rows.add({{"config", config},
                {"shape", options.shape},
                {"layers", options.model().layers},
                {"parameters", parameter_count(options.model())},
                {"batch", options.batch},
                {"sequence", options.sequence},
                {"error", "out of memory"},
                {"said", error.what_without_backtrace()}});
    }
  }
  return 0;
}

}  // namespace
}  // namespace ebb

int main(int argc, char** argv) {
  return ebb::run_benchmark("model", [&] { return ebb::run(argc, argv); });
}
