#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "examples/llama/config.h"
#include "offload/optimizer.h"

namespace ebb {

// What a user of this benchmark may set, after parsing. Sizes are bytes.
struct ModelOptions {
  std::string shape = "8b";
  std::optional<std::int64_t> layers;  // the shape's unless given
  std::int64_t batch = 8;
  std::int64_t sequence = 1024;
  std::vector<std::string> configs{"managed"};  // of resident and managed
  std::string dtype = "bfloat16";
  std::string device = "auto";
  UpdateIn update = UpdateIn::kBackward;
  UpdateOn update_on = UpdateOn::kDevice;
  std::optional<std::uint64_t> cap_bytes;                // of the device's memory
  std::uint64_t managed_bytes = 6'000'000'000;           // Parameters::device_bytes, without a budget
  std::optional<std::uint64_t> budget_bytes;             // Options::device_budget, whose plan decides about all
  std::optional<std::uint64_t> prefetch_bytes;           // Parameters::prefetch_bytes
  std::uint64_t resident_bytes = 0;                      // Parameters::resident_bytes
  std::vector<std::string> home{"gradients", "states"};  // what goes home beside the weights
  int warm_up = 3;                                       // steps
  int steps = 3;                                         // timed
  bool deterministic = false;
  std::filesystem::path trace;  // empty: none
  std::filesystem::path out;

  [[nodiscard]] LlamaConfig model() const;
  [[nodiscard]] std::string update_name() const;  // as --update has it
  [[nodiscard]] bool manages(const std::string& what) const;
};

// Returns the status to exit with if the program is to end here.
[[nodiscard]] std::optional<int> parse_options(int argc, char** argv, ModelOptions& options);

}  // namespace ebb
