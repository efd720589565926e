#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <vector>

#include "streams/base/host_completion.h"
#include "streams/base/mutex.h"
#include "streams/base/ticket.h"
#include "streams/base/trace.h"

namespace ebb {

enum class IoKind : std::uint8_t { kRead, kWrite };

// One transfer between memory and the spill file.
struct IoRequest {
  IoKind kind;

  // A multiple of kPageBytes. The request owns the file's bytes up to the end of the last page that it touches: a write
  // may fill the rest of that page with zeros.
  std::uint64_t file_offset;

  // Any alignment. A write only reads it. Valid until the request's ticket is done; no byte beyond `bytes` is touched.
  void* memory;
  std::size_t bytes;  // at least 1

  // The request starts when all of these tickets are done. If a ticket failed, a read fails with that ticket's error.
  std::vector<Ticket> after;
  Trace* trace = nullptr;  // gets a span from the first byte to the last, if there is one; must outlive the request
};

// A part of a request that is moved in one piece.
struct IoChunk {
  IoKind kind;
  std::uint64_t file_offset;
  std::byte* memory;
  std::size_t bytes;
};

// A request on its way through an I/O queue, and its ticket: first its gates are passed, then its chunks are handed out
// in order, then they finish in any order, and with the last of them the ticket is done.
//
// Threads: finish_chunk from any thread; the other members by one thread at a time.
class IoJob final : public HostCompletion {
 public:
  // Small enough to stay in a core's cache while the I/O thread copies and hashes it, and so small that a request of 1
  // MiB is hashed and moved at the same time: alone such a request was read at 0.76 to 0.82 and written at 0.57 to 0.77
  // of the rate without ebb; in one piece it was read at 0.63 to 0.75 and written at 0.41 to 0.48
  // (bench/results/h200/disk_chunks_*.json).
  static constexpr std::size_t kChunkBytes = std::size_t{512} << 10;

  explicit IoJob(IoRequest request);

  // Whether pass_gates would return without blocking.
  [[nodiscard]] bool gates_done() const;

  // Waits for every ticket in `after`. False when a ticket failed and this job is a read: then the job is over, with
  // the failed ticket's error. A write starts even after errors. After a call that returned true, later calls return
  // true at once.
  [[nodiscard]] bool pass_gates() noexcept;

  // The next chunk; nullopt when all chunks have been handed out. Requires that the gates are passed.
  [[nodiscard]] std::optional<IoChunk> next_chunk();

  // Called once for every chunk. `error`: null for success. The job reports the first error, and only after the last
  // chunk, because until then the system may still use the memory.
  void finish_chunk(std::exception_ptr error) noexcept;

 private:
  IoRequest request_;
  std::size_t bytes_handed_out_ = 0;
  TraceSpan::Time begin_;  // set where there is a trace

  Mutex mutex_;
  std::size_t chunks_left_ EBB_GUARDED_BY(mutex_);
  std::exception_ptr error_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb
