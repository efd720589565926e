#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include <c10/cuda/CUDAStream.h>

#include "streams/block_pool.h"
#include "streams/cuda_event.h"
#include "streams/tier.h"
#include "streams/trace.h"

namespace ebb {

// GPU memory to host memory and back, on a side stream for each direction (PCIe is full duplex: copies out of one graph
// and copies in of another run at once). The side streams are two of the 32 in c10's pool for the device: a program
// that takes more than 30 from that pool computes on one of them, which is right but overlaps nothing.
//
// Threads, errors: as Tier. Holds no lock while it calls CUDA except to keep a stall's two events together.
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
  [[nodiscard]] c10::DataPtr allocate(std::size_t bytes) override;
  [[nodiscard]] std::optional<Block> try_acquire(std::size_t bytes) override { return pool_->try_acquire(bytes); }
  Ticket copy_out(const Block& to, const void* from, const After& after) override;
  Ticket copy_in(void* to, const Block& from, const After& after) override;
  [[nodiscard]] PoolStats pool_stats() const override { return pool_->stats(); }
  [[nodiscard]] StallStats stall_stats() const override;

 private:
  void make_wait(c10::Stream stream, const Ticket& ticket) override;

  // A stream's time just before and just after a wait, which is a stall, or a copy.
  struct Timed {
    TraceTrack track;
    std::uint64_t bytes;
    Ticket before;
    Ticket after;
  };

  Ticket copy(c10::cuda::CUDAStream lane, void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
              const After& after);
  void time(Timed timed);
  void settle_finished() const;                                // LOCK: timed_mutex_
  void add_to_trace(const Timed& timed, float ms_long) const;  // LOCK: timed_mutex_

  const Config config_;
  const c10::cuda::CUDAStream out_lane_;
  const c10::cuda::CUDAStream in_lane_;
  CudaEventPool& events_;
  CudaEventPool& timed_events_;
  const std::shared_ptr<BlockPool> pool_;

  // A point that is known on both clocks, if there is a trace.
  Ticket base_;
  TraceSpan::Time base_time_;

  mutable std::mutex timed_mutex_;
  mutable std::deque<Timed> timed_;  // LOCK: timed_mutex_. Not settled yet
  mutable StallStats stalls_;        // LOCK: timed_mutex_
};

}  // namespace ebb
