#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace ebb {

// What a user of the fits benchmark may set, after parsing. Sizes are bytes.
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

// Reads the command line into `options`. Returns the program's exit code if it is to end here: 0 after --help, else
// CLI11's code for the usage error that was printed.
std::optional<int> parse_options(int argc, char** argv, FitsOptions& options);

}  // namespace ebb
