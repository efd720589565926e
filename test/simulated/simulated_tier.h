#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "streams/base/block_pool.h"
#include "streams/base/mutex.h"
#include "streams/base/tier.h"
#include "test/simulated/simulated_memory.h"
#include "test/simulated/simulated_queues.h"

namespace ebb {

// A tier without a device, for tests: makes every missing wait give a wrong result, every time. Copies run as late as
// the waits allow, as early as they allow, or in a seeded random order, and bytes that nobody owns hold NaN.
//
// Note [Two kinds of simulated compute]
// Immediate (deferred_compute = false): compute is real and happens on the host at once, as autograd does on the CPU.
// `record` returns an empty ticket, and `wait` forces the ticket and throws its error, as DiskTier does.
// Deferred: kernels given to `compute` wait in their stream's queue as on a GPU; `record` is a point behind them,
// `wait` holds later kernels up, and freed device memory is poisoned by a kernel of its stream. Only this kind can show
// that a copy started before the work that makes its bytes.
//
// Stalls: waits that had to force something. No simulated time passes; each counts as one millisecond.
// Lifetime: an operation that has not run when the tier ends never runs; its ticket reports an error.
// Threads: as Tier. Kernels run under a lock and must not call the tier; they may free what `allocate` gave.
class SimulatedTier final : public Tier {
 public:
  // `capacity_bytes` limits the blocks; nullopt for no limit. `seed` matters to Schedule::kRandom only.
  SimulatedTier(Schedule schedule, std::uint64_t seed, std::optional<std::uint64_t> capacity_bytes,
                bool deferred_compute);

  [[nodiscard]] c10::Device device() const override { return c10::Device(c10::kCPU); }

  // The stream of the innermost SimulatedStreamGuard.
  [[nodiscard]] c10::Stream current_stream() const override;
  [[nodiscard]] Ticket record(c10::Stream stream) override;

  // The block is poisoned if it has no gates.
  [[nodiscard]] std::optional<Block> try_acquire(std::size_t bytes) override;

  [[nodiscard]] bool blocks_are_memory() const override { return true; }
  Ticket copy_out(const Block& to, const void* from, const After& after) override;
  Ticket copy_in(void* to, const Block& from, const After& after) override;
  [[nodiscard]] PoolStats pool_stats() const override { return pool_->stats(); }
  [[nodiscard]] StallStats stall_stats() const override;

  // Queues a kernel, or with immediate compute runs it now. The ticket reports what the kernel throws; so does this
  // call if the kernel ran in it.
  Ticket compute(c10::Stream stream, std::function<void()> kernel);

  // Runs all that is queued.
  void run_all() { queues_->run_all(); }

  // Makes the `nth` copy from now (1: the next one) move nothing and fail with "simulated copy failure".
  void fail_copy(std::uint64_t nth);

  // The bytes that `allocate` has given.
  [[nodiscard]] SimulatedMemory::Bytes device_bytes() const { return memory_->bytes(); }

 private:
  void make_wait(c10::Stream stream, const Ticket& ticket) override;

  // Gives poisoned memory, which outlives the tier if its DataPtr does.
  [[nodiscard]] c10::DataPtr take_memory(std::size_t bytes, c10::Stream stream) override;

  Ticket copy(SimulatedQueueId::Kind lane, void* to, const void* from, std::size_t bytes, const After& after);
  bool next_copy_fails();

  const bool deferred_compute_;
  const std::shared_ptr<SimulatedMemory> memory_;
  const std::shared_ptr<BlockPool> pool_;
  const std::shared_ptr<SimulatedQueues> queues_;  // ends first: the pool need not wait for copies that the queues drop

  mutable Mutex mutex_;
  std::uint64_t copies_until_failure_ EBB_GUARDED_BY(mutex_) = 0;  // 0 for no failure
  std::uint64_t forced_waits_ EBB_GUARDED_BY(mutex_) = 0;          // of immediate compute
};

}  // namespace ebb
