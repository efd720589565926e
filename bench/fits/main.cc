// Question: what is the largest Llama that trains within so much of a GPU's memory: without ebb, with all kept but for
// what is evicted when memory runs out, with every block checkpointed, with ebb's defaults, and with a plan for a
// budget?
//
// The cap is on what LibTorch's allocator may take from the device (setMemoryFraction), so what it cannot use of its
// blocks counts too. "Trains" is several steps in a row, forward and all gradients, without running out of it. A plan
// is given the cap but for a margin, as a wish: it does its best where that cannot be reached. Each size is tried with
// a new model in the same process. Each search begins at an estimate, and a plan's at what the others have reached.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include "bench/common/memory_cap.h"
#include "bench/common/percentile.h"
#include "bench/common/result_rows.h"
#include "bench/fits/search.h"
#include "bench/fits/shape.h"
#include "bench/step/measure.h"
#include "bench/step/workload.h"
#include "examples/common/command_line.h"
#include "examples/common/device.h"
#include "offload/offloader.h"
#include "offload/options.h"
#include "streams/base/system_memory.h"

namespace ebb {
namespace {

// What a user of this benchmark may set, after parsing. Sizes are bytes.
struct FitsOptions {
  std::vector<std::uint64_t> caps{24'000'000'000, 40'000'000'000, 80'000'000'000};
  std::vector<std::string> dimensions{"layers", "batch", "sequence"};
  std::vector<std::string> configs{"none", "evict", "checkpoint", "offload", "plan"};
  std::string dtype = "bfloat16";
  std::string device = "auto";
  int steps = 5;         // in a row, that must run: a plan is recorded in two of them and followed from the third on
  double margin = 0.03;  // of the cap, that a plan is not given: the allocator's blocks do not fit without gaps
  double resolution = 0.05;                 // of the largest size
  std::optional<std::uint64_t> host_bytes;  // 0.7 of what the machine has left unless given
  std::filesystem::path out;
};

std::optional<int> parse_options(int argc, char** argv, FitsOptions& options) {
  constexpr double kMostMargin = 0.5;
  CLI::App app("Finds the largest Llama that trains within so much of a GPU's memory.", "fits");
  app.add_option("--caps", options.caps, "Device memory of the process; default: 24GB 40GB 80GB")
      ->transform(size_text());
  app.add_option("--dimensions", options.dimensions)
      ->check(CLI::IsMember({"layers", "batch", "sequence"}))
      ->capture_default_str();
  app.add_option("--configs", options.configs)
      ->check(CLI::IsMember({"none", "evict", "checkpoint", "offload", "plan"}))
      ->capture_default_str();
  app.add_option("--dtype", options.dtype)->check(CLI::IsMember({"float32", "bfloat16"}))->capture_default_str();
  app.add_option("--device", options.device, "auto, cuda or cuda:N")->capture_default_str();
  app.add_option("--steps", options.steps, "That must run in a row")->check(positive())->capture_default_str();
  app.add_option("--margin", options.margin, "The share of a cap that a plan is not given")
      ->check(not_negative())
      ->check(CLI::Range(0.0, kMostMargin))
      ->capture_default_str();
  app.add_option("--resolution", options.resolution, "Search until the largest size is known within this share of it")
      ->check(not_negative())
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--host", options.host_bytes, "Most host memory for offloading; default: 0.7 of what is left")
      ->transform(size_text());
  app.add_option("--out", options.out, "Write the results here as JSON")->type_name("FILE");
  return parse_command_line(app, argc, argv);
}

constexpr std::int64_t kMostSize = 4096;

// As config_options has it.
std::string step_config(const std::string& config, std::uint64_t cap_bytes, double margin) {
  return config == "plan"
             ? "budget:" + std::to_string(static_cast<std::uint64_t>(static_cast<double>(cap_bytes) * (1 - margin)))
             : config;
}

// What a trial took.
struct Trial {
  std::uint64_t peak_bytes = 0;
  double step_ms = 0;  // the median of the last two steps
};

Trial train(const LlamaShape& shape, at::ScalarType dtype, const std::string& config, const Options& options, int steps,
            DeviceMemory& memory, c10::Device device) {
  using Clock = std::chrono::steady_clock;
  using Ms = std::chrono::duration<double, std::milli>;
  constexpr std::size_t kTimed = 2;
  StepWorkload workload({"fits", shape}, dtype, device);
  Offloader offloader(config_options(config, options));
  const StepMethod method = config_method(config, offloader);
  std::vector<double> ms;
  for (int i = 0; i < steps; ++i) {
    const auto start = Clock::now();
    workload.step(method);
    synchronize(device);
    ms.push_back(Ms(Clock::now() - start).count());
  }
  ms.erase(ms.begin(), ms.end() - static_cast<std::ptrdiff_t>(std::min(kTimed, ms.size())));
  return {memory.peak_bytes(), percentile(ms, 0.5)};
}

// So many steps in a row of a new model and a new offloader (config_options' `config` over `options`), all of which are
// gone afterwards. nullopt where the device's memory was not enough. `memory` must have been made before.
std::optional<Trial> try_training(const LlamaShape& shape, at::ScalarType dtype, const std::string& config,
                                  const Options& options, int steps, DeviceMemory& memory, c10::Device device) {
  std::optional<Trial> result;
  memory.reset();
  try {
    result = train(shape, dtype, config, options, steps, memory, device);
  } catch (const c10::OutOfMemoryError&) {
    // The answer.
  }
  synchronize(device);
  memory.reset();  // gives all of it back
  return result;
}

class Fits {
 public:
  Fits(const FitsOptions& options, c10::Device device)
      : options_(options),
        device_(device),
        memory_(device),
        dtype_(options.dtype == "float32" ? at::kFloat : at::kBFloat16) {
    constexpr double kHostShare = 0.7;
    ebb_.device = device;
    ebb_.device_meter = memory_.meter();
    ebb_.capacity_bytes = options.host_bytes.value_or(
        static_cast<std::uint64_t>(kHostShare * static_cast<double>(read_system_memory().available_bytes)));
  }

