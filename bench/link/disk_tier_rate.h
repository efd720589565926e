#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "bench/link/raw_disk.h"
#include "streams/base/block_pool.h"
#include "streams/disk/disk_tier.h"

namespace ebb {

// The rate of ebb's own DiskTier, with the loads of RawDisk: a copy out for a write, a copy in for a read.
//
// Threads: one at a time.
class DiskTierRate {
 public:
  // `file_bytes` and `memory` as RawDisk's. Throws what DiskTier throws.
  DiskTierRate(const std::filesystem::path& folder, std::uint64_t file_bytes, std::span<std::byte> memory,
               DiskIo engine);

  // Leases the whole file anew, in blocks of this size, which must be a multiple of a page and divide `file_bytes`. The
  // blocks must be written before they are read. Throws std::runtime_error where the disk is full.
  void lease_blocks_of(std::size_t bytes);

  // GB/s (1e9 bytes) of one pass over all blocks, from before the first is queued until the last ticket is done, with
  // at most so many tickets open. The tickets are waited for in order, so that at times fewer are open: a later ticket
  // may be done first. Throws the errors of the tickets.
  double gb_per_s(IoKind kind, std::size_t most_open);

 private:
  Ticket copy(IoKind kind, std::size_t index);

  const std::filesystem::path folder_;
  const std::uint64_t file_bytes_;
  const std::span<std::byte> memory_;
  DiskTier tier_;
  std::vector<Block> blocks_;
};

}  // namespace ebb
