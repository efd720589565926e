#pragma once

#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include "bench/device_buffer.h"
#include "bench/progress_curve.h"
#include "bench/raw_link.h"
#include "streams/block.h"
#include "streams/pinned_tier.h"

namespace ebb {

// The rate of ebb's own PinnedTier, with copies of one size. Its lanes are its own, so the host's clock times it: from
// before the first copy is queued until each ticket is done.
//
// Threads: one at a time.
class PinnedTierRate {
 public:
  static constexpr std::size_t kBlockBytes = std::size_t{64} << 20;

  // Takes 2 GiB of the device's memory and of the host's. Throws std::runtime_error where the host has no room,
  // c10::Error where the device has none.
  explicit PinnedTierRate(c10::Device device);

  // GB/s (1e9 bytes) of so many copies, as many as a raw measurement has. Throws what the tickets throw.
  double alone(Direction direction, std::size_t copies);

  // Each direction by a thread of its own. First device to host, then host to device.
  std::pair<double, double> together(std::size_t copies);

 private:
  using Clock = std::chrono::steady_clock;

  std::vector<Block> acquire_blocks();
  ProgressCurve copy(Direction direction, std::size_t copies, Clock::time_point origin);

  PinnedTier tier_;
  DeviceBuffer out_source_;
  DeviceBuffer in_target_;
  std::vector<Block> out_blocks_;
  std::vector<Block> in_blocks_;
};

}  // namespace ebb
