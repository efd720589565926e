#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "bench/step/shape.h"

namespace ebb {

// What a user of the step benchmark may set, after parsing. Sizes are bytes.
struct StepOptions {
  std::string shape = "w1";
  std::optional<int> layers;  // the shape's unless given
  std::vector<std::string> dtypes{"float32", "bfloat16"};
  std::vector<std::string> configs{"none", "offload"};
  std::string device = "auto";
  int warm_up = 3;
  int pairs = 10;
  std::optional<int> steady;  // not looked at unless given
  std::optional<int> peaks;   // steps of which to look at the peak; none unless given
  std::optional<int> norms;   // steps of which to look at the gradients' norm, with and without; none unless given
  bool compare_only = false;
  std::filesystem::path out;
  std::filesystem::path trace;    // the folder of traces; empty for no traces
  std::filesystem::path records;  // the folder of the records that plans were made from; empty for no records
  std::optional<std::uint64_t> stash_bytes;
  std::optional<std::uint64_t> window_bytes;
};

// Reads the command line into `options`. Returns the program's exit code if it is to end here: 0 after --help, else
// CLI11's code for the usage error that was printed. Throws std::invalid_argument for a shape that cannot have so
// many layers.
std::optional<int> parse_options(int argc, char** argv, StepOptions& options);

// The shape of these options, with their number of layers.
StepShape chosen_shape(const StepOptions& options);

}  // namespace ebb
