#include "bench/pinned_tier_rate.h"

#include <future>
#include <latch>
#include <optional>
#include <stdexcept>

#include "bench/bytes.h"
#include "streams/ticket.h"

namespace ebb {
namespace {

constexpr std::size_t kBlocks = 16;  // a direction

PinnedTier::Config on(c10::Device device) {
  PinnedTier::Config config;
  config.device = device;
  return config;
}

}  // namespace

PinnedTierRate::PinnedTierRate(c10::Device device)
    : tier_(on(device)),
      out_source_(device, kBlocks * kBlockBytes),
      in_target_(device, kBlocks * kBlockBytes),
      out_blocks_(acquire_blocks()),
      in_blocks_(acquire_blocks()) {}

std::vector<Block> PinnedTierRate::acquire_blocks() {
  std::vector<Block> blocks;
  for (std::size_t i = 0; i < kBlocks; ++i) {
    std::optional<Block> block = tier_.try_acquire(kBlockBytes);
    if (!block) {
      throw std::runtime_error("the system has no " + format_bytes(kBlockBytes) + " more of pinned host memory");
    }
    blocks.push_back(*std::move(block));
  }
  return blocks;
}

double PinnedTierRate::alone(Direction direction, std::size_t copies) {
  return rate_gb_per_s(copy(direction, copies, Clock::now()));
}

std::pair<double, double> PinnedTierRate::together(std::size_t copies) {
  const Clock::time_point origin = Clock::now();
  std::latch both_run(2);
  std::future<ProgressCurve> in = std::async(std::launch::async, [&] {
    both_run.arrive_and_wait();
    return copy(Direction::kHostToDevice, copies, origin);
  });
  both_run.arrive_and_wait();
  const ProgressCurve out = copy(Direction::kDeviceToHost, copies, origin);
  return rates_together(out, in.get());
}

// The same memory comes again after kBlocks copies. No copy waits for an earlier one of it: a lane runs its copies one
// after another, and what the bytes are is of no interest here.
ProgressCurve PinnedTierRate::copy(Direction direction, std::size_t copies, Clock::time_point origin) {
  const auto ms = [&] { return std::chrono::duration<double, std::milli>(Clock::now() - origin).count(); };
  ProgressCurve curve{{ms(), 0}};
  std::vector<Ticket> tickets;
  for (std::size_t i = 0; i < copies; ++i) {
    const std::size_t at = i % kBlocks;
    tickets.push_back(direction == Direction::kDeviceToHost
                          ? tier_.copy_out(out_blocks_[at], out_source_.data() + at * kBlockBytes, {})
                          : tier_.copy_in(in_target_.data() + at * kBlockBytes, in_blocks_[at], {}));
  }
  for (const Ticket& ticket : tickets) {
    ticket->synchronize();
    curve.push_back({ms(), curve.back().bytes + static_cast<double>(kBlockBytes)});
  }
  return curve;
}

}  // namespace ebb
