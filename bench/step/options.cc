#include "bench/step/options.h"

#include <CLI/CLI.hpp>

#include "examples/common/command_line.h"

namespace ebb {

std::optional<int> parse_options(int argc, char** argv, StepOptions& options) {
  CLI::App app("Times a training step without ebb and with ebb, side by side.", "step");
  std::vector<std::string> shapes;
  for (const StepShape& shape : step_shapes()) {
    shapes.push_back(shape.name);
  }
  app.add_option("--shape", options.shape)->check(CLI::IsMember(shapes))->capture_default_str();
  app.add_option("--layers", options.layers, "Instead of the shape's own number")->check(positive());
  app.add_option("--dtypes", options.dtypes)
      ->check(CLI::IsMember({"float32", "tf32", "bfloat16"}))
      ->capture_default_str();
  app.add_option("--configs", options.configs,
                 "none, offload, lean, recompute, mix, evict, checkpoint, operations:NAME,NAME..., budget:SIZE, "
                 "slowdown:FRACTION or least")
      ->capture_default_str();
  app.add_option("--device", options.device, "auto, cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--warm-up", options.warm_up, "Steps of each before timing")->check(positive());
  app.add_option("--pairs", options.pairs, "Timed steps of each")->check(positive())->capture_default_str();
  app.add_option("--norms", options.norms, "Steps of which to count the gradients' norms, beside plain autograd's")
      ->check(positive());
  app.add_option("--steady", options.steady, "Steps over which to look for allocations and leaks")->check(positive());
  app.add_option("--peaks", options.peaks, "Steps of which to find the largest peak of device memory")
      ->check(positive());
  app.add_option("--stash", options.stash_bytes, "Default: chosen")->transform(size_text());
  app.add_option("--window", options.window_bytes, "Default: chosen")->transform(size_text());
  auto* const out = app.add_option("--out", options.out, "Write the results here as JSON")->type_name("FILE");
  app.add_option("--trace", options.trace, "Write a Chrome trace of one step of each configuration into this folder")
      ->type_name("FOLDER");
  app.add_option("--records", options.records, "Write what each plan was made from into this folder")
      ->type_name("FOLDER");
  app.add_flag("--compare-only", options.compare_only, "Only compare the gradients of the first dtype, into --out")
      ->needs(out);
  if (const std::optional<int> status = parse_command_line(app, argc, argv)) {
    return status;
  }
  static_cast<void>(chosen_shape(options));
  return std::nullopt;
}

StepShape chosen_shape(const StepOptions& options) {
  const StepShape shape = step_shape(options.shape);
  return options.layers ? with_layers(shape, *options.layers) : shape;
}

}  // namespace ebb
