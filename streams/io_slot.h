#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "streams/aligned_memory.h"
#include "streams/io_job.h"
#include "streams/spill_file.h"

namespace ebb {

// Carries one chunk at a time through the system calls that move it: what both I/O engines share. The engine issues
// the transfer that the slot describes and tells the slot its result, until the slot is idle again:
//
//   slot.start(job, chunk);
//   while (slot.busy()) slot.advance(<read or write slot.bytes() at slot.file_offset()>);
//
// or slot.finish_blocking(), which does that with pread and pwrite.
//
// Where the file is direct and the memory is not aligned, or ends within a page, the chunk goes through the slot's
// bounce buffer, which is allocated at the first need and kept (kChunkBytes a slot).
//
// Threads: one at a time. The file must outlive the slot.
class IoSlot {
 public:
  explicit IoSlot(const SpillFile& file) : file_(&file) {}

  // Requires an idle slot. If the chunk cannot be started it is finished with the error and the slot stays idle.
  void start(std::shared_ptr<IoJob> job, const IoChunk& chunk) noexcept;

  [[nodiscard]] bool busy() const { return job_ != nullptr; }

  // What is left to move. Requires a busy slot.
  [[nodiscard]] IoKind kind() const { return chunk_.kind; }
  [[nodiscard]] void* data() const { return buffer_ + bytes_moved_; }
  [[nodiscard]] std::size_t bytes() const { return buffer_bytes_ - bytes_moved_; }
  [[nodiscard]] std::uint64_t file_offset() const { return chunk_.file_offset + bytes_moved_; }

  // The result of moving bytes(): how many were, or a negative errno. A short or interrupted transfer leaves the slot
  // busy with the rest. Otherwise the chunk is finished and the slot idle.
  void advance(ssize_t result) noexcept;

  // Moves what is left on the calling thread; the slot is idle then. Requires that no other transfer of it is under
  // way.
  void finish_blocking() noexcept;

 private:
  void prepare_buffer();
  [[nodiscard]] std::exception_ptr failure(int error) const;

  const SpillFile* file_;
  AlignedMemory bounce_;  // null until needed

  std::shared_ptr<IoJob> job_;  // null: idle
  IoChunk chunk_{};
  std::byte* buffer_ = nullptr;  // the chunk's memory or the bounce buffer
  std::size_t buffer_bytes_ = 0;
  std::size_t bytes_moved_ = 0;
};

}  // namespace ebb
