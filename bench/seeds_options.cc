#include "bench/seeds_options.h"

#include <CLI/CLI.hpp>

#include "bench/command_line.h"

namespace ebb {

std::optional<int> parse_options(int argc, char** argv, SeedsOptions& options) {
  CLI::App app("Measures cases that others have published, without ebb and with it.", "seeds");
  app.add_option("--cases", options.cases)
      ->check(CLI::IsMember({"stack", "llama", "chain", "sum", "trained"}))
      ->capture_default_str();
  app.add_option("--device", options.device, "auto, cpu, cuda or cuda:N")->capture_default_str();
  app.add_flag("--tiny", options.tiny, "Instead of Llama-3-8B's width, one for a CPU");
  app.add_option("--warm-up", options.warm_up, "Steps of each before timing")->check(positive())->capture_default_str();
  app.add_option("--pairs", options.pairs, "Timed steps of each")->check(positive())->capture_default_str();
  auto* const out = app.add_option("--out", options.out, "Write the results here as JSON")->type_name("FILE");
  app.add_flag("--compare-only", options.compare_only, "Only compare the gradients, into --out")->needs(out);
  return parse_command_line(app, argc, argv);
}

}  // namespace ebb
