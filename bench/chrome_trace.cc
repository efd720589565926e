#include "bench/chrome_trace.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>

#include <nlohmann/json.hpp>

namespace ebb {
namespace {

constexpr std::uint64_t kFirstHostRow = 10;

std::uint64_t row_of(const TraceSpan& span) {
  return span.track == TraceTrack::kHost ? kFirstHostRow + span.thread : static_cast<std::uint64_t>(span.track);
}

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

std::string chrome_trace(const std::vector<TraceSpan>& spans) {
  using Us = std::chrono::duration<double, std::micro>;
  nlohmann::json events = nlohmann::json::array();
  std::map<std::uint64_t, std::string> rows;
  const auto first = std::ranges::min_element(spans, {}, &TraceSpan::begin);
  for (const TraceSpan& span : spans) {
    rows.try_emplace(row_of(span), name_of(span));
    events.push_back({{"name", span.name},
                      {"ph", "X"},
                      {"ts", Us(span.begin - first->begin).count()},
                      {"dur", Us(span.end - span.begin).count()},
                      {"pid", 1},
                      {"tid", row_of(span)},
                      {"args", {{"bytes", span.bytes}}}});
  }
  for (const auto& [row, name] : rows) {
    events.push_back({{"name", "thread_name"}, {"ph", "M"}, {"pid", 1}, {"tid", row}, {"args", {{"name", name}}}});
    events.push_back(
        {{"name", "thread_sort_index"}, {"ph", "M"}, {"pid", 1}, {"tid", row}, {"args", {{"sort_index", row}}}});
  }
  return nlohmann::json{{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}}.dump();
}

}  // namespace ebb
