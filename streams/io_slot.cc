#include "streams/io_slot.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "streams/fault_point.h"

namespace ebb {

void IoSlot::start(std::shared_ptr<IoJob> job, const IoChunk& chunk) noexcept {
  chunk_ = chunk;
  bytes_moved_ = 0;
  try {
    prepare_buffer();
    job_ = std::move(job);
  } catch (...) {
    job->finish_chunk(std::current_exception());
  }
}

void IoSlot::prepare_buffer() {
  if (!file_->direct() || (is_aligned(chunk_.memory, file_->memory_alignment()) && chunk_.bytes % kPageBytes == 0)) {
    buffer_ = chunk_.memory;
    buffer_bytes_ = chunk_.bytes;
    return;
  }
  if (bounce_ == nullptr) {
    bounce_ = allocate_pages(IoJob::kChunkBytes);
  }
  buffer_ = bounce_.get();
  buffer_bytes_ = round_up_to_page(chunk_.bytes);
  if (chunk_.kind == IoKind::kWrite) {
    std::memcpy(buffer_, chunk_.memory, chunk_.bytes);
    std::memset(buffer_ + chunk_.bytes, 0, buffer_bytes_ - chunk_.bytes);  // no bytes of an earlier chunk on the disk
  }
}

void IoSlot::advance(ssize_t result) noexcept {
  if (result == -EINTR || result == -EAGAIN) {
    return;
  }
  if (result <= 0) {
    std::exchange(job_, nullptr)->finish_chunk(failure(static_cast<int>(-result)));
    return;
  }
  bytes_moved_ += static_cast<std::size_t>(result);
  if (bytes_moved_ < buffer_bytes_) {
    return;
  }
  if (chunk_.kind == IoKind::kRead && buffer_ != chunk_.memory) {
    std::memcpy(chunk_.memory, buffer_, chunk_.bytes);
  }
  std::exchange(job_, nullptr)->finish_chunk(nullptr);
}

void IoSlot::finish_blocking() noexcept {
  while (busy()) {
    const auto offset = static_cast<off_t>(file_offset());
    if (fails(chunk_.kind == IoKind::kRead ? FaultPoint::kPread : FaultPoint::kPwrite)) {
      advance(-EIO);
      continue;
    }
    const ssize_t moved = chunk_.kind == IoKind::kRead ? ::pread(file_->fd(), data(), bytes(), offset)
                                                       : ::pwrite(file_->fd(), data(), bytes(), offset);
    advance(moved >= 0 ? moved : -errno);
  }
}

std::exception_ptr IoSlot::failure(int error) const {
  const bool reading = chunk_.kind == IoKind::kRead;
  std::string what = std::string("cannot ") + (reading ? "read " : "write ") + std::to_string(bytes()) +
                     " bytes at offset " + std::to_string(file_offset()) + " of the spill file in " +
                     file_->folder().string();
  if (error == 0) {
    // Zero bytes moved is no error to the system, but here it means that the file is shorter than what was leased.
    what += ": the file ends there";
    error = EIO;
  }
  return std::make_exception_ptr(std::system_error(error, std::generic_category(), what));
}

}  // namespace ebb
