#include "bench/link/pinned_tier_rate.h"

#include <algorithm>
#include <future>
#include <latch>
#include <optional>
#include <stdexcept>

#include "offload/base/human_bytes.h"
#include "streams/base/ticket.h"

namespace ebb {
namespace {

constexpr std::size_t kMostBytes = std::size_t{1} << 30;  // a direction
constexpr std::size_t kMostBlocks = 4096;
constexpr std::size_t kLeastCopies = 64;

std::size_t blocks(std::size_t copy_bytes) { return std::min(kMostBytes / copy_bytes, kMostBlocks); }

PinnedTier::Config on(c10::Device device) {
  PinnedTier::Config config;
  config.device = device;
  return config;
}

}  // namespace

PinnedTierRate::PinnedTierRate(c10::Device device, std::size_t copy_bytes)
    : copy_bytes_(copy_bytes),
      tier_(on(device)),
      out_source_(device, blocks(copy_bytes) * copy_bytes),
      in_target_(device, blocks(copy_bytes) * copy_bytes),
      out_blocks_(acquire_blocks()),
      in_blocks_(acquire_blocks()) {}

std::vector<Block> PinnedTierRate::acquire_blocks() {
  std::vector<Block> result;
  while (result.size() < blocks(copy_bytes_)) {
    std::optional<Block> block = tier_.try_acquire(copy_bytes_);
    if (!block) {
      throw std::runtime_error("the system has no " + human_bytes(copy_bytes_) + " more of pinned host memory");
    }
    result.push_back(*std::move(block));
  }
  return result;
}

std::size_t PinnedTierRate::copies() const { return std::max(out_blocks_.size(), kLeastCopies); }

double PinnedTierRate::alone(Direction direction) { return rate_gb_per_s(copy(direction, Clock::now())); }

std::pair<double, double> PinnedTierRate::together() {
  const Clock::time_point origin = Clock::now();
  std::latch both_run(2);
  std::future<ProgressCurve> in = std::async(std::launch::async, [&] {
    both_run.arrive_and_wait();
    return copy(Direction::kHostToDevice, origin);
  });
  both_run.arrive_and_wait();
  const ProgressCurve out = copy(Direction::kDeviceToHost, origin);
  return rates_together(out, in.get());
}

// The same memory comes again where there are more copies than blocks. No copy waits for an earlier one of it: a lane
// runs its copies one after another, and what the bytes are is of no interest here.
ProgressCurve PinnedTierRate::copy(Direction direction, Clock::time_point origin) {
  const auto ms = [&] { return std::chrono::duration<double, std::milli>(Clock::now() - origin).count(); };
  ProgressCurve curve{{ms(), 0}};
  std::vector<Ticket> tickets;
  for (std::size_t i = 0; i < copies(); ++i) {
    const std::size_t at = i % out_blocks_.size();
    const After after(WaitPoint::kCaller, tier_.current_stream());
    tickets.push_back(direction == Direction::kDeviceToHost
                          ? tier_.copy_out(out_blocks_[at], out_source_.data() + at * copy_bytes_, after)
                          : tier_.copy_in(in_target_.data() + at * copy_bytes_, in_blocks_[at], after));
  }
  for (std::size_t i = 0; i < tickets.size(); ++i) {
    if (i + 1 == tickets.size() || tickets[i] != tickets[i + 1]) {  // those of a batch share one
      tickets[i]->synchronize();
      curve.push_back({ms(), static_cast<double>((i + 1) * copy_bytes_)});
    }
  }
  return curve;
}

}  // namespace ebb
