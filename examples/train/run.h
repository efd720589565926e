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

// What autograd's saves held on the device.
struct SavedMemory {
  std::uint64_t peak_bytes = 0;
  std::vector<TimelineSample> timeline;  // of one step; empty unless a report was asked for
};

// What one pass over the steps gave.
struct RunResult {
  std::string device;  // its name
  std::vector<float> losses;
  std::vector<double> step_ms;
  SavedMemory saved;
  std::uint64_t peak_device_bytes = 0;
  std::uint64_t peak_resident_bytes = 0;  // of the process that did it
  Stats stats;

  // The median of the steps from the third on, which have a step before them to learn from, where there are such.
  [[nodiscard]] double ms_per_step() const;
  [[nodiscard]] std::uint64_t bytes_offloaded_per_step() const;
};

// Trains from the trainer's first step to `options.until`. The timeline is that of the last step. Throws
// std::runtime_error after the first step in which a saved tensor found no room, unless the options limit the room.
RunResult run_steps(Trainer& trainer, Offloader& offloader, const DeviceMemory& memory, const TrainOptions& options,
                    Progress& progress);

// What a step's saves hold without ebb: one more forward and backward, with an offloader that keeps everything, so that
// both sides of a comparison are counted in the same way. The steps themselves run without it.
SavedMemory plain_saved_memory(Trainer& trainer, const TrainOptions& options);

// A result as bytes, to the last bit, for another process of the same program.
std::string to_bytes(const RunResult& result);

// Only of what to_bytes gave.
RunResult run_result_of(std::string_view bytes);

}  // namespace ebb
