#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "streams/base/after.h"
#include "streams/base/block_pool.h"
#include "streams/base/ticket.h"
#include "streams/base/wait_point.h"

namespace ebb {

struct StallStats {
  std::uint64_t count = 0;  // waits that held the compute stream up
  double total_ms = 0;      // for how long, together
};

// A place where the bytes of a saved storage live while they are off the device, and the two lanes that copy the bytes
// out and in. A tier moves bytes, and its callers decide which bytes to move. Implementations: PinnedTier (GPU and host
// memory), DiskTier (RAM and a spill file), SimulatedTier (tests). test/streams/tier_contract_test.cc tests all of
// them.
//
// Ordering: NOTHING is implied. A copy starts when every ticket in `after` is done and the streams in `after` have done
// the work that they had been given by the call. No later copy or compute work waits for the copy unless told to. All
// ordering rules are thus visible in the callers' `after` lists and `wait` calls, which are the same for every tier.
//
// Threads: every member may be called from any thread. Calls may switch the current device; they restore it.
//
// Errors: a failed copy is reported by its ticket's `synchronize`. A copy that cannot be queued throws c10::Error.
//
// Lifetime: blocks may outlive the tier. In a forked child a tier is not destroyed.
class Tier {
 public:
  // Waits for the copies that are under way.
  virtual ~Tier() = default;

  // The device whose memory this tier relieves.
  [[nodiscard]] virtual c10::Device device() const = 0;

  // The calling thread's current compute stream on `device()`, asked live.
  [[nodiscard]] virtual c10::Stream current_stream() const = 0;

  // The point after all work given to `stream` so far; null only where the calling thread is the compute stream. A copy
  // can name the stream itself (After).
  [[nodiscard]] virtual Ticket record(c10::Stream stream) = 0;

  // Makes all later work of `stream` wait for the ticket. On a GPU the host does not block; on the CPU, where the
  // calling thread is the compute stream, it does. Counted as a stall when it holds the stream up.
  void wait(WaitPoint why, c10::Stream stream, const Ticket& ticket) {
    if (in_force(why)) {
      make_wait(stream, ticket);
    }
  }

  // As `wait`, for memory that is about to be let go: where the stream cannot be made to wait, the calling thread
  // waits. Does not throw the error of the work before the ticket.
  void wait_or_block(WaitPoint why, c10::Stream stream, const Ticket& ticket) noexcept;

  // Uninitialised device memory from the pool of `stream`, or of the current stream. The next allocation of that pool
  // may take freed memory at once, and only the work of that stream is ordered behind the free. Throws
  // c10::OutOfMemoryError.
  [[nodiscard]] c10::DataPtr allocate(std::size_t bytes, c10::Stream stream) { return take_memory(bytes, stream); }
  [[nodiscard]] c10::DataPtr allocate(std::size_t bytes) { return take_memory(bytes, current_stream()); }

  // A block of exactly `bytes`, or nothing when the tier's capacity is used up: a decision, not an error. Throws
  // std::system_error where the system fails otherwise, c10::Error in a forked child.
  [[nodiscard]] virtual std::optional<Block> try_acquire(std::size_t bytes) = 0;

  // Whether a block is memory of the host's, at Block::data(): as the pool's backing says.
  [[nodiscard]] virtual bool blocks_are_memory() const { return false; }

  // Starts copying as many bytes as the block has. The memory must stay valid until the returned ticket is done. A copy
  // out starts when its `after` is over, even with errors. A copy in fails with the error of a ticket in `after` that
  // failed: bytes that never arrived are never handed on.
  virtual Ticket copy_out(const Block& to, const void* from, const After& after) = 0;
  virtual Ticket copy_in(void* to, const Block& from, const After& after) = 0;

  // Hands copies that were gathered to the device or the disk, as a wait for one of them would.
  virtual void flush() noexcept {}

  [[nodiscard]] virtual PoolStats pool_stats() const = 0;
  [[nodiscard]] virtual StallStats stall_stats() const = 0;  // of waits that are over

  // A point on the stream's own clock: the time at which the device gets there; by default now, which is right where
  // the calling thread is the compute stream. A tier defines both of these members or neither.
  [[nodiscard]] virtual Ticket time_point(c10::Stream stream);

  // The time between two time points of this tier, both of which must be done.
  [[nodiscard]] virtual double ms_between(const Ticket& earlier, const Ticket& later) const;

  // Whether the calling thread's current stream records a CUDA graph: then nothing may be copied, because copies would
  // be part of the graph.
  [[nodiscard]] virtual bool captures() const { return false; }

  // Adds to the tier's trace, if there is one, the spans that are over and not in the trace yet.
  virtual void update_trace() {}

  // For an observer: the work given to `stream` so far has written these bytes of device memory, or later work of it
  // will read them. Tiers that move bytes ignore this.
  virtual void made(c10::Stream /*stream*/, const void* /*data*/, std::size_t /*bytes*/) {}
  virtual void used(c10::Stream /*stream*/, const void* /*data*/, std::size_t /*bytes*/) {}

 protected:
  // As wait(). The ticket may be null, and of any kind.
  virtual void make_wait(c10::Stream stream, const Ticket& ticket) = 0;
  [[nodiscard]] virtual c10::DataPtr take_memory(std::size_t bytes, c10::Stream stream) = 0;
};

// The tier that an offloader uses in place of `tier`. In a build for tests another than the same (test/checked).
#ifdef EBB_TESTS
[[nodiscard]] std::shared_ptr<Tier> decorated(std::shared_ptr<Tier> tier);
#else
[[nodiscard]] inline std::shared_ptr<Tier> decorated(std::shared_ptr<Tier> tier) { return tier; }
#endif

}  // namespace ebb
