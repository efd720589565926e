#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace ebb {

// What a user of the seeds benchmark may set, after parsing.
struct SeedsOptions {
  std::vector<std::string> cases{"stack", "llama", "chain", "sum", "trained"};
  std::string device = "auto";
  bool tiny = false;  // a Llama for a CPU
  int warm_up = 3;
  int pairs = 10;
  bool compare_only = false;
  std::filesystem::path out;
};

// Reads the command line into `options`. Returns the program's exit code if it is to end here: 0 after --help, else
// CLI11's code for the usage error that was printed.
std::optional<int> parse_options(int argc, char** argv, SeedsOptions& options);

}  // namespace ebb
