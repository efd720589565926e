#include "streams/disk/uring_io.h"

#include <algorithm>
#include <cerrno>
#include <thread>

#include "streams/base/fault_point.h"

namespace ebb {

UringIo::Ring::Ring() {
  const int result = ::io_uring_queue_init(kDepth, &ring_, 0);
  if (result < 0) {
    throw std::system_error(-result, std::generic_category(), "cannot make an io_uring");
  }
}

std::error_code UringIo::refusal() {
  static const std::error_code refusal = []() -> std::error_code {
    try {
      Ring ring;
      // A read from no file fails with EBADF where io_uring knows reads, and with EINVAL where io_uring is older.
      char byte = 0;
      ::io_uring_prep_read(::io_uring_get_sqe(ring.get()), -1, &byte, sizeof(byte), 0);
      const int submitted = ::io_uring_submit_and_wait(ring.get(), 1);
      io_uring_cqe* cqe = nullptr;
      const int error = submitted < 0 ? -submitted : -::io_uring_peek_cqe(ring.get(), &cqe);
      if (error != 0) {
        return {error, std::generic_category()};
      }
      return {cqe->res == -EBADF ? 0 : -cqe->res, std::generic_category()};
    } catch (const std::system_error& error) {
      return error.code();
    }
  }();
  return refusal;
}

UringIo::UringIo(const SpillFile& file, IoQueue& queue) : queue_(queue), fd_(file.fd()) {
  slots_.reserve(kDepth + 1);  // the ring holds pointers to them
  for (unsigned i = 0; i < kDepth + 1; ++i) {
    slots_.emplace_back(file);
  }
}

void UringIo::run() noexcept {
  for (start_chunks(); busy_ > 0; start_chunks()) {
    finish_arrived();
  }
}

// Starts the chunks that can be started. Blocks only while no slot is busy: blocking would keep the busy slots' tickets
// from being done, and the gate that is waited for may depend on one of these tickets, through another queue. A request
// that comes while a chunk is in flight is seen when that chunk is done, which spares a second way to wake the thread.
void UringIo::start_chunks() {
  while (busy_ < kDepth) {
    const unsigned before = busy_;
    // Where this thread has moved the chunk, chunks in flight may have arrived meanwhile.
    if (!start_one() || (busy_ == before && busy_ > 0)) {
      return;
    }
  }
}

// False if nothing can be started now. Requires an idle slot.
bool UringIo::start_one() {
  IoSlot& slot = *std::find_if(slots_.begin(), slots_.end(), [](const IoSlot& each) { return !each.busy(); });
  if (!queue_.start_next(slot, busy_ > 0 ? IoQueue::Wait::kNo : IoQueue::Wait::kYes)) {
    return false;
  }
  if (slot.busy()) {
    issue(slot);
  }
  return true;
}

// Moves the bytes that the slot has left: by the ring, or on this thread where the ring refuses the submission.
void UringIo::issue(IoSlot& slot) {
  // A refused entry is still in the queue, alone, and is written anew: the kernel reads entries only during the
  // submission.
  if (entry_ == nullptr) {
    entry_ = ::io_uring_get_sqe(ring_.get());
  }
  const auto bytes = static_cast<unsigned>(slot.bytes());
  if (slot.kind() == IoKind::kRead) {
    ::io_uring_prep_read(entry_, fd_, slot.data(), bytes, slot.file_offset());
  } else {
    ::io_uring_prep_write(entry_, fd_, slot.data(), bytes, slot.file_offset());
  }
  ::io_uring_sqe_set_data(entry_, &slot);
  // A long write is done by a thread of the kernel's: many file systems would otherwise do all of a direct write within
  // the submission, and this thread could not prepare the next write meanwhile. For a short write, waking the kernel's
  // thread costs more.
  constexpr unsigned kLong = 256 << 10;
  ::io_uring_sqe_set_flags(entry_, bytes >= kLong ? IOSQE_ASYNC : 0);
  if (!fails(FaultPoint::kUringSubmission)) {
    while (::io_uring_submit(ring_.get()) == -EINTR) {
    }
  }
  // The result does not count, but whether the kernel took the entry.
  if (::io_uring_sq_ready(ring_.get()) > 0) {
    slot.finish_blocking();
    return;
  }
  entry_ = nullptr;
  ++busy_;
}

// The next completion. Where the kernel refuses to wait, polls the ring: chunks in flight still use their memory, and
// their completions arrive in the ring by themselves.
io_uring_cqe* UringIo::wait() {
  io_uring_cqe* cqe = nullptr;
  int result = -EINTR;
  while (result == -EINTR) {
    result = fails(FaultPoint::kUringWait) ? -EBADR : ::io_uring_wait_cqe(ring_.get(), &cqe);
  }
  while (result != 0) {
    std::this_thread::yield();
    result = ::io_uring_peek_cqe(ring_.get(), &cqe);
  }
  return cqe;
}

// Waits until a chunk has arrived. Finishes all writes that have arrived, or one read. To finish a write only makes its
// ticket done, so all arrived writes come before the copy and hash of another chunk. To finish a read hashes it, which
// takes long: the disk gets another chunk first, because chunks that were started together arrive together, and the
// disk would idle while all are hashed.
void UringIo::finish_arrived() {
  io_uring_cqe* cqe = wait();
  do {
    auto& slot = *static_cast<IoSlot*>(::io_uring_cqe_get_data(cqe));
    const int moved = cqe->res;
    ::io_uring_cqe_seen(ring_.get(), cqe);
    const bool is_read = slot.kind() == IoKind::kRead;
    if (is_read && busy_ <= kDepth) {
      start_one();
    }
    --busy_;
    slot.advance(moved);
    if (slot.busy()) {
      issue(slot);
    }
    if (is_read) {
      return;
    }
  } while (::io_uring_peek_cqe(ring_.get(), &cqe) == 0);
}

}  // namespace ebb
