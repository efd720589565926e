#include "bench/fits_options.h"

#include <CLI/CLI.hpp>

#include "bench/command_line.h"

namespace ebb {

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

}  // namespace ebb
