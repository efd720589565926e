#pragma once

#include <cstdint>
#include <thread>
#include <unordered_map>
#include <vector>

#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"
#include "streams/base/trace_span.h"

namespace ebb {

// Collects spans of time, so that each lost millisecond can be explained. Pointers to a trace are null where none was
// asked for.
//
// Threads: every member may be called from any thread.
class Trace {
 public:
  static constexpr std::size_t kMaxSpans = 1'000'000;  // 48 MB; later ones are dropped until the next take

  // Spans of the host are those of the calling thread.
  void add(const char* name, TraceTrack track, TraceSpan::Time begin, TraceSpan::Time end,
           std::uint64_t bytes) noexcept;

  // All spans since the last call, in the order in which they became known.
  [[nodiscard]] std::vector<TraceSpan> take();

 private:
  const ProcessMark process_;
  Mutex mutex_;
  std::vector<TraceSpan> spans_ EBB_GUARDED_BY(mutex_);
  std::unordered_map<std::thread::id, std::uint64_t> names_ EBB_GUARDED_BY(mutex_);
};

// Marks the calling thread's work while this object lives: a span of the trace, if there is one, and an NVTX range,
// which costs a few nanoseconds where no profiler listens.
class HostRange {
 public:
  // `name` must be a literal.
  HostRange(Trace* trace, const char* name, std::uint64_t bytes = 0) noexcept;
  ~HostRange();
  HostRange(const HostRange&) = delete;
  HostRange& operator=(const HostRange&) = delete;

 private:
  Trace* const trace_;
  const char* const name_;
  const std::uint64_t bytes_;
  TraceSpan::Time begin_;
};

}  // namespace ebb
