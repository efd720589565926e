#include "streams/uring_io.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>

#include "streams/fault_point.h"

namespace ebb {

UringIo::Ring::Ring() {
  const int result = ::io_uring_queue_init(kDepth, &ring_, 0);
  if (result < 0) {
    throw std::system_error(-result, std::generic_category(), "cannot make an io_uring");
  }
}

UringIo::Ring::~Ring() { ::io_uring_queue_exit(&ring_); }

std::error_code UringIo::refusal() {
  static const std::error_code refusal = probe();
  return refusal;
}

std::error_code UringIo::probe() {
  try {
    Ring ring;
    // A read from no file fails with EBADF where reads are known, with EINVAL where io_uring is older than they are.
    char byte = 0;
    ::io_uring_prep_read(::io_uring_get_sqe(ring.get()), -1, &byte, sizeof(byte), 0);
    const int submitted = ::io_uring_submit_and_wait(ring.get(), 1);
    io_uring_cqe* cqe = nullptr;
    const int error = submitted < 0 ? -submitted : -::io_uring_peek_cqe(ring.get(), &cqe);
    if (error != 0) {
      return {error, std::generic_category()};
    }
    return cqe->res == -EBADF ? std::error_code() : std::error_code(-cqe->res, std::generic_category());
  } catch (const std::system_error& error) {
    return error.code();
  }
}

UringIo::UringIo(const SpillFile& file, const std::string& thread_name) : fd_(file.fd()), thread_() {
  slots_.reserve(kDepth + 1);  // the ring holds pointers to them
  for (unsigned i = 0; i < kDepth + 1; ++i) {
    slots_.emplace_back(file);
  }
  if (fails(FaultPoint::kThreadStart)) {
    throw std::system_error(EAGAIN, std::generic_category(), "cannot start a thread");
  }
  thread_ = std::jthread([this, thread_name] { work(thread_name); });
}

UringIo::~UringIo() { backlog_.close(); }

void UringIo::work(const std::string& thread_name) noexcept {
  ::pthread_setname_np(::pthread_self(), thread_name.c_str());
  for (start_chunks(kDepth); busy_ > 0; start_chunks(kDepth)) {
    finish_one();
  }
}

// Starts what can be started. Blocks only while no slot is busy: else it would keep their tickets from being done, and
// the gate that it waits for may hang on one of them, through another queue. A request that comes while a chunk is in
// flight is seen when that chunk is done, which spares a second way to wake the thread.
void UringIo::start_chunks(unsigned most_busy) {
  while (busy_ < most_busy) {
    if (current_ == nullptr) {
      current_ = busy_ > 0 ? backlog_.try_pop() : backlog_.pop();
      if (current_ == nullptr) {
        return;
      }
    }
    if (busy_ > 0 && !current_->gates_done()) {
      return;
    }
    const std::optional<IoChunk> chunk = current_->pass_gates() ? current_->next_chunk() : std::nullopt;
    if (!chunk.has_value()) {
      current_.reset();
      continue;
    }
    IoSlot& slot = *std::find_if(slots_.begin(), slots_.end(), [](const IoSlot& each) { return !each.busy(); });
    slot.start(current_, *chunk);
    if (slot.busy()) {
      issue(slot);
    }
  }
}

// Moves what the slot has left: by the ring, or where that refuses the submission, here and now.
void UringIo::issue(IoSlot& slot) {
  if (submit(slot)) {
    ++busy_;
  } else {
    slot.finish_blocking();
  }
}

bool UringIo::submit(IoSlot& slot) {
  io_uring_sqe* const sqe = ::io_uring_get_sqe(ring_.get());
  if (sqe == nullptr) {  // full of entries that were refused
    return false;
  }
  const auto bytes = static_cast<unsigned>(slot.bytes());
  if (slot.kind() == IoKind::kRead) {
    ::io_uring_prep_read(sqe, fd_, slot.data(), bytes, slot.file_offset());
  } else {
    ::io_uring_prep_write(sqe, fd_, slot.data(), bytes, slot.file_offset());
  }
  ::io_uring_sqe_set_data(sqe, &slot);
  // By a thread of the kernel's, if it is long: many file systems would else do all of a direct write within the
  // submission, and this thread could not prepare the next one meanwhile. For a short one, waking that costs more.
  constexpr unsigned kLong = 256 << 10;
  if (bytes >= kLong) {
    ::io_uring_sqe_set_flags(sqe, IOSQE_ASYNC);
  }
  int result = -EAGAIN;
  if (!fails(FaultPoint::kUringSubmission)) {
    do {
      result = ::io_uring_submit(ring_.get());
    } while (result == -EINTR);
  }
  // Not `result`: what counts is whether the kernel took the entry, which is the last in the queue.
  if (::io_uring_sq_ready(ring_.get()) == 0) {
    return true;
  }
  // The entry stays in the queue, and a later submission would start it, when nobody waits for it any more. The kernel
  // reads entries only while they are submitted, so this one can still become one that does nothing.
  ::io_uring_prep_nop(sqe);
  ::io_uring_sqe_set_data(sqe, nullptr);
  return false;
}

// The next completion. Where the kernel refuses to wait, looks for it again and again: what is in flight still uses its
// memory, and its completions arrive in the ring by themselves.
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

// Waits for one completion. Before a chunk that was read is hashed, the disk gets the next one to read: chunks that
// were started together arrive together, and the disk would idle while all of them are hashed. A write has nothing left
// to do but to say so, and the next one is hashed before it starts.
void UringIo::finish_one() {
  io_uring_cqe* const cqe = wait();
  auto* const slot = static_cast<IoSlot*>(::io_uring_cqe_get_data(cqe));
  int moved = cqe->res;
  ::io_uring_cqe_seen(ring_.get(), cqe);
  if (slot == nullptr) {  // an entry that was refused and taken back
    return;
  }
  if (fails(slot->kind() == IoKind::kRead ? FaultPoint::kPread : FaultPoint::kPwrite)) {
    moved = -EIO;
  }
  if (slot->kind() == IoKind::kRead) {
    start_chunks(kDepth + 1);
  }
  --busy_;
  slot->advance(moved);
  if (slot->busy()) {
    issue(*slot);
  }
}

}  // namespace ebb
