#include "streams/base/block_pool.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace ebb {

namespace {

constexpr std::uint64_t kLeastGrowthBytes = 64ull << 20;
constexpr std::uint64_t kMostGrowthBytes = 1ull << 30;

std::size_t round_down(std::uint64_t bytes) { return bytes / BlockPool::kAlignment * BlockPool::kAlignment; }

std::size_t round_up(std::size_t bytes) { return round_down(bytes + (BlockPool::kAlignment - 1)); }

}  // namespace

BlockPool::BlockPool(std::unique_ptr<Backing> backing, std::optional<std::uint64_t> capacity_bytes)
    : capacity_bytes_(capacity_bytes), backing_(backing.release()) {}

BlockPool::~BlockPool() {
  if (process_.forked()) {  // whoever would finish that work is not in this process
    return;
  }
  for (const Ticket& gate : free_.gates()) {
    if (!in_force(WaitPoint::kPoolEnd)) {
      break;
    }
    try {
      gate->synchronize();
    } catch (...) {
      // A user that failed has stopped using the bytes all the same; the failure reaches the owner of that work.
    }
  }
}

std::optional<Block> BlockPool::try_acquire(std::size_t bytes) {
  process_.check("this pool");
  if (bytes == 0) {
    throw std::invalid_argument("BlockPool::try_acquire: a block of 0 bytes was asked for, at least 1 is needed");
  }
  if (bytes > std::numeric_limits<std::size_t>::max() - kAlignment) {
    return std::nullopt;
  }
  if (std::optional<Block> block = try_lease(bytes)) {
    return block;
  }
  const MutexLock growing(growth_mutex_);
  if (std::optional<Block> block = try_lease(bytes)) {  // another thread grew the pool, or gave something back
    return block;
  }
  const std::optional<Backing::Range> grown = grow(round_up(bytes));
  if (!grown) {
    return std::nullopt;
  }
  std::optional<RangeAllocator::Range> range;
  {
    // In one locked region, so that no other thread takes the new bytes before this one.
    const MutexLock lock(mutex_);
    free_.add(grown->address, grown->bytes, {});
    stats_.capacity_bytes += grown->bytes;
    ++stats_.growths;
    range = take(round_up(bytes));
  }
  return make_block(*std::move(range), bytes);
}

PoolStats BlockPool::stats() const {
  const MutexLock lock(mutex_);
  return stats_;
}

void BlockPool::release(std::uint64_t address, std::size_t bytes, std::vector<Ticket> gates) noexcept {
  if (process_.forked()) {
    return;
  }
  const std::size_t rounded = round_up(bytes);
  std::erase_if(gates, is_done);  // outside the lock: asking may call the driver
  if (!in_force(WaitPoint::kPoolGates)) {
    gates.clear();
  }
  if (gates.empty()) {
    backing_->discard({address, rounded});
  }
  const MutexLock lock(mutex_);
  free_.add(address, rounded, std::move(gates));
  stats_.now_bytes -= rounded;
}

std::optional<Block> BlockPool::try_lease(std::size_t bytes) {
  std::optional<RangeAllocator::Range> range;
  {
    const MutexLock lock(mutex_);
    range = take(round_up(bytes));
  }
  if (!range) {
    return std::nullopt;
  }
  return make_block(*std::move(range), bytes);
}

// The range that is returned has at least `rounded` bytes and fits under the capacity.
std::optional<Backing::Range> BlockPool::grow(std::size_t rounded) {
  const std::uint64_t capacity = stats().capacity_bytes;
  const std::uint64_t limit = capacity_bytes_.value_or(std::numeric_limits<std::uint64_t>::max());
  const std::uint64_t room = round_down(limit - std::min(limit, capacity));
  const std::uint64_t wanted = std::clamp(capacity / 16, kLeastGrowthBytes, kMostGrowthBytes);
  const std::uint64_t requests = std::min((wanted - 1) / rounded + 1, room / rounded);
  if (requests == 0) {
    return std::nullopt;
  }
  std::optional<Backing::Range> grown = ask_backing(requests * rounded);
  if (!grown && requests > 1) {
    grown = ask_backing(rounded);
  }
  if (grown) {
    grown->bytes = round_down(std::min<std::uint64_t>(grown->bytes, room));
  }
  return grown;
}

// Note [Refusals are remembered]
std::optional<Backing::Range> BlockPool::ask_backing(std::size_t bytes) {
  const auto now = std::chrono::steady_clock::now();
  if (refused_bytes_ && now - refused_at_ >= kRefusalLasts) {
    refused_bytes_.reset();
  }
  if (refused_bytes_ && bytes >= *refused_bytes_) {
    return std::nullopt;
  }
  std::optional<Backing::Range> grown = backing_->grow(bytes);
  if (!grown) {
    refused_bytes_ = bytes;
    refused_at_ = std::chrono::steady_clock::now();
    const MutexLock lock(mutex_);
    ++stats_.refusals;
  }
  return grown;
}

std::optional<RangeAllocator::Range> BlockPool::take(std::size_t rounded) {
  std::optional<RangeAllocator::Range> range = free_.take(rounded);
  if (range) {
    stats_.now_bytes += rounded;
    stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.now_bytes);
  }
  return range;
}

Block BlockPool::make_block(RangeAllocator::Range range, std::size_t bytes) {
  std::erase_if(range.gates, is_done);  // outside the lock: asking may call the driver
  return Block(shared_from_this(), range.address, bytes, std::move(range.gates));
}

}  // namespace ebb
