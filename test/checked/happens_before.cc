#include "test/checked/happens_before.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "streams/base/process_mark.h"

namespace ebb {
namespace {

void merge(HappensBefore::Clock& into, const HappensBefore::Clock& from) {
  for (const auto& [actor, at] : from) {
    std::uint64_t& known = into[actor];
    known = std::max(known, at);
  }
}

const char* verb(HappensBefore::Kind kind) {
  switch (kind) {
    case HappensBefore::Kind::kRead:
      return "reads";
    case HappensBefore::Kind::kMade:
      return "made";
    case HappensBefore::Kind::kWrite:
      return "writes";
    case HappensBefore::Kind::kFree:
      return "frees";
  }
  return "";
}

bool conflict(HappensBefore::Kind earlier, HappensBefore::Kind later) {
  using Kind = HappensBefore::Kind;
  return later != Kind::kMade && (earlier != Kind::kRead || later != Kind::kRead);
}

}  // namespace

HappensBefore& HappensBefore::instance() {
  struct Instance : HappensBefore {
    Instance() {
      if (std::getenv("EBB_ORDER_UNCHECKED") != nullptr) {
        set_handler([](const std::string& /*violation*/) {});
      }
    }
  };
  return PerProcess<Instance>::here();
}

HappensBefore::Handler HappensBefore::set_handler(Handler handler) {
  const MutexLock lock(mutex_);
  return std::exchange(handler_, handler);
}

HappensBefore::Actor HappensBefore::make_actor(std::string name) {
  const MutexLock lock(mutex_);
  names_.emplace(next_actor_, std::move(name));
  streams_[next_actor_];
  return next_actor_++;
}

void HappensBefore::end(Actor stream) {
  const MutexLock lock(mutex_);
  names_.erase(stream);
  streams_.erase(stream);
  host_.erase(stream);
}

HappensBefore::Clock HappensBefore::point(Actor stream) {
  const MutexLock lock(mutex_);
  Clock& clock = streams_.at(stream);
  merge(clock, host_);  // the host queued with this knowledge all that it gave to the stream before this point
  // Copies that the host knows to be done say nothing more, and a stream of a GPU has seen every copy there ever was.
  std::erase_if(clock, [this](const auto& entry) EBB_REQUIRES(mutex_) { return !names_.contains(entry.first); });
  ++clock[stream];
  return clock;
}

void HappensBefore::join(Actor actor, const Clock& clock) {
  const MutexLock lock(mutex_);
  if (actor != kHost) {
    merge(streams_.at(actor), clock);
    return;
  }
  for (const auto& [known, at] : clock) {
    if (streams_.contains(known)) {
      host_[known] = std::max(host_[known], at);
    } else {
      names_.erase(known);  // a copy that is done: from here on everything comes behind it
    }
  }
}

HappensBefore::Clock HappensBefore::copy(const std::string& name, const std::vector<Clock>& after, Range reads,
                                         Range writes) {
  std::vector<std::string> violations;
  Clock clock;
  Handler handler = nullptr;
  {
    const MutexLock lock(mutex_);
    const Actor self = next_actor_++;
    names_.emplace(self, name + " #" + std::to_string(self));
    clock = host_;
    for (const Clock& each : after) {
      merge(clock, each);
    }
    access_locked({self, 1, Kind::kRead}, clock, reads, violations);
    access_locked({self, 1, Kind::kWrite}, clock, writes, violations);
    std::erase_if(clock, [this](const auto& entry) EBB_REQUIRES(mutex_) { return !names_.contains(entry.first); });
    clock[self] = 1;
    handler = handler_;
  }
  report(violations, handler);
  return clock;
}

void HappensBefore::access(Actor actor, Kind kind, Range range, Behind behind) {
  std::vector<std::string> violations;
  Handler handler = nullptr;
  {
    const MutexLock lock(mutex_);
    if (!streams_.contains(actor)) {  // the host, or a stream that has ended
      actor = kHost;
    }
    Clock knows = host_;
    std::uint64_t at = 0;
    for (const auto& [each, clock] : streams_) {
      if (each == actor || behind == Behind::kAllStreams) {
        merge(knows, clock);
      }
    }
    if (actor != kHost) {
      at = ++streams_.at(actor)[actor];
      knows[actor] = at;
    }
    access_locked({actor, at, kind}, knows, range, violations);
    handler = handler_;
  }
  report(violations, handler);
}

void HappensBefore::forget(Range range) {
  const MutexLock lock(mutex_);
  Segments& segments = segments_[range.space];
  split(segments, range.begin);
  split(segments, range.begin + range.bytes);
  segments.erase(segments.lower_bound(range.begin), segments.lower_bound(range.begin + range.bytes));
}

void HappensBefore::access_locked(const Access& access, const Clock& knows, Range range,
                                  std::vector<std::string>& violations) {
  if (range.bytes == 0) {
    return;
  }
  Segments& segments = segments_[range.space];
  const std::uint64_t end = range.begin + range.bytes;
  split(segments, range.begin);
  split(segments, end);
  for (auto at = segments.lower_bound(range.begin); at != segments.end() && at->first < end; ++at) {
    for (const Access& earlier : at->second.last) {
      if (conflict(earlier.kind, access.kind) && !ordered(earlier, knows)) {
        violations.push_back(describe(access) + " " + std::to_string(range.bytes) + " bytes at " +
                             std::to_string(range.begin) +
                             (range.space == kDevice ? " of device memory" : " of its tier") + ", which " +
                             describe(earlier) + "; nothing orders the first behind the second");
        break;
      }
    }
  }
  if (access.kind == Kind::kWrite || access.kind == Kind::kFree) {
    segments.erase(segments.lower_bound(range.begin), segments.lower_bound(end));
  }
  if (access.kind == Kind::kMade) {
    const auto is_behind_a_stream = [this](const Access& earlier) EBB_REQUIRES(mutex_) {
      const auto is_before = [&](const auto& stream) EBB_REQUIRES(mutex_) { return ordered(earlier, stream.second); };
      return earlier.kind != Kind::kRead && (ordered(earlier, host_) || std::ranges::any_of(streams_, is_before));
    };
    for (auto at = segments.lower_bound(range.begin); at != segments.end() && at->first < end; ++at) {
      std::erase_if(at->second.last, is_behind_a_stream);
    }
  }
  if (access.actor == kHost) {
    return;  // everything that is queued from now on comes behind a host access
  }
  // Merges with the segments that are there, and fills the gaps between them.
  std::uint64_t begin = range.begin;
  while (begin < end) {
    const auto next = segments.lower_bound(begin);
    if (next != segments.end() && next->first == begin) {
      std::vector<Access>& last = next->second.last;
      const auto is_replaced = [&](const Access& each)
                                   EBB_REQUIRES(mutex_) { return each.kind == access.kind && ordered(each, knows); };
      std::erase_if(last, is_replaced);
      last.push_back(access);
      begin = next->second.end;
    } else {
      const std::uint64_t gap_end = next == segments.end() ? end : std::min(end, next->first);
      segments.emplace_hint(next, begin, Segment{gap_end, {access}});
      begin = gap_end;
    }
  }
}

bool HappensBefore::ordered(const Access& earlier, const Clock& knows) const {
  if (earlier.actor == kHost || !names_.contains(earlier.actor)) {
    return true;
  }
  const auto known = knows.find(earlier.actor);
  return known != knows.end() && known->second >= earlier.at;
}

// Splits a segment that spans `at` in two.
void HappensBefore::split(Segments& segments, std::uint64_t at) {
  auto next = segments.lower_bound(at);
  if (next == segments.begin()) {
    return;
  }
  Segment& spanning = std::prev(next)->second;
  if (spanning.end > at) {
    segments.emplace_hint(next, at, Segment{spanning.end, spanning.last});
    spanning.end = at;
  }
}

std::string HappensBefore::describe(const Access& access) const {
  return (access.actor == kHost ? std::string("the host") : names_.at(access.actor)) + " " + verb(access.kind);
}

void HappensBefore::report(const std::vector<std::string>& violations, Handler handler) {
  for (const std::string& violation : violations) {
    if (handler != nullptr) {
      handler(violation);
      continue;
    }
    std::fprintf(stderr, "A wait is missing: %s.\n", violation.c_str());
    std::abort();
  }
}

}  // namespace ebb
