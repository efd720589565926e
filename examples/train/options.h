#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <variant>

#include "examples/llama/config.h"
#include "offload/options.h"
#include "policy/policy.h"

namespace ebb {

// A budget of device memory: so many bytes, or a part of the peak of the same training without ebb.
using DeviceMemoryBudget = std::variant<std::uint64_t, double>;

// The words of flags and reports for what is recomputed.
inline const std::map<std::string, Recompute> kRecomputeWords{
    {"none", Recompute::kNo}, {"cheap", Recompute::kMemoryBound}, {"all", Recompute::kComputeBound}};

// The words of flags and reports for where managed tensors live.
inline const std::map<std::string, Home> kHomeWords{{"host", Home::kHost}, {"disk", Home::kDisk}};

// Defaults, in bytes.
inline constexpr std::uint64_t kLeastSaved = std::uint64_t{1} << 20;     // smaller saves stay
inline constexpr std::uint64_t kLeastManaged = std::uint64_t{64} << 10;  // smaller managed tensors stay
inline constexpr std::uint64_t kMostManaged = std::uint64_t{8} << 20;    // the bound of managed tensors on the device

// What a user of the training program may set, after parsing. Sizes are bytes.

struct TrainOptions {
  LlamaConfig model;

  std::int64_t steps = 30;
  std::int64_t until = 30;  // the step to stop at; `steps` unless given
  std::int64_t batch = 8;
  std::int64_t seq = 256;
  double learning_rate = 1e-3;
  double weight_decay = 0.1;
  std::int64_t warmup = 10;
  std::uint64_t seed = 1;
  std::string dtype = "float32";
  std::string device = "auto";
  std::filesystem::path text;  // empty: the default text

  bool compare = false;
  std::filesystem::path report;  // empty: none, as for `save` and `resume`
  std::filesystem::path save;
  std::filesystem::path resume;
  std::int64_t sample = 200;

  bool offload = true;
  std::optional<std::uint64_t> minimum_bytes;       // of what moves; nullopt: kLeastSaved, kLeastManaged
  std::optional<Home> managed;                      // where weights and gradients live; nullopt: on the device
  std::optional<Home> optimizer_home;               // and what the optimizer keeps
  std::optional<std::uint64_t> managed_bytes;       // the most of these on the device; nullopt: a budget's plan decides
  std::optional<DeviceMemoryBudget> device_budget;  // with it, what moves and what is recomputed is planned
  bool explain = false;                             // print the plan
  Recompute recompute = Recompute::kNo;             // storages of at most this cost are recomputed instead of moved
  Options ebb;                                      // device, policy and timeline are left to the program
};

// Whether weights, or what the optimizer keeps, live off the device.
inline bool manages(const TrainOptions& o) { return o.managed || o.optimizer_home; }

// Reads the command line into `options`. Returns the program's exit code if it is to end here: 0 after --help, else
// CLI11's code for the usage error that was printed. Throws std::invalid_argument for sizes that do not fit together.
std::optional<int> parse_options(int argc, char** argv, TrainOptions& options);

}  // namespace ebb
