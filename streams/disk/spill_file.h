#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include "streams/base/block_pool.h"
#include "streams/disk/spill_checksums.h"
#include "streams/disk/spill_folder.h"

namespace ebb {

// A file that has no name: nobody else can open it, and the system frees its space when the process ends, however it
// ends. A BlockPool leases ranges of it; an address is an offset in bytes.
//
// Threads: grow by one thread at a time; every other member from any thread, also beside grow.
class SpillFile final : public Backing {
 public:
  // Throws what SpillFolder throws when no file can be made there.
  explicit SpillFile(const std::filesystem::path& folder) : SpillFile(SpillFolder(folder)) {}
  explicit SpillFile(const SpillFolder& folder) : SpillFile(folder, folder.make_file()) {}
  // `file`: a new file of this folder.
  SpillFile(const SpillFolder& folder, FileDescriptor file) : SpillFile(folder.path(), std::move(file)) {}

  // A file in memory, which has no name either and is not on any disk. Throws std::system_error.
  [[nodiscard]] static std::unique_ptr<SpillFile> in_memory();

  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  [[nodiscard]] bool is_memory() const override { return false; }

  // Extends the file by `bytes`, rounded up to whole pages, right behind the earlier range. The blocks are reserved on
  // the disk at once, so that a full disk is known when a block is leased and not when it is written; on a file system
  // that cannot reserve, a full disk fails the write.
  // nullopt when the limit of the disk, the quota or the process's file size limit is reached, and where the file lies
  // in memory, unless leaves_a_reserve() in system_memory.h. Throws std::system_error for anything else.
  std::optional<std::uint64_t> grow(std::size_t bytes) override;

  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }  // "memory": in_memory()'s

  // Whether reads and writes bypass the page cache. If so, transfers must keep to whole pages in the file, and to
  // memory_alignment() in memory; a file that is not direct has neither rule, and an alignment of 1.
  [[nodiscard]] bool direct() const { return memory_alignment_ != 1; }
  [[nodiscard]] std::size_t memory_alignment() const { return memory_alignment_; }

  // The checksums of the pieces that were written. Not const, as the content behind fd() is not part of the object's
  // constness.
  [[nodiscard]] SpillChecksums& checksums() const { return checksums_; }

 private:
  SpillFile(std::filesystem::path folder, FileDescriptor file);

  const std::filesystem::path folder_;
  const FileDescriptor fd_;
  const bool is_memory_;
  const std::size_t memory_alignment_;
  std::uint64_t size_bytes_ = 0;  // only grow uses it
  mutable SpillChecksums checksums_;
};

}  // namespace ebb
