#include "bench/link_options.h"

#include <CLI/CLI.hpp>

#include "bench/command_line.h"

namespace ebb {

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

}  // namespace ebb
