#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "streams/base/block_pool.h"
#include "streams/base/process_mark.h"
#include "streams/base/tier.h"
#include "streams/base/trace.h"
#include "streams/disk/io_queue.h"
#include "streams/disk/spill_file.h"

namespace ebb {

// Tensors in RAM, bytes in an unlinked spill file: the tier of a machine without a GPU. Two I/O queues are its lanes,
// so that a read never queues behind writes.
//
// On the CPU the calling thread is the compute stream: work is done when the call that does it returns, so record() has
// nothing to wait for, and wait() blocks the calling thread.
//
// Errors: those of IoQueue and SpillFile: std::system_error for what the system refuses, SpillCorrupted for bytes that
// do not come back as they were written.
//
// The destructor finishes the copies in flight; in a forked child it leaks the lanes instead, because their threads do
// not exist there. Blocks may outlive the tier: they keep the file open.
class DiskTier final : public Tier {
 public:
  // `capacity_bytes`: the most that the spill file may grow to; nullopt for no limit but the disk's. `trace`, if any,
  // gets copies and stalls.
  DiskTier(const std::filesystem::path& folder, std::optional<std::uint64_t> capacity_bytes, DiskIo engine,
           std::shared_ptr<Trace> trace = nullptr);
  DiskTier(std::unique_ptr<SpillFile> file, std::optional<std::uint64_t> capacity_bytes, DiskIo engine,
           std::shared_ptr<Trace> trace = nullptr);

  [[nodiscard]] c10::Device device() const override { return {c10::kCPU}; }
  [[nodiscard]] c10::Stream current_stream() const override { return c10::Stream(c10::Stream::DEFAULT, device()); }
  [[nodiscard]] Ticket record(c10::Stream stream) override;
  [[nodiscard]] std::optional<Block> try_acquire(std::size_t bytes) override { return pool_->try_acquire(bytes); }
  Ticket copy_out(const Block& to, const void* from, const After& after) override;
  Ticket copy_in(void* to, const Block& from, const After& after) override;
  [[nodiscard]] PoolStats pool_stats() const override { return pool_->stats(); }
  [[nodiscard]] StallStats stall_stats() const override;

 private:
  Ticket copy(IoQueue& lane, IoKind kind, const Block& block, void* memory, const After& after);
  void make_wait(c10::Stream stream, const Ticket& ticket) override;

  // Memory of c10's CPU allocator, whichever is installed. From MmapAllocator::kLeastBytes on, the memory starts on a
  // page, so that whole pages are read straight into the memory, and the last part of a page passes through a bounce
  // buffer; smaller reads pass through a bounce buffer where the file is direct. A block of the allocator that starts
  // on a page, as MmapAllocator's does, is handed out as it is.
  [[nodiscard]] c10::DataPtr take_memory(std::size_t bytes, c10::Stream stream) override;

  const std::shared_ptr<Trace> trace_;
  const SpillFile* const file_;  // owned by the pool
  const std::shared_ptr<BlockPool> pool_;
  // Declared after the pool: both lanes finish their work before the pool may close the file.
  const std::unique_ptr<IoQueue, UnlessForked> out_;
  const std::unique_ptr<IoQueue, UnlessForked> in_;

  std::atomic<bool> memory_is_aligned_{true};  // until the CPU's allocator gives a large block that is not
  std::atomic<std::uint64_t> stalls_{0};
  std::atomic<std::int64_t> stalled_ns_{0};
};

}  // namespace ebb
