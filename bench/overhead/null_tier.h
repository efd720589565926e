#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "streams/base/block_pool.h"
#include "streams/base/tier.h"

namespace ebb {

// A tier of the CPU whose copies are done at once and copy nothing, over addresses that nobody reads, so that
// the remaining cost of an offloaded save is ebb's own. Only for measuring that cost: the bytes that come back are not
// the bytes that were saved.
//
// Threads, errors: as Tier.
class NullTier final : public Tier {
 public:
  NullTier();

  [[nodiscard]] c10::Device device() const override { return c10::kCPU; }
  [[nodiscard]] c10::Stream current_stream() const override;
  [[nodiscard]] Ticket record(c10::Stream stream) override;
  [[nodiscard]] std::optional<Block> try_acquire(std::size_t bytes) override { return pool_->try_acquire(bytes); }
  Ticket copy_out(const Block& to, const void* from, const After& after) override;
  Ticket copy_in(void* to, const Block& from, const After& after) override;
  [[nodiscard]] PoolStats pool_stats() const override { return pool_->stats(); }
  [[nodiscard]] StallStats stall_stats() const override { return {}; }

 private:
  void make_wait(c10::Stream stream, const Ticket& ticket) override;
  [[nodiscard]] c10::DataPtr take_memory(std::size_t bytes, c10::Stream stream) override;

  const std::shared_ptr<BlockPool> pool_;
};

}  // namespace ebb
