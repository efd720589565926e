#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "streams/base/block_pool.h"
#include "streams/disk/disk_tier.h"
#include "streams/disk/io_job.h"
#include "streams/disk/spill_file.h"

namespace ebb {

// One pass over a whole file: the direction, the size of the blocks, and how many blocks are in flight at once.
struct DiskLoad {
  IoKind kind = IoKind::kWrite;
  std::size_t block_bytes = 0;
  unsigned in_flight = 1;
};

// The rate of a disk when nothing stands between the system and the program: a file of its own, made as a spill file is
// (without a name, preallocated, direct), and plain transfers, without checksums, copies or tickets.
//
// Threads: one at a time.
class RawDisk {
 public:
  // `memory`, aligned to a page, is the source of writes and the target of reads, again and again from its start: its
  // size must be a multiple of every block's, as must `file_bytes`, and it must hold all that is in flight. Throws
  // std::runtime_error where the folder's disk is full, and where its file system has no direct I/O or is in memory;
  // otherwise the exceptions of SpillFile.
  RawDisk(const std::filesystem::path& folder, std::uint64_t file_bytes, std::span<std::byte> memory);

  // GB/s (1e9 bytes) of one pass by one thread with io_uring, or by as many threads as transfers are in flight, with
  // pread and pwrite. Each throws std::system_error for a transfer that fails.
  [[nodiscard]] double uring_gb_per_s(const DiskLoad& load) const;
  [[nodiscard]] double threads_gb_per_s(const DiskLoad& load) const;

 private:
  [[nodiscard]] std::byte* memory_of(std::uint64_t file_offset) const;

  SpillFile file_;
  const std::uint64_t file_bytes_;
  const std::span<std::byte> memory_;
};

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
