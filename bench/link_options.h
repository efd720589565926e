#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace ebb {

// What a user of the link benchmark may set, after parsing.
struct LinkOptions {
  std::vector<std::string> parts{"link", "disk"};
  std::string device = "auto";
  std::filesystem::path spill_folder = "/var/tmp";
  std::uint64_t disk_bytes = std::uint64_t{2} << 30;  // each of two files, one raw and one of the tier
  int repetitions = 5;                                // those that count, after one that does not
  std::filesystem::path out;
};

// Reads the command line into `options`. Returns the program's exit code if it is to end here: 0 after --help, else
// CLI11's code for the usage error that was printed.
std::optional<int> parse_options(int argc, char** argv, LinkOptions& options);

}  // namespace ebb
