#pragma once

#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include "bench/common/device_buffer.h"
#include "bench/link/raw_link.h"
#include "streams/base/block_pool.h"
#include "streams/gpu/pinned_tier.h"

namespace ebb {

// The rate of ebb's own PinnedTier, with copies of one size, each behind a point of the compute stream as a save's is.
// The tier's lanes are not visible from outside, so the host's clock times the copies, and a copy's cost to the host is
// in the rate: from before the first copy is asked for until each ticket is done.
//
// Threads: one at a time.
class PinnedTierRate {
 public:
  // Takes at most 2 GiB of the device's memory and of the host's. Throws std::runtime_error where the host has no
  // memory left, c10::Error where the device has none left.
  PinnedTierRate(c10::Device device, std::size_t copy_bytes);

  // How many copies a measurement has.
  [[nodiscard]] std::size_t copies() const;

  // GB/s (1e9 bytes). Throws the errors of the tickets.
  double alone(Direction direction);

  // Both directions at once, each by a thread of its own. The first result is device to host, the second host to
  // device.
  std::pair<double, double> together();

 private:
  using Clock = std::chrono::steady_clock;

  std::vector<Block> acquire_blocks();
  ProgressCurve copy(Direction direction, Clock::time_point origin);

  const std::size_t copy_bytes_;
  PinnedTier tier_;
  DeviceBuffer out_source_;
  DeviceBuffer in_target_;
  std::vector<Block> out_blocks_;
  std::vector<Block> in_blocks_;
};

}  // namespace ebb
