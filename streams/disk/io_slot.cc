#include "streams/disk/io_slot.h"

#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <system_error>
#include <utility>

#include "streams/base/fault_point.h"
#include "streams/disk/spill_corrupted.h"

namespace ebb {

void IoSlot::start(std::shared_ptr<IoJob> job, const IoChunk& chunk) noexcept {
  chunk_ = chunk;
  bytes_moved_ = 0;
  try {
    if (chunk_.kind == IoKind::kWrite) {
      prepare_write();
    } else {
      prepare_read();
    }
    job_ = std::move(job);
  } catch (...) {
    job->finish_chunk(std::current_exception());
  }
}

void IoSlot::prepare_write() {
  use_bounce_buffer();
  std::memcpy(buffer_, chunk_.memory, chunk_.bytes);
  std::memset(buffer_ + chunk_.bytes, 0, buffer_bytes_ - chunk_.bytes);  // no bytes of an earlier chunk on the disk
  checksum_ = ::XXH3_64bits(buffer_, chunk_.bytes);
  file_->checksums().forget(chunk_.file_offset, chunk_.bytes);
}

void IoSlot::prepare_read() {
  const bool fits = is_aligned(chunk_.memory, file_->memory_alignment()) && chunk_.bytes % kPageBytes == 0;
  if (file_->direct() && !fits) {
    use_bounce_buffer();
  } else {
    buffer_ = chunk_.memory;
    buffer_bytes_ = chunk_.bytes;
  }
  const std::optional<std::uint64_t> written = file_->checksums().find(chunk_.file_offset, chunk_.bytes);
  if (!written.has_value()) {
    throw SpillCorrupted(describe(chunk_.file_offset, chunk_.bytes) + ": they were not written as one piece");
  }
  checksum_ = *written;
}

void IoSlot::use_bounce_buffer() {
  if (bounce_ == nullptr) {
    bounce_ = allocate_pages(IoJob::kChunkBytes);
  }
  buffer_ = bounce_.get();
  buffer_bytes_ = round_up_to_page(chunk_.bytes);
}

void IoSlot::advance(ssize_t result) noexcept {
  if (fails(chunk_.kind == IoKind::kRead ? FaultPoint::kPread : FaultPoint::kPwrite)) {
    result = -EIO;
  }
  if (result == -EINTR || result == -EAGAIN) {
    return;
  }
  std::exception_ptr error;
  try {
    if (result < 0) {
      fail(static_cast<int>(-result));
    }
    auto moved = static_cast<std::size_t>(result);
    if (file_->direct() && moved < bytes()) {
      moved -= moved % kPageBytes;  // goes on at a page; where the file ends within a page, no bytes are left
    }
    if (moved == 0) {
      fail(0);
    }
    bytes_moved_ += moved;
    if (bytes_moved_ < buffer_bytes_) {
      return;
    }
    if (chunk_.kind == IoKind::kWrite) {
      file_->checksums().add(chunk_.file_offset, chunk_.bytes, checksum_);
    } else {
      finish_read();
    }
  } catch (...) {
    error = std::current_exception();
  }
  std::exchange(job_, nullptr)->finish_chunk(std::move(error));
}

// Called when all bytes are in the memory or the bounce buffer.
void IoSlot::finish_read() {
  if (::XXH3_64bits(buffer_, chunk_.bytes) != checksum_) {
    throw SpillCorrupted(describe(chunk_.file_offset, chunk_.bytes) + ": they are not the bytes that were written");
  }
  if (buffer_ != chunk_.memory) {
    std::memcpy(chunk_.memory, buffer_, chunk_.bytes);
  }
}

void IoSlot::finish_blocking() noexcept {
  while (busy()) {
    const auto offset = static_cast<off_t>(file_offset());
    const ssize_t moved = chunk_.kind == IoKind::kRead ? ::pread(file_->fd(), data(), bytes(), offset)
                                                       : ::pwrite(file_->fd(), data(), bytes(), offset);
    advance(moved >= 0 ? moved : -errno);
  }
}

// `error`: 0 where the system moved no bytes and reported no error, which means that the file is shorter than the
// leased range.
void IoSlot::fail(int error) const {
  const std::string what = describe(file_offset(), bytes()) + (error == 0 ? ": the file ends there" : "");
  if (error == 0 && chunk_.kind == IoKind::kRead) {
    throw SpillCorrupted(what);
  }
  throw std::system_error(error == 0 ? EIO : error, std::generic_category(), what);
}

std::string IoSlot::describe(std::uint64_t offset, std::size_t bytes) const {
  return std::string("cannot ") + (chunk_.kind == IoKind::kRead ? "read " : "write ") + std::to_string(bytes) +
         " bytes at offset " + std::to_string(offset) + " of the spill file in " + file_->folder().string();
}

}  // namespace ebb
