// Trains a byte-level language model on text, with saved activations offloaded: see --help.

#include <cstdio>
#include <exception>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include <c10/util/Exception.h>

#include "examples/common/atomic_file.h"
#include "examples/common/device.h"
#include "examples/llama/llama.h"
#include "examples/train/forked_process.h"
#include "examples/train/options.h"
#include "examples/train/progress.h"
#include "examples/train/report.h"
#include "examples/train/run.h"
#include "examples/train/sample.h"
#include "examples/train/text.h"
#include "examples/train/trainer.h"
#include "offload/base/human_bytes.h"
#include "policy/policies.h"
#include "streams/disk/mmap_allocator.h"

namespace ebb {
namespace {

constexpr const char* kPrompt = "\n";

Options offloader_options(const TrainOptions& options, bool enabled) {
  Options chosen = options.ebb;
  chosen.enabled = enabled;
  chosen.record_timeline = !options.report.empty();
  if (chosen.device_budget) {
    chosen.planned_minimum_bytes = options.minimum_bytes.value_or(kLeastSaved);
    return chosen;
  }
  chosen.policy =
      minimum_size(options.minimum_bytes.value_or(kLeastSaved),
                   options.recompute == Recompute::kNo ? offload_everything() : recompute(options.recompute));
  return chosen;
}

void print_start(const TrainOptions& options, const std::string& device, const Text& text) {
  std::printf("model: %.1f million parameters, %s, on %s\n", static_cast<double>(parameter_count(options.model)) / 1e6,
              options.dtype.c_str(), device.c_str());
  std::printf("text: %s in %llu files from %s\n", human_bytes(text.bytes.size()).c_str(),
              static_cast<unsigned long long>(text.files), text.source.c_str());
}

// What cannot be written is to be known before the training, not after it.
void check_outputs(const TrainOptions& options) {
  if (!options.report.empty()) {
    make_folder(options.report);
    require_writable(options.report / kReportFile);
  }
  if (!options.save.empty()) {
    require_writable(options.save);
  }
}

// What the training peaks at without ebb: its second step has the optimizer's state too.
std::uint64_t plain_peak(const TrainOptions& options, const Text& text) {
  const auto device = pick_device(options.device);
  DeviceMemory memory(device);
  Trainer trainer(options, text.bytes, device);
  Options off;
  off.enabled = false;
  Offloader none(off);
  constexpr int kSteps = 2;
  for (std::int64_t step = trainer.first_step(); step < trainer.first_step() + kSteps; ++step) {
    trainer.step(step, none);
  }
  return memory.peak_bytes();
}

void set_budget(TrainOptions& options, const Text& text) {
  if (!options.device_budget) {
    return;
  }
  std::uint64_t bytes = 0;
  if (const auto* const share = std::get_if<double>(&*options.device_budget)) {
    const auto measured = in_forked_process([&] { return std::to_string(plain_peak(options, text)); });
    const std::uint64_t peak = std::stoull(measured.answer);
    bytes = static_cast<std::uint64_t>(*share * static_cast<double>(peak));
    std::printf("budget: %s, of %s that this training takes without ebb\n", human_bytes(bytes).c_str(),
                human_bytes(peak).c_str());
  } else {
    bytes = std::get<std::uint64_t>(*options.device_budget);
    std::printf("budget: %s\n", human_bytes(bytes).c_str());
  }
  options.ebb.device_budget = DeviceBytes{bytes};
}

// One pass over the steps from the start. The main run also prints what is trained, saves and samples.
RunResult run_once(const TrainOptions& asked, const Text& text, bool offload, bool main_run) {
  TrainOptions options = asked;
  const auto device = pick_device(options.device);
  options.ebb.device = device;
  if (offload && device.is_cpu() && options.ebb.return_freed_memory) {
    MmapAllocator::install();  // below the allocator that counts, which an Offloader would leave in place
  }
  DeviceMemory memory(device);
  if (options.device_budget) {
    options.ebb.device_meter = memory.meter();
  }
  RunResult result;
  const std::string name = device_name(device);
  if (main_run) {
    print_start(options, name, text);
  }
  Trainer trainer(options, text.bytes, device);
  Offloader offloader(offloader_options(options, offload));
  offloader.exclude(trainer.model());
  if (offload && manages(options)) {
    trainer.manage(offloader, options);
  }
  {
    Progress progress(offload ? "training with ebb" : "training without ebb", options.until,
                      options.batch * options.seq);
    result = run_steps(trainer, offloader, memory, options, progress);
  }
  result.device = name;
  if (offload && manages(options)) {
    const Stats stats = offloader.stats();
    std::printf("managed: %llu tensors of %s, of which at most %s were on the device\n",
                static_cast<unsigned long long>(stats.managed.tensors), human_bytes(stats.managed.bytes).c_str(),
                human_bytes(stats.managed_on_device.peak_bytes).c_str());
  }
  if (offload && options.explain) {
    std::printf("\n%s", offloader.explain().c_str());
  }
  if (main_run && !options.save.empty()) {
    trainer.save(options.save, options.until);
    std::printf("saved %s\n", options.save.c_str());
  }
  if (!offload) {
    result.saved = plain_saved_memory(trainer, options);
  }
  if (main_run && options.sample > 0) {
    std::printf("sample:\n%s\n", printable(trainer.sample(kPrompt, options.sample)).c_str());
  }
  result.peak_resident_bytes = peak_resident_bytes();
  return result;
}

// The same in a process of its own, whose memory is not the other run's too.
RunResult run_apart(const TrainOptions& options, const Text& text, bool offload, bool main_run) {
  const auto measured = in_forked_process([&] { return to_bytes(run_once(options, text, offload, main_run)); });
  RunResult result = run_result_of(measured.answer);
  result.peak_resident_bytes = measured.peak_resident_bytes;
  return result;
}

int train(TrainOptions options) {
  if (options.compare) {
    use_deterministic_algorithms();
  }
  check_outputs(options);
  const Text text = options.text.empty() ? load_default_text() : load_text(options.text);
  set_budget(options, text);

  Report report;
  report.options = options;
  report.text = options.text.empty() ? std::filesystem::path("LibTorch's C++ headers") : options.text;
  report.text_bytes = text.bytes.size();
  const auto run = options.compare ? &run_apart : &run_once;
  report.run = run(options, text, options.offload, /*main_run=*/true);
  if (options.compare) {
    report.plain = run(options, text, /*offload=*/false, /*main_run=*/false);
  }
  report.first_step = options.until - static_cast<std::int64_t>(report.run.losses.size());
  std::printf("\n%s", summary(report).c_str());
  if (!options.report.empty()) {
    write_report(report, options.report);
    const bool drawn = draw_picture(options.report);
    std::printf("wrote report.json%s to %s\n", drawn ? " and memory.png" : "", options.report.c_str());
  }
  return report.plain && !report.losses_equal() ? 1 : 0;
}

// One line whatever LibTorch adds to its message.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

int fail(const std::string& why) {
  std::fflush(stdout);
  std::fprintf(stderr, "train: error: %s\n", first_line(why).c_str());
  return 1;
}

}  // namespace
}  // namespace ebb

int main(int argc, char** argv) {
  try {
    ebb::TrainOptions options;
    if (const auto code = ebb::parse_options(argc, argv, options)) {
      return *code;
    }
    return ebb::train(std::move(options));
  } catch (const c10::Error& error) {
    return ebb::fail(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return ebb::fail(error.what());
  }
}