  // `most`: the largest size that any configuration has reached so far, which this one may raise.
  nlohmann::json find(std::uint64_t cap_bytes, const std::string& dimension, const std::string& config,
                      std::int64_t& most) {
    const std::int64_t guess =
        config == "plan" && most > 0 ? most : guess_largest(dimension, config, cap_bytes, c10::elementSize(dtype_));
    std::map<std::int64_t, Trial> fitting;
    const auto start = std::chrono::steady_clock::now();
    const Largest largest = find_largest(guess, kMostSize, options_.resolution, [&](std::int64_t size) {
      const auto trial =
          try_training(fits_shape(dimension, size), dtype_, step_config(config, cap_bytes, options_.margin), ebb_,
                       options_.steps, memory_, device_);
      if (trial) {
        fitting[size] = *trial;
      }
      return trial.has_value();
    });
    nlohmann::json row{{"config", config},
                       {"cap_bytes", cap_bytes},
                       {"dimension", dimension},
                       {"dtype", options_.dtype},
                       {"largest", in_its_unit(dimension, largest.fitting)},
                       {"next_tried_that_failed", nullptr},
                       {"steps", options_.steps},
                       {"margin", options_.margin},
                       {"host_capacity_bytes", *ebb_.capacity_bytes},
                       {"tries", largest.tries},
                       {"search_s", std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()},
                       {"device", device_name(device_)}};
    if (largest.failed) {
      row["next_tried_that_failed"] = in_its_unit(dimension, *largest.failed);
    }
    most = std::max(most, largest.fitting);
    if (largest.fitting > 0) {
      row["peak_bytes"] = fitting.at(largest.fitting).peak_bytes;
      row["step_ms"] = fitting.at(largest.fitting).step_ms;
    }
    return row;
  }

 private:
  // Tokens for a sequence.
  static std::int64_t in_its_unit(const std::string& dimension, std::int64_t size) {
    return dimension == "sequence" ? fits_shape(dimension, size).sequence : size;
  }

  const FitsOptions& options_;
  const c10::Device device_;
  DeviceMemory memory_;
  const at::ScalarType dtype_;
  Options ebb_;
};

int run(int argc, char** argv) {
  FitsOptions options;
  if (const auto code = parse_options(argc, argv, options)) {
    return *code;
  }
  const c10::Device device = pick_device(options.device);
  if (device.is_cpu()) {
    throw std::invalid_argument("this needs a GPU: nothing caps the memory of a CPU");
  }
  ResultRows rows(options.out);
  Fits fits(options, device);
  for (const std::uint64_t cap_bytes : options.caps) {
    cap_memory(cap_bytes, device);
    for (const std::string& dimension : options.dimensions) {
      std::int64_t most = 0;
      for (const std::string& config : options.configs) {
        rows.add(fits.find(cap_bytes, dimension, config, most));
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace ebb

int main(int argc, char** argv) {
  return ebb::run_benchmark("fits", [&] { return ebb::run(argc, argv); });
}
