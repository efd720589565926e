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

// The source of a pool's bytes: pinned host memory, or a file that grows.
class Backing {
 public:
  struct Range {
    std::uint64_t address;
    std::size_t bytes;
  };

  virtual ~Backing() = default;

  // Whether a range's address is a pointer's value.
  [[nodiscard]] virtual bool is_memory() const { return true; }

  // At least `bytes` more, contiguous, aligned to BlockPool::kAlignment; nothing when the system has none left.
  // Never returns a range that touches an earlier one unless leases may span both. Slow. Called by one thread at a
  // time. Throws std::system_error where the system fails otherwise.
  virtual std::optional<Range> grow(std::size_t bytes) = 0;

  // Told of bytes that nobody uses any more: they were released, all their gates are done, and their content is not
  // needed. Called before the bytes can be leased again, by any thread, and by several at once for different bytes.
  virtual void discard(Range /*range*/) noexcept {}
};

// Leases exact sizes (rounded up to 4 KiB, never to a power of two) out of a backing that grows on demand up to a
// capacity. Best fit; free neighbours merge. A pool must be made by std::make_shared: leases keep the pool alive.
//
// Threads: every member may be called from any thread. Growing happens outside the lock that leasing takes, so a
// thread that waits for the system does not stop the others from leasing free bytes.
//
// Note [Growth in whole requests]
// A slab's size is a multiple of the request that caused the slab, so a model's equal activations leave no remainder. A
// slab has at least a sixteenth of the present capacity, between 64 MiB and 1 GiB, so few slabs serve a run (pinning is
// slow), and a pool of equal requests exceeds its need by at most that least size and one request. Near the capacity
// limit a slab gets as small as one request.
//
// Note [Refusals are remembered]
// A system that is out of memory or disk space is slow to refuse: reading the kernel's figures, or a fallocate that
// fails, takes 100 us. Where the pool is full, every save would ask. So after a refusal the pool asks for as much or
// more only when kRefusalLasts has passed.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  static constexpr std::chrono::milliseconds kRefusalLasts{100};
  static constexpr std::size_t kAlignment = 4096;  // a page: what direct I/O and huge-page slabs both accept

  // `capacity_bytes`: the most to take from the backing; nullopt for no limit. Bytes that a backing gives beyond this
  // limit, because it rounds up, are neither leased nor counted.
  BlockPool(std::unique_ptr<Backing> backing, std::optional<std::uint64_t> capacity_bytes);

  // Waits for the gates of all bytes before the backing ends: a copy may still be writing there. In a forked child the
  // destructor waits for nothing and leaks the backing.
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // nullopt when neither a free range nor the backing, within the capacity, has room. The block's gates are the
  // gates of its own bytes that are not done yet. Throws std::invalid_argument for 0 bytes, c10::Error in a forked
  // child, and what the backing throws.
  [[nodiscard]] std::optional<Block> try_acquire(std::size_t bytes);

  [[nodiscard]] PoolStats stats() const;

  // As the backing's.
  [[nodiscard]] bool is_memory() const { return backing_->is_memory(); }

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
