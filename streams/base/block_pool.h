#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "streams/base/block.h"
#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"
#include "streams/base/range_allocator.h"
#include "streams/base/tier.h"

namespace ebb {

// Where a pool gets its bytes from: pinned host memory, or a file that grows.
class Backing {
 public:
  struct Range {
    std::uint64_t address;
    std::size_t bytes;
  };

  virtual ~Backing() = default;

  // At least `bytes` more, contiguous, aligned to BlockPool::kAlignment; nothing when the system has none left.
  // Never returns a range that touches an earlier one unless leases may span both. Slow. Called by one thread at a
  // time. Throws std::system_error where the system fails otherwise.
  virtual std::optional<Range> grow(std::size_t bytes) = 0;

  // Nobody uses these bytes any more: they were released and all their gates are done. What they hold is not wanted.
  // Called before they can be leased again, by any thread, by several at once for different bytes.
  virtual void discard(Range range) noexcept;
};

// Leases exact sizes (rounded up to 4 KiB, never to a power of two) out of a backing that grows on demand up to a
// capacity. Best fit, neighbours merge when freed. Always made by std::make_shared: leases keep the pool alive.
//
// Threads: every member may be called from any thread. Growing happens outside the lock that leasing takes, so one
// thread that waits for the system does not stop the others from leasing what is there.
//
// Note [Growth in whole requests]
// A slab is a whole number of the request that caused it, so a model's equal activations leave no remainder; it is at
// least a sixteenth of the present capacity, between 64 MiB and 1 GiB, so few slabs serve a run (pinning is slow) and
// a pool of equal requests is larger than its need by at most that and one request. Near the capacity limit the slab
// gets as small as one request.
//
// Note [Refusals are remembered]
// A system that is out of memory or disk is slow to say so: 100 us to read the kernel's figures, or to have fallocate
// try. Where the pool is full, every save would ask. So after a refusal nobody asks for as much or more until some time
// has passed.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  static constexpr std::chrono::milliseconds kRefusalLasts{100};
  static constexpr std::size_t kAlignment = 4096;  // a page: what direct I/O and huge-page slabs both accept

  // `capacity_bytes`: the most to take from the backing; nullopt for all that it gives. What a backing gives beyond
  // this limit, because it rounds up, is neither leased nor counted.
  BlockPool(std::unique_ptr<Backing> backing, std::optional<std::uint64_t> capacity_bytes);

  // Waits for the gates of all bytes before the backing goes: somebody may still be writing there. In a forked child it
  // waits for nothing and the backing stays.
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // nullopt when neither a free range nor the backing, within the capacity, has room. The block's gates are those of
  // its own bytes that are not done yet. Throws std::invalid_argument for 0 bytes, c10::Error in a forked child, and
  // what the backing throws.
  [[nodiscard]] std::optional<Block> try_acquire(std::size_t bytes);

  [[nodiscard]] PoolStats stats() const;

 private:
  friend class Block;
  void release(std::uint64_t address, std::size_t bytes, std::vector<Ticket> gates) noexcept;

  std::optional<Block> try_lease(std::size_t bytes) EBB_EXCLUDES(mutex_);
  std::optional<Backing::Range> grow(std::size_t rounded) EBB_REQUIRES(growth_mutex_);
  std::optional<Backing::Range> ask_backing(std::size_t bytes) EBB_REQUIRES(growth_mutex_);
  std::optional<RangeAllocator::Range> take(std::size_t rounded) EBB_REQUIRES(mutex_);
  Block make_block(RangeAllocator::Range range, std::size_t bytes) EBB_EXCLUDES(mutex_);

  const std::optional<std::uint64_t> capacity_bytes_;
  const std::unique_ptr<Backing, UnlessForked> backing_;
  const ProcessMark process_;

  Mutex growth_mutex_ EBB_ACQUIRED_BEFORE(mutex_);                          // held while the backing grows
  std::optional<std::size_t> refused_bytes_ EBB_GUARDED_BY(growth_mutex_);  // Note [Refusals are remembered]
  std::chrono::steady_clock::time_point refused_at_ EBB_GUARDED_BY(growth_mutex_);

  mutable Mutex mutex_;
  RangeAllocator free_ EBB_GUARDED_BY(mutex_);
  PoolStats stats_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb
