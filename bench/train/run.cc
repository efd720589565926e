#include "bench/train/run.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "bench/bytes.h"
#include "bench/device.h"
#include "bench/llama.h"
#include "bench/train/progress.h"
#include "bench/train/trainer.h"
#include "policy/callback.h"

namespace ebb {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kLearningSteps = 2;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

void require_room(const Stats& stats, std::int64_t step, const TrainOptions& options) {
  const Count& refused = stats.kept_for(Kept::kNoRoom);
  if (refused.tensors == 0 || options.ebb.capacity_bytes) {
    return;
  }
  const bool disk = options.ebb.device->is_cpu();
  throw std::runtime_error("step " + std::to_string(step + 1) + ": no room for " + std::to_string(refused.tensors) +
                           " saved tensors (" + format_bytes(refused.bytes) + ") in " +
                           (disk ? "a spill file in " + options.ebb.spill_folder.string() : "host memory") +
                           ", which holds " + format_bytes(stats.pool.now_bytes) +
                           (disk ? ": free space or choose another --spill-folder" : ": free memory") +
                           ", or accept what there is with --capacity");
}

}  // namespace

double RunResult::ms_per_step() const {
  std::vector<double> steady = step_ms;
  if (steady.size() > kLearningSteps) {
    steady.erase(steady.begin(), steady.begin() + kLearningSteps);
  }
  const auto middle = steady.begin() + static_cast<std::ptrdiff_t>(steady.size() / 2);
  std::nth_element(steady.begin(), middle, steady.end());
  return *middle;
}

std::uint64_t RunResult::bytes_offloaded_per_step() const { return stats.offloaded.bytes / losses.size(); }

RunResult run_steps(Trainer& trainer, Offloader& offloader, const DeviceMemory& memory, const TrainOptions& options,
                    Progress& progress) {
  RunResult result;
  for (std::int64_t index = trainer.first_step(); index < options.until; ++index) {
    static_cast<void>(offloader.take_timeline());  // only the last step's is wanted
    const auto start = Clock::now();
    result.losses.push_back(trainer.step(index, offloader));
    result.step_ms.push_back(ms_since(start));
    result.stats = offloader.stats();
    require_room(result.stats, index, options);
    progress.show({.step = index + 1,
                   .loss = result.losses.back(),
                   .ms = result.step_ms.back(),
                   .device_peak_bytes = memory.peak_bytes(),
                   .offloaded_bytes = result.stats.offloaded.bytes,
                   .stalls = result.stats.stalls});
  }
  result.saved = {result.stats.saved_on_device.peak_bytes, offloader.take_timeline()};
  result.peak_device_bytes = memory.peak_bytes();
  return result;
}

SavedMemory plain_saved_memory(Trainer& trainer, const TrainOptions& options) {
  Options keeping;
  keeping.device = options.ebb.device;
  keeping.spill_folder = options.ebb.spill_folder;
  keeping.return_freed_memory = false;  // the process is to stay as it would be without ebb
  keeping.record_timeline = true;
  keeping.policy = callback([](const Candidate&) { return Decision::kKeep; });
  Offloader offloader(keeping);
  offloader.exclude(trainer.model());
  trainer.forward_backward(options.until - 1, offloader);
  return {offloader.stats().saved_on_device.peak_bytes, offloader.take_timeline()};
}

}  // namespace ebb
