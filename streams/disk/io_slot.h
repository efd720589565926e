#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "streams/base/aligned_memory.h"
#include "streams/disk/io_job.h"
#include "streams/disk/spill_file.h"

namespace ebb {

// Carries one chunk at a time through the system calls that move it: both I/O engines share this class. The engine
// issues the transfer that the slot describes and tells the slot its result, until the slot is idle again:
//
//   slot.start(job, chunk);
//   while (slot.busy()) slot.advance(<read or write slot.bytes() at slot.file_offset()>);
//
// or slot.finish_blocking(), which runs this loop with pread and pwrite.
//
// Note [Checked chunks]
// Each chunk that is written gets a checksum in RAM (SpillFile::checksums, XXH3 of 64 bits), and a chunk that is read
// must match it: SpillCorrupted otherwise, also where the file ends too early or this chunk was never written. Writes
// go through the slot's bounce buffer, so that the checksum is of the very bytes that the system gets: autograd allows
// writes to a tensor that is on its way out (views that share a storage and no version, a save that is refused later),
// and these writes must not look like a broken disk. The bounce buffer costs one copy by the I/O thread; half of that
// cost, having the bytes in the cache, is the checksum's in any case.
//
// Where the file is direct and the memory is not aligned, or ends within a page, reads go through that buffer too. The
// buffer is allocated at the first need and kept (kChunkBytes a slot).
//
// Threads: one at a time. The file must outlive the slot.
class IoSlot {
 public:
  explicit IoSlot(const SpillFile& file) : file_(&file) {}

  // Requires an idle slot. A chunk that cannot be started is finished with the error, and the slot stays idle.
  void start(std::shared_ptr<IoJob> job, const IoChunk& chunk) noexcept;

  [[nodiscard]] bool busy() const { return job_ != nullptr; }

  // The bytes that are left to move. Requires a busy slot.
  [[nodiscard]] IoKind kind() const { return chunk_.kind; }
  [[nodiscard]] void* data() const { return buffer_ + bytes_moved_; }
  [[nodiscard]] std::size_t bytes() const { return buffer_bytes_ - bytes_moved_; }
  [[nodiscard]] std::uint64_t file_offset() const { return chunk_.file_offset + bytes_moved_; }

  // Takes the result of moving bytes(): how many bytes were moved, or a negative errno. A short or interrupted transfer
  // leaves the slot busy with the rest. Otherwise the chunk is finished and the slot idle.
  void advance(ssize_t result) noexcept;

  // Moves the bytes that are left on the calling thread; the slot is then idle. Requires that no other transfer of the
  // slot is under way.
  void finish_blocking() noexcept;

 private:
  void prepare_write();
  void prepare_read();
  void use_bounce_buffer();
  void finish_read();
  [[noreturn]] void fail(int error) const;
  [[nodiscard]] std::string describe(std::uint64_t offset, std::size_t bytes) const;

  const SpillFile* file_;
  AlignedMemory bounce_;  // null until needed

  std::shared_ptr<IoJob> job_;  // null: idle
  IoChunk chunk_{};
  std::byte* buffer_ = nullptr;  // the chunk's memory or the bounce buffer
  std::size_t buffer_bytes_ = 0;
  std::size_t bytes_moved_ = 0;
  std::uint64_t checksum_ = 0;  // of the chunk: of the bytes that are written, or that must arrive
};

}  // namespace ebb
