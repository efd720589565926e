#include "examples/train/options.h"

#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include <CLI/CLI.hpp>

#include "examples/common/bytes.h"
#include "examples/common/command_line.h"

namespace ebb {
namespace {

constexpr const char* kDescription =
    "Trains a byte-level Llama-style model on text while ebb moves what autograd saves\n"
    "off the device: to host memory on a GPU, to disk on a machine without one.\n";

// Of --batch and --seq: their product is the length of a batch.
constexpr std::int64_t kLargestSize = 1 << 30;

const std::map<std::string, DiskIo> kDiskIo = {
    {"auto", DiskIo::kAuto}, {"uring", DiskIo::kUring}, {"threads", DiskIo::kThreads}};

void add_model_flags(CLI::App& app, TrainOptions& o) {
  const std::string group = "Model";
  app.add_option("--dim", o.model.dim, "Width of the model")->capture_default_str()->group(group);
  app.add_option("--layers", o.model.layers, "Number of blocks")->capture_default_str()->group(group);
  app.add_option("--heads", o.model.heads, "Query heads; divides --dim")->capture_default_str()->group(group);
  app.add_option("--kv-heads", o.model.kv_heads, "Key and value heads; divides --heads")
      ->capture_default_str()
      ->group(group);
  app.add_option("--ffn", o.model.ffn, "Width of the feed-forward part")->capture_default_str()->group(group);
  app.add_option("--dtype", o.dtype, "Type of weights and activations")
      ->check(CLI::IsMember({"float32", "bfloat16"}))
      ->capture_default_str()
      ->group(group);
}

void add_training_flags(CLI::App& app, TrainOptions& o) {
  const std::string group = "Training";
  app.add_option("--steps", o.steps, "Length of the run; the learning rate's schedule spans it")
      ->check(positive())
      ->capture_default_str()
      ->group(group);
  app.add_option("--until", o.until, "Stop after this step of the run (default: --steps)")
      ->check(positive())
      ->group(group);
  app.add_option("--batch", o.batch, "Sequences in a step")
      ->check(CLI::Range(std::int64_t{1}, kLargestSize))
      ->capture_default_str()
      ->group(group);
  app.add_option("--seq", o.seq, "Bytes in a sequence")
      ->check(CLI::Range(std::int64_t{1}, kLargestSize))
      ->capture_default_str()
      ->group(group);
  app.add_option("--lr", o.learning_rate, "Highest learning rate of AdamW")
      ->check(positive())
      ->capture_default_str()
      ->group(group);
  app.add_option("--weight-decay", o.weight_decay, "On matrices only")
      ->check(not_negative())
      ->capture_default_str()
      ->group(group);
  app.add_option("--warmup", o.warmup, "Steps until the highest learning rate; then a cosine down to a tenth")
      ->check(not_negative())
      ->capture_default_str()
      ->group(group);
  app.add_option("--seed", o.seed, "For weights, batches and sample")->capture_default_str()->group(group);
  app.add_option("--device", o.device, "auto, cpu, cuda or cuda:N; auto takes a GPU if there is one")
      ->capture_default_str()
      ->group(group);
  app.add_option("--text", o.text, "Train on this file, or all files under this folder (default: LibTorch's headers)")
      ->type_name("FILE|FOLDER")
      ->group(group);
}

void add_result_flags(CLI::App& app, TrainOptions& o) {
  const std::string group = "Results";
  app.add_flag("--compare", o.compare, "Train again without ebb; fail unless every loss is equal bit for bit")
      ->group(group);
  app.add_option("--report", o.report, "Write report.json and memory.png here")->type_name("FOLDER")->group(group);
  app.add_option("--save", o.save, "Write weights and optimizer state at the end")->type_name("FILE")->group(group);
  app.add_option("--resume", o.resume, "Continue from what --save wrote")->type_name("FILE")->group(group);
  app.add_option("--sample", o.sample, "Bytes of text to generate at the end")
      ->check(not_negative())
      ->capture_default_str()
      ->group(group);
}

// A number without a unit is a share, and sizes have one.
DeviceMemoryBudget parse_budget(const std::string& text) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  if (end != text.c_str() && *end != '\0') {
    return parse_bytes(text);
  }
  if (!(number > 0 && number <= 1)) {
    throw std::invalid_argument("'" + text + "' is neither a share in (0, 1] nor a size with a unit, such as 24GiB");
  }
  return number;
}

void add_plan_flags(CLI::App& app, TrainOptions& o) {
  const std::string group = "Planning";
  auto* const budget =
      app.add_option_function<std::string>(
             "--device-budget",
             [&o](const std::string& text) {
               try {
                 o.device_budget = parse_budget(text);
               } catch (const std::invalid_argument& error) {
                 throw CLI::ValidationError("--device-budget", error.what());
               }
             },
             "Plan what to keep, move and recompute so that device memory stays within SIZE, or within this share of "
             "what the same training takes without ebb (which two steps of it then find out first)")
          ->type_name("SIZE|SHARE")
          ->group(group);
  for (const char* const other : {"--stash", "--window", "--recompute", "--no-offload"}) {
    budget->excludes(app.get_option(other));
  }
  app.add_flag("--budget-is-a-wish", o.ebb.device_budget_is_a_wish,
               "Where the budget cannot be met, warn and take as little as can be")
      ->needs(budget)
      ->group(group);
  app.add_flag("--explain", o.explain, "Print the plan, and what it took, at the end")->needs(budget)->group(group);
}

void add_ebb_flags(CLI::App& app, TrainOptions& o, CLI::Option*& no_offload, bool& pageable) {
  const std::string group = "Offloading (sizes such as 64MiB or 2GB)";
  no_offload = app.add_flag("!--no-offload", o.offload, "Train without ebb")->group(group);
  const auto size = size_text();
  app.add_option("--stash", o.ebb.stash_bytes, "Device memory for sources whose copy out is not done (default: chosen)")
      ->transform(size)
      ->group(group);
  app.add_option("--window", o.ebb.window_bytes, "Device memory for what is prefetched (default: chosen)")
      ->transform(size)
      ->group(group);
  app.add_option(
         "--minimum", o.minimum_bytes,
         "Smaller storages stay on the device (default: 1MiB; 64KiB for what --manage and --optimizer-home move)")
      ->transform(size)
      ->group(group);
  const auto home = [] { return one_of(kHomeWords); };
  app.add_option("--manage", o.managed,
                 "Keep weights and gradients off the device but around their uses: host or disk, where saves then go, "
                 "too. Host "
                 "saves no RAM on a CPU, and is for trying out what is meant for a GPU")
      ->type_name("HOME")
      ->transform(home())
      ->group(group);
  app.add_option("--optimizer-home", o.optimizer_home, "The same of what the optimizer keeps: host or disk")
      ->type_name("HOME")
      ->transform(home())
      ->group(group);
  app.add_option("--managed-bytes", o.managed_bytes,
                 "The most of all these on the device at once (default: 8MiB; with a budget, what its plan says)")
      ->transform(size)
      ->group(group);
  app.add_option(
         "--recompute", o.recompute,
         "What to compute again in backward instead of moving it: none, cheap (elementwise operations, norms) or "
         "all (matmul and attention too) (default: none)")
      ->type_name("WHAT")
      ->transform(one_of(kRecomputeWords))
      ->group(group);
  app.add_option("--capacity", o.ebb.capacity_bytes, "Most host memory or disk to use (default: no limit)")
      ->transform(size)
      ->group(group);
  app.add_option("--spill-folder", o.ebb.spill_folder, "CPU: where the spill file is made")
      ->type_name("FOLDER")
      ->capture_default_str()
      ->group(group);
  app.add_option("--io", o.ebb.disk_io, "CPU: auto, uring or threads")
      ->type_name("KIND")
      ->transform(one_of(kDiskIo))
      ->group(group);
  app.add_flag("!--keep-freed-memory", o.ebb.return_freed_memory,
               "CPU: leave freed memory with malloc instead of returning it to the system")
      ->group(group);
  app.add_flag("--pageable", pageable, "GPU: ordinary host memory instead of pinned")->group(group);
}

void validate_together(const TrainOptions& o) {
  validate(o.model);
  if (o.managed_bytes && !manages(o)) {
    throw std::invalid_argument("--managed-bytes is the bound of what --manage and --optimizer-home move");
  }
  if (o.managed && o.optimizer_home && o.managed != o.optimizer_home) {
    throw std::invalid_argument("--manage and --optimizer-home name two homes, and one offloader has one");
  }
  if (o.until > o.steps) {
    throw std::invalid_argument("--until must be at most --steps: " + std::to_string(o.until) + " is over " +
                                std::to_string(o.steps));
  }
  std::error_code not_there;
  if (o.compare && std::filesystem::equivalent(o.resume, o.save, not_there)) {
    throw std::invalid_argument("--compare starts twice from --resume " + o.resume.string() +
                                ", so --save must name another file");
  }
}

}  // namespace

std::optional<int> parse_options(int argc, char** argv, TrainOptions& options) {
  CLI::App app(kDescription, "train");
  CLI::Option* no_offload = nullptr;
  bool pageable = false;
  add_model_flags(app, options);
  add_training_flags(app, options);
  add_result_flags(app, options);
  add_ebb_flags(app, options, no_offload, pageable);
  add_plan_flags(app, options);
  app.get_option("--compare")->excludes(no_offload);
  app.get_option("--manage")->excludes(no_offload);
  app.get_option("--optimizer-home")->excludes(no_offload);
  if (const std::optional<int> status = parse_command_line(app, argc, argv)) {
    return status;
  }
  if (app.count("--until") == 0) {
    options.until = options.steps;
  }
  if (pageable) {
    options.ebb.host_memory = HostMemory::kPageable;
  }
  validate_together(options);
  if (manages(options) && !options.managed_bytes && !options.device_budget) {
    options.managed_bytes = kMostManaged;
  }
  options.ebb.home = options.managed.value_or(options.optimizer_home.value_or(Home::kAuto));
  return std::nullopt;
}

}  // namespace ebb
