#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "streams/base/block_pool.h"
#include "streams/base/mutex.h"
#include "streams/base/tier.h"
#include "streams/base/trace.h"
#include "streams/gpu/copy_lane.h"
#include "streams/gpu/cuda_event.h"
#include "streams/gpu/gpu_times.h"

namespace ebb {

// GPU memory to host memory and back, on a side stream for each direction (PCIe is full duplex: copies out of one graph
// and copies in of another run at once). The side streams are among the 32 in c10's pool for the device: a program that
// takes so many from that pool that it computes on one of them gets right results, but overlaps nothing.
//
// Copies of up to CopyBatch::kLargestCopy to or from pinned memory are queued in batches (Note [Batches] in
// copy_batch.h).
//
// Threads, errors: as Tier. A lane's lock is held while its copies are queued, and one lock for all streams is
// held while a stream is made to wait. A lock is held over a wait of the host only where an event cannot be had.
class PinnedTier final : public Tier {
 public:
  struct Config {
    c10::Device device{c10::kCUDA, 0};
    bool pinned = true;      // false: pageable host memory
    bool overlapped = true;  // false: copies run on the calling thread's current stream
    std::optional<std::uint64_t> capacity_bytes;
    std::shared_ptr<Trace> trace;  // if any, gets copies and stalls
  };

  explicit PinnedTier(const Config& config);

  [[nodiscard]] c10::Device device() const override { return config_.device; }
  [[nodiscard]] c10::Stream current_stream() const override;
  [[nodiscard]] Ticket record(c10::Stream stream) override;
  [[nodiscard]] std::optional<Block> try_acquire(std::size_t bytes) override { return pool_->try_acquire(bytes); }
  [[nodiscard]] bool blocks_are_memory() const override { return true; }
  Ticket copy_out(const Block& to, const void* from, const After& after) override;
  Ticket copy_in(void* to, const Block& from, const After& after) override;
  void flush() noexcept override;
  [[nodiscard]] PoolStats pool_stats() const override { return pool_->stats(); }
  [[nodiscard]] StallStats stall_stats() const override { return times_->stall_stats(); }
  [[nodiscard]] Ticket time_point(c10::Stream stream) override;
  [[nodiscard]] double ms_between(const Ticket& earlier, const Ticket& later) const override;
  [[nodiscard]] bool captures() const override;
  void update_trace() override { times_->update_trace(); }

 private:
  void make_wait(c10::Stream stream, const Ticket& ticket) override;
  [[nodiscard]] c10::DataPtr take_memory(std::size_t bytes, c10::Stream stream) override;

  const Config config_;
  CudaEventPool& events_;
  const std::shared_ptr<GpuTimes> times_;
  CopyLane out_lane_;
  CopyLane in_lane_;
  const std::shared_ptr<BlockPool> pool_;
  Mutex wait_mutex_;  // keeps a stall's two events together
};

}  // namespace ebb
