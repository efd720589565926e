#include "examples/train/run.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "examples/common/device.h"
#include "examples/llama/llama.h"
#include "examples/train/progress.h"
#include "examples/train/trainer.h"
#include "offload/base/human_bytes.h"
#include "policy/policies.h"

namespace ebb {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kLearningSteps = 2;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

void require_room(const Stats& stats, std::int64_t step, const TrainOptions& options) {
  const Count& refused = stats.kept_for(KeptReason::kNoRoom);
  if (refused.tensors == 0 || options.ebb.capacity_bytes) {
    return;
  }
  const bool disk = options.ebb.device->is_cpu() && options.ebb.home != Home::kHost;
  throw std::runtime_error("step " + std::to_string(step + 1) + ": no room for " + std::to_string(refused.tensors) +
                           " saved tensors (" + human_bytes(refused.bytes) + ") in " +
                           (disk ? "a spill file in " + options.ebb.spill_folder.string() : "host memory") +
                           ", which holds " + human_bytes(stats.pool.now_bytes) +
                           (disk ? ": free space or choose another --spill-folder" : ": free memory") +
                           ", or accept what there is with --capacity");
}

// Every field of a result, in one order for both directions.
template <typename Result, typename Each>
void for_each_field(Result& result, Each each) {
  each(result.device);
  each(result.losses);
  each(result.step_ms);
  each(result.saved.peak_bytes);
  each(result.saved.timeline);
  each(result.peak_device_bytes);
  each(result.peak_resident_bytes);
  each(result.stats);
}

struct Writer {
  std::string& out;

  template <typename T>
  void operator()(const T& value) {
    if constexpr (std::is_trivially_copyable_v<T>) {
      out.append(reinterpret_cast<const char*>(&value), sizeof(T));
    } else {
      static_assert(std::is_trivially_copyable_v<typename T::value_type>);
      (*this)(value.size());
      out.append(reinterpret_cast<const char*>(value.data()), value.size() * sizeof(typename T::value_type));
    }
  }
};

struct Reader {
  std::string_view& in;

  void take(void* to, std::size_t bytes) {
    if (bytes != 0) {
      std::memcpy(to, in.data(), bytes);
    }
    in.remove_prefix(bytes);
  }

  template <typename T>
  void operator()(T& value) {
    if constexpr (std::is_trivially_copyable_v<T>) {
      take(&value, sizeof(T));
    } else {
      std::size_t count = 0;
      take(&count, sizeof(count));
      value.resize(count);
      take(value.data(), count * sizeof(typename T::value_type));
    }
  }
};

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
  keeping.home = options.ebb.home;
  keeping.spill_folder = options.ebb.spill_folder;
  keeping.return_freed_memory = false;  // the process is to stay as it would be without ebb
  keeping.record_timeline = true;
  keeping.policy = callback([](const Candidate&) { return Decision::kKeep; });
  Offloader offloader(keeping);
  offloader.exclude(trainer.model());
  trainer.forward_backward(options.until - 1, offloader);
  return {offloader.stats().saved_on_device.peak_bytes, offloader.take_timeline()};
}

std::string to_bytes(const RunResult& result) {
  std::string bytes;
  for_each_field(result, Writer{bytes});
  return bytes;
}

RunResult run_result_of(std::string_view bytes) {
  RunResult result;
  for_each_field(result, Reader{bytes});
  return result;
}

}  // namespace ebb
