#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace ebb {

// The row of a picture in which a span is drawn. The lanes and the compute stream are the device's; on the CPU, where
// the calling thread is the compute stream, that track shows when it was held up.
enum class TraceTrack : std::uint8_t { kHost, kCompute, kOutLane, kInLane };
inline constexpr std::size_t kTraceTracks = 4;

// Something that took time: a copy, a stall, a call on the host.
struct TraceSpan {
  using Time = std::chrono::steady_clock::time_point;

  const char* name;  // "copy out", "copy in", "stall", "pack", "unpack"; never freed
  TraceTrack track;
  Time begin;
  Time end;
  std::uint64_t bytes;   // 0 where the span moves no bytes
  std::uint64_t thread;  // of TraceTrack::kHost: the host thread, a small number in the order of appearance
};

}  // namespace ebb
