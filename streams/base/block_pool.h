#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "streams/base/aligned_memory.h"
#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"
#include "streams/base/range_allocator.h"
#include "streams/base/ticket.h"
#include "streams/base/wait_point.h"

namespace ebb {

class BlockPool;

// A lease of exactly `size()` bytes of a pool: host memory, or a range of the spill file. The destructor returns
// the bytes to the pool with their gates: the next lease of any of these bytes must wait for every gate that is not
// done.
//
// Threads: one owner at a time; the pool behind it may be used from any thread.
class Block {
 public:
  Block(std::shared_ptr<BlockPool> pool, std::uint64_t address, std::size_t size, std::vector<Ticket> gates)
      : pool_(std::move(pool)), address_(address), size_(size), gates_(std::move(gates)) {}
  Block(Block&& other) noexcept = default;
  Block& operator=(Block&& other) noexcept {
    Block taken(std::move(other));  // gives back what this has had
    std::swap(pool_, taken.pool_);
    std::swap(address_, taken.address_);
    std::swap(size_, taken.size_);
    std::swap(gates_, taken.gates_);
    return *this;
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    if (pool_ != nullptr) {
      give_back();
    }
  }

  // A pointer's value for host memory, an offset in bytes for a file; and the pointer, which a file's block has not.
  [[nodiscard]] std::uint64_t address() const { return address_; }
  [[nodiscard]] void* data() const;
  [[nodiscard]] std::size_t size() const { return size_; }

  // The tickets of those who still use these bytes: the next writer waits for all of them first (R3 in docs/design.md).
  [[nodiscard]] const std::vector<Ticket>& gates() const { return gates_; }

  // Adds a reader or writer that must be done before these bytes are leased to somebody else. Forgets gates that are
  // done. Does not throw right after prepare_gate().
  void gate(WaitPoint why, Ticket ticket);
  void prepare_gate();

 private:
  void give_back() noexcept;

  std::shared_ptr<BlockPool> pool_;  // null when moved from
  std::uint64_t address_;
  std::size_t size_;
  std::vector<Ticket> gates_;
};

struct PoolStats {
  std::uint64_t now_bytes = 0;       // leased
  std::uint64_t peak_bytes = 0;      // the most that was ever leased
  std::uint64_t capacity_bytes = 0;  // held by the pool: pinned, allocated, or reserved in the file
  std::uint64_t growths = 0;         // how often the pool asked the system for more and got it
  std::uint64_t refusals = 0;        // how often the pool asked the system for more and got nothing
};

// The source of a pool's bytes: pinned host memory, or a file that grows.
class Backing {
 public:
  virtual ~Backing() = default;

  // Whether a range's address is a pointer's value.
  [[nodiscard]] virtual bool is_memory() const { return true; }

  // The address of `bytes` more, contiguous, aligned to BlockPool::kAlignment; nothing when the system has none left.
  // Never returns a range that touches an earlier one unless leases may span both. Slow. Called by one thread at a
  // time. Throws std::system_error where the system fails otherwise.
  virtual std::optional<std::uint64_t> grow(std::size_t bytes) = 0;

  // Told of bytes that nobody uses any more: they were released, all their gates are done, and their content is not
  // needed. Called before the bytes can be leased again, by any thread, and by several at once for different bytes.
  virtual void discard(std::uint64_t /*address*/, std::size_t /*bytes*/) noexcept {}
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
  static constexpr std::size_t kAlignment = kPageBytes;  // what direct I/O and huge-page slabs both accept

  // `capacity_bytes`: the most to take from the backing; nullopt for no limit.
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

 private:
  friend class Block;
  void release(std::uint64_t address, std::size_t bytes, std::vector<Ticket> gates) noexcept;

  std::optional<Block> try_lease(std::size_t bytes) EBB_EXCLUDES(mutex_);
  [[nodiscard]] bool grow(std::size_t whole_pages) EBB_REQUIRES(growth_mutex_) EBB_EXCLUDES(mutex_);
  [[nodiscard]] bool grow_by(std::size_t bytes) EBB_REQUIRES(growth_mutex_) EBB_EXCLUDES(mutex_);

  const std::optional<std::uint64_t> capacity_bytes_;
  const std::unique_ptr<Backing, UnlessForked> backing_;
  const ProcessMark process_;

  Mutex growth_mutex_ EBB_ACQUIRED_BEFORE(mutex_);             // held while the backing grows
  std::size_t refused_bytes_ EBB_GUARDED_BY(growth_mutex_){};  // Note [Refusals are remembered]
  std::chrono::steady_clock::time_point refused_until_ EBB_GUARDED_BY(growth_mutex_);

  mutable Mutex mutex_;
  RangeAllocator free_ EBB_GUARDED_BY(mutex_);
  PoolStats stats_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb
