#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "examples/train/options.h"
#include "offload/offloader.h"
#include "offload/stats.h"

namespace ebb {

class DeviceMemory;
class Progress;
class Trainer;

// The device memory that autograd's saves held.
struct SavedMemory {
  std::uint64_t peak_bytes = 0;
  std::vector<TimelineSample> timeline;  // of one step; empty unless a report was asked for
};

// The results of one pass over the steps.
struct RunResult {
  std::string device;  // the device's name
  std::vector<float> losses;
  std::vector<double> step_ms;
  SavedMemory saved;
  std::uint64_t peak_device_bytes = 0;
  std::uint64_t peak_resident_bytes = 0;  // of the process that ran the steps
  Stats stats;

  // The median time of the steps from the third on, which have earlier steps to learn from; of all steps where there
  // are fewer.
  [[nodiscard]] double ms_per_step() const;
  [[nodiscard]] std::uint64_t bytes_offloaded_per_step() const;
};

// Trains from the trainer's first step to `options.until`. The timeline is of the last step. Throws
// std::runtime_error after the first step in which a saved tensor found no room, unless the options limit the room.
RunResult run_steps(Trainer& trainer, Offloader& offloader, const DeviceMemory& memory, const TrainOptions& options,
                    Progress& progress);

// The memory that a step's saves hold without ebb: one more forward and backward, with an offloader that keeps
// everything, so that both sides of a comparison are counted in the same way. The measured steps run without that
// offloader.
SavedMemory plain_saved_memory(Trainer& trainer, const TrainOptions& options);

// A result as bytes, to the last bit, for another process of the same program.
std::string to_bytes(const RunResult& result);

// The inverse of to_bytes. Requires bytes that to_bytes returned.
RunResult run_result_of(std::string_view bytes);

}  // namespace ebb
