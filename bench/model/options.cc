#include "bench/model/options.h"

#include <algorithm>
#include <map>

#include <CLI/CLI.hpp>

#include "examples/common/command_line.h"

namespace ebb {
namespace {

// "1b", "3b" and "8b" have the sizes of Llama 3.2 and 3, with a head of their own. "tiny": for a CPU.
const std::map<std::string, LlamaConfig>& shapes() {
  static const std::map<std::string, LlamaConfig> shapes{
      {"tiny", {.vocab = 256, .dim = 256, .layers = 4, .heads = 8, .kv_heads = 4, .ffn = 704, .rope_theta = 1e4}},
      {"1b", {.vocab = 128256, .dim = 2048, .layers = 16, .heads = 32, .kv_heads = 8, .ffn = 8192, .rope_theta = 5e5}},
      {"3b", {.vocab = 128256, .dim = 3072, .layers = 28, .heads = 24, .kv_heads = 8, .ffn = 8192, .rope_theta = 5e5}},
      {"8b", {.vocab = 128256, .dim = 4096, .layers = 32, .heads = 32, .kv_heads = 8, .ffn = 14336, .rope_theta = 5e5}},
  };
  return shapes;
}

const std::map<std::string, UpdateIn> kUpdates{
    {"step", UpdateIn::kStep}, {"backward", UpdateIn::kBackward}, {"next_use", UpdateIn::kNextUse}};

}  // namespace

LlamaConfig ModelOptions::model() const {
  LlamaConfig config = shapes().at(shape);
  config.layers = layers.value_or(config.layers);
  return config;
}

std::string ModelOptions::update_name() const {
  return std::ranges::find(kUpdates, update, [](const auto& each) { return each.second; })->first;
}

bool ModelOptions::manages(const std::string& what) const { return std::ranges::find(home, what) != home.end(); }

std::optional<int> parse_options(int argc, char** argv, ModelOptions& options) {
  CLI::App app(
      "Trains a Llama whose weights, gradients and AdamW's states live in host memory, or without a GPU in a spill "
      "file.",
      "model");
  app.add_option("--shape", options.shape, "tiny (for a CPU), or of Llama's 1, 3 and 8 billion parameters")
      ->check(CLI::IsMember(shapes()))
      ->capture_default_str();
  app.add_option("--layers", options.layers, "Instead of the shape's own number")->check(positive());
  app.add_option("--batch", options.batch)->check(positive())->capture_default_str();
  app.add_option("--sequence", options.sequence)->check(positive())->capture_default_str();
  app.add_option("--configs", options.configs, "resident, managed")
      ->check(CLI::IsMember({"resident", "managed"}))
      ->capture_default_str();
  app.add_option("--dtype", options.dtype)->check(CLI::IsMember({"float32", "bfloat16"}))->capture_default_str();
  app.add_option("--device", options.device, "auto, cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--update", options.update, "When AdamW updates: in its step, in backward or at the next use")
      ->type_name("WHEN")
      ->transform(one_of(kUpdates))
      ->default_str("backward");
  app.add_flag_callback(
      "--update-on-cpu", [&] { options.update_on = UpdateOn::kCpu; }, "Update on the CPU, at home: other roundings");
  app.add_option("--cap", options.cap_bytes, "The most memory that LibTorch may take from the GPU")
      ->transform(size_text());
  CLI::Option* const managed = app.add_option("--managed", options.managed_bytes,
                                              "The most bytes of managed tensors on the device; default: 6GB")
                                   ->transform(size_text());
  app.add_option("--budget", options.budget_bytes,
                 "A budget of device memory, whose plan decides in place of --managed what is on the device, and which "
                 "blocks run again")
      ->transform(size_text())
      ->excludes(managed);
  app.add_option("--prefetch", options.prefetch_bytes, "How far ahead managed tensors are fetched; default: ebb's")
      ->transform(size_text());
  app.add_option("--resident", options.resident_bytes,
                 "So many bytes of managed tensors stay on the device; default: 0")
      ->transform(size_text());
  app.add_option("--home", options.home,
                 "What has its home in host memory beside the weights: gradients, states, or none of both")
      ->check(CLI::IsMember({"gradients", "states", "none"}))
      ->capture_default_str();
  app.add_option("--warm-up", options.warm_up, "Steps before timing")->check(positive())->capture_default_str();
  app.add_option("--steps", options.steps, "Timed steps")->check(positive())->capture_default_str();
  app.add_flag("--deterministic", options.deterministic,
               "LibTorch's deterministic kernels, so that losses and weights of two configurations can be compared");
  app.add_option("--trace", options.trace, "Write a Chrome trace of the last managed step here")->type_name("FILE");
  app.add_option("--out", options.out, "Write the results here as JSON")->type_name("FILE");
  return parse_command_line(app, argc, argv);
}

}  // namespace ebb
