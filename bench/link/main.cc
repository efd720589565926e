// Question: what are the limits of this machine's link and disk, which no offloader can beat, and how much of them do
// ebb's own tiers reach?
//
// Each rate is given as the median and the 10th and 90th percentile over repetitions, after one that does not count, in
// GB/s (1e9 bytes). A tier is measured in turn with what it is compared to, so that drift meets both alike.

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "bench/common/result_rows.h"
#include "bench/link/rows.h"
#include "examples/common/command_line.h"
#include "examples/common/device.h"

namespace ebb {
namespace {

// What a user of this benchmark may set, after parsing.
struct LinkOptions {
  std::vector<std::string> parts{"link", "disk"};
  std::string device = "auto";
  std::filesystem::path spill_folder = "/var/tmp";
  std::uint64_t disk_bytes = std::uint64_t{2} << 30;  // each of two files, one raw and one of the tier
  int repetitions = 5;                                // those that count, after one that does not
  std::filesystem::path out;
};

std::optional<int> parse_options(int argc, char** argv, LinkOptions& options) {
  CLI::App app("Measures this machine's link to its GPU and its disk, and how much of each ebb's tiers reach.", "link");
  app.add_option("--parts", options.parts, "What to measure; without a GPU only the disk")
      ->check(CLI::IsMember({"link", "disk"}))
      ->capture_default_str();
  app.add_option("--device", options.device, "auto, cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--spill-folder", options.spill_folder, "On the disk to measure")
      ->type_name("FOLDER")
      ->capture_default_str();
  app.add_option("--disk-bytes", options.disk_bytes, "Size of each of the two or three files there; default: 2GiB")
      ->transform(size_text());
  app.add_option("--repetitions", options.repetitions, "Of each measurement, after one that does not count")
      ->check(positive())
      ->capture_default_str();
  app.add_option("--out", options.out, "Write the results here as JSON")->type_name("FILE");
  return parse_command_line(app, argc, argv);
}

bool wanted(const LinkOptions& options, const char* part) {
  return std::find(options.parts.begin(), options.parts.end(), part) != options.parts.end();
}

int run(int argc, char** argv) {
  LinkOptions options;
  if (const auto code = parse_options(argc, argv, options)) {
    return *code;
  }
  const c10::Device device = pick_device(options.device);
  const DiskPlan disk{options.spill_folder, options.disk_bytes, options.repetitions, device_name(device)};
  ResultRows rows(options.out);
  if (wanted(options, "disk")) {
    check(disk);  // before the link is measured rather than after it
  }
  if (wanted(options, "link")) {
    if (device.is_cuda()) {
      add_link_rows(device, options.repetitions, rows);
    } else {
      std::cerr << "link: without a GPU there is no link to measure\n";
    }
  }
  if (wanted(options, "disk")) {
    add_disk_rows(disk, rows);
  }
  rows.save();
  return 0;
}

}  // namespace
}  // namespace ebb

int main(int argc, char** argv) {
  return ebb::run_benchmark("link", [&] { return ebb::run(argc, argv); });
}
