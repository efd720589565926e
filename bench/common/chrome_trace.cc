#include "bench/common/chrome_trace.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <utility>

#include <nlohmann/json.hpp>

namespace ebb {
namespace {

constexpr std::uint64_t kRowsOfTrack = 1000;

// Gives each span a row. Spans of one host thread nest, and share one; the viewer wants the others in rows in which
// none overlaps the next, so each takes the first row of its track that is free.
class Rows {
 public:
  std::uint64_t of(const TraceSpan& span) {
    const std::uint64_t first = kRowsOfTrack * static_cast<std::uint64_t>(span.track);
    if (span.track == TraceTrack::kHost) {
      return first + span.thread;
    }
    std::vector<TraceSpan::Time>& ends = ends_[first];
    const auto free = std::ranges::find_if(ends, [&](TraceSpan::Time end) { return end <= span.begin; });
    const auto row = static_cast<std::uint64_t>(free - ends.begin());
    if (free == ends.end()) {
      ends.push_back(span.end);
    } else {
      *free = span.end;
    }
    return first + row;
  }

 private:
  std::map<std::uint64_t, std::vector<TraceSpan::Time>> ends_;
};

std::string name_of(const TraceSpan& span) {
  switch (span.track) {
    case TraceTrack::kCompute:
      return "compute stream";
    case TraceTrack::kOutLane:
      return "lane out";
    case TraceTrack::kInLane:
      return "lane in";
    case TraceTrack::kHost:
      break;
  }
  return "host thread " + std::to_string(span.thread);
}

}  // namespace

std::string chrome_trace(std::vector<TraceSpan> spans) {
  using Us = std::chrono::duration<double, std::micro>;
  std::ranges::sort(spans, {}, &TraceSpan::begin);
  nlohmann::json events = nlohmann::json::array();
  std::map<std::uint64_t, std::string> names;
  Rows rows;
  for (const TraceSpan& span : spans) {
    const std::uint64_t row = rows.of(span);
    names.try_emplace(row, name_of(span));
    events.push_back({{"name", span.name},
                      {"ph", "X"},
                      {"ts", Us(span.begin - spans.front().begin).count()},
                      {"dur", Us(span.end - span.begin).count()},
                      {"pid", 1},
                      {"tid", row},
                      {"args", {{"bytes", span.bytes}}}});
  }
  for (const auto& [row, name] : names) {
    events.push_back({{"name", "thread_name"}, {"ph", "M"}, {"pid", 1}, {"tid", row}, {"args", {{"name", name}}}});
    events.push_back(
        {{"name", "thread_sort_index"}, {"ph", "M"}, {"pid", 1}, {"tid", row}, {"args", {{"sort_index", row}}}});
  }
  return nlohmann::json{{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}}.dump();
}

}  // namespace ebb
