#include "streams/disk/io_job.h"

#include <algorithm>
#include <utility>

#include "streams/base/wait_point.h"

namespace ebb {

IoJob::IoJob(IoRequest request)
    : request_(std::move(request)), chunks_left_((request_.bytes + kChunkBytes - 1) / kChunkBytes) {}

bool IoJob::gates_done() const {
  return !in_force(WaitPoint::kDiskGates) || std::all_of(request_.after.begin(), request_.after.end(), is_done);
}

bool IoJob::pass_gates() noexcept {
  for (const Ticket& ticket : request_.after) {
    try {
      if (ticket != nullptr && in_force(WaitPoint::kDiskGates)) {
        ticket->synchronize();
      }
    } catch (...) {
      if (request_.kind == IoKind::kRead) {  // the bytes to read never arrived in the file
        request_.after.clear();
        finish(std::current_exception());
        return false;
      }
    }
  }
  request_.after.clear();
  return true;
}

std::optional<IoChunk> IoJob::next_chunk() {
  if (bytes_handed_out_ == request_.bytes) {
    return std::nullopt;
  }
  if (bytes_handed_out_ == 0 && request_.trace != nullptr) {
    begin_ = std::chrono::steady_clock::now();
  }
  const IoChunk chunk{
      .kind = request_.kind,
      .file_offset = request_.file_offset + bytes_handed_out_,
      .memory = static_cast<std::byte*>(request_.memory) + bytes_handed_out_,
      .bytes = std::min(kChunkBytes, request_.bytes - bytes_handed_out_),
  };
  bytes_handed_out_ += chunk.bytes;
  return chunk;
}

void IoJob::finish_chunk(std::exception_ptr error) noexcept {
  const MutexLock lock(mutex_);
  if (error_ == nullptr) {
    error_ = std::move(error);
  }
  --chunks_left_;
  if (done() || (chunks_left_ > 0 && in_force(WaitPoint::kDiskLastPart))) {
    return;
  }
  if (request_.trace != nullptr) {
    const bool out = request_.kind == IoKind::kWrite;
    request_.trace->add(out ? "copy out" : "copy in", out ? TraceTrack::kOutLane : TraceTrack::kInLane, begin_,
                        std::chrono::steady_clock::now(), request_.bytes);
  }
  finish(error_);
}

}  // namespace ebb
