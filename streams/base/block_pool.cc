#include "streams/base/block_pool.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include <c10/util/Exception.h>

namespace ebb {

namespace {

constexpr std::uint64_t kLeastGrowthBytes = 64ull << 20;
constexpr std::uint64_t kMostGrowthBytes = 1ull << 30;

}  // namespace

void Block::give_back() noexcept { pool_->release(address_, size_, std::move(gates_)); }

void* Block::data() const {
  TORCH_INTERNAL_ASSERT(pool_->backing_->is_memory());
  return reinterpret_cast<void*>(address_);
}

void Block::prepare_gate() {
  std::erase_if(gates_, is_done);  // or a graph that is used repeatedly would gather a ticket for each use
  gates_.reserve(std::max<std::size_t>(2, gates_.size() + 1));  // the copy out and the copy in, usually
}

void Block::gate(WaitPoint why, Ticket ticket) {
  prepare_gate();
  if (ticket != nullptr && in_force(why) && std::find(gates_.begin(), gates_.end(), ticket) == gates_.end()) {
    gates_.push_back(std::move(ticket));
  }
}

BlockPool::BlockPool(std::unique_ptr<Backing> backing, std::optional<std::uint64_t> capacity_bytes)
    : capacity_bytes_(capacity_bytes), backing_(backing.release()) {}

BlockPool::~BlockPool() {
  if (process_.forked() || !in_force(WaitPoint::kPoolEnd)) {  // whoever would finish the work is not in a forked child
    return;
  }
  for (const Ticket& gate : free_.gates()) {
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
  std::optional<Block> block = try_lease(bytes);
  if (!block) {
    // Another thread may have grown the pool meanwhile, and another one may lease what this thread has got.
    const MutexLock growing(growth_mutex_);
    while (!(block = try_lease(bytes)) && grow(round_up_to_page(bytes))) {
    }
  }
  return block;
}

PoolStats BlockPool::stats() const {
  const MutexLock lock(mutex_);
  return stats_;
}

void BlockPool::release(std::uint64_t address, std::size_t bytes, std::vector<Ticket> gates) noexcept {
  if (process_.forked()) {
    return;
  }
  const std::size_t whole_pages = round_up_to_page(bytes);
  std::erase_if(gates, is_done);  // outside the lock: asking may call the driver
  if (!in_force(WaitPoint::kPoolGates)) {
    gates.clear();
  }
  if (gates.empty()) {
    backing_->discard(address, whole_pages);
  }
  const MutexLock lock(mutex_);
  free_.add(address, whole_pages, std::move(gates));
  stats_.now_bytes -= whole_pages;
}

std::optional<Block> BlockPool::try_lease(std::size_t bytes) {
  const std::size_t whole_pages = round_up_to_page(bytes);
  std::optional<RangeAllocator::Range> range;
  {
    const MutexLock lock(mutex_);
    range = free_.take(whole_pages);
    if (!range) {
      return std::nullopt;
    }
    stats_.now_bytes += whole_pages;
    stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.now_bytes);
  }
  std::erase_if(range->gates, is_done);  // outside the lock: asking may call the driver
  return Block(shared_from_this(), range->address, bytes, std::move(range->gates));
}

// Adds at least `whole_pages` to what is free, within the capacity; false where there are no more.
bool BlockPool::grow(std::size_t whole_pages) {
  const std::uint64_t capacity = stats().capacity_bytes;
  const std::uint64_t limit = capacity_bytes_.value_or(std::numeric_limits<std::uint64_t>::max());
  const std::uint64_t wanted = std::clamp(capacity / 16, kLeastGrowthBytes, kMostGrowthBytes);
  const std::uint64_t requests = std::min((wanted - 1) / whole_pages + 1, (limit - capacity) / whole_pages);
  return requests > 0 && (grow_by(requests * whole_pages) || (requests > 1 && grow_by(whole_pages)));
}

bool BlockPool::grow_by(std::size_t bytes) {
  if (bytes >= refused_bytes_ && std::chrono::steady_clock::now() < refused_until_) {
    return false;  // Note [Refusals are remembered]
  }
  const std::optional<std::uint64_t> address = backing_->grow(bytes);
  if (!address) {
    refused_bytes_ = bytes;
    refused_until_ = std::chrono::steady_clock::now() + kRefusalLasts;
  }
  const MutexLock lock(mutex_);
  if (!address) {
    ++stats_.refusals;
    return false;
  }
  free_.add(*address, bytes, {});
  stats_.capacity_bytes += bytes;
  ++stats_.growths;
  return true;
}

}  // namespace ebb
