#include "streams/base/trace.h"

#include <utility>

#include <nvtx3/nvToolsExt.h>

namespace ebb {
namespace {

using Clock = std::chrono::steady_clock;

nvtxDomainHandle_t nvtx_domain() {
  static const nvtxDomainHandle_t domain = nvtxDomainCreateA("ebb");
  return domain;
}

}  // namespace

void Trace::add(const char* name, TraceTrack track, TraceSpan::Time begin, TraceSpan::Time end,
                std::uint64_t bytes) noexcept {
  if (process_.forked()) {
    return;
  }
  const MutexLock lock(mutex_);
  if (spans_.size() >= kMaxSpans) {
    return;
  }
  try {
    const std::uint64_t thread =
        track == TraceTrack::kHost ? names_.try_emplace(std::this_thread::get_id(), names_.size()).first->second : 0;
    spans_.push_back({name, track, begin, end, bytes, thread});
  } catch (...) {  // no memory for a picture: leave the span out
  }
}

std::vector<TraceSpan> Trace::take() {
  process_.check("this trace");
  const MutexLock lock(mutex_);
  return std::exchange(spans_, {});
}

HostRange::HostRange(Trace* trace, const char* name, std::uint64_t bytes) noexcept
    : trace_(trace), name_(name), bytes_(bytes) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  attributes.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
  attributes.payload.ullValue = bytes;
  nvtxDomainRangePushEx(nvtx_domain(), &attributes);
  if (trace_ != nullptr) {
    begin_ = Clock::now();
  }
}

HostRange::~HostRange() {
  nvtxDomainRangePop(nvtx_domain());
  if (trace_ != nullptr) {
    trace_->add(name_, TraceTrack::kHost, begin_, Clock::now(), bytes_);
  }
}

}  // namespace ebb
