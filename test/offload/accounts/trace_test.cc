// The trace: every copy, stall, pack and unpack, once, in its place.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <set>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>

#include "offload/guard.h"
#include "offload/offloader.h"
#include "policy/policies.h"
#include "streams/base/trace.h"
#include "test/offload/networks.h"
#include "test/offload/on_threads.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using Spans = std::vector<TraceSpan>;

Spans of_name(const Spans& spans, const char* name) {
  Spans found;
  std::ranges::copy_if(spans, std::back_inserter(found),
                       [&](const TraceSpan& span) { return std::strcmp(span.name, name) == 0; });
  return found;
}

std::uint64_t bytes(const Spans& spans) {
  std::uint64_t sum = 0;
  for (const TraceSpan& span : spans) {
    sum += span.bytes;
  }
  return sum;
}

bool all_on(const Spans& spans, TraceTrack track) {
  return std::ranges::all_of(spans, [&](const TraceSpan& span) { return span.track == track; });
}

void check_step(c10::Device device, DiskIo io) {
  Options options;
  options.device = device;
  options.policy = offload_everything();
  options.stash_bytes = 1;
  options.disk_io = io;
  options.record_trace = true;
  Offloader offloader(options);
  const at::Tensor weight = at::randn({64, 64}, at::TensorOptions().device(device)).requires_grad_();
  const auto begin = std::chrono::steady_clock::now();
  {
    const OffloadGuard guard(offloader);
    const at::Tensor x = weight.mm(weight).sin();
    (x.exp() * x * weight).sum().backward();
  }
  offloader.drain();
  if (device.is_cuda()) {
    static_cast<void>(weight.sum().item<float>());
  }
  const Stats stats = offloader.stats();
  const Spans spans = offloader.take_trace();
  const auto end = std::chrono::steady_clock::now();

  REQUIRE(stats.offloaded.tensors > 0);
  REQUIRE(stats.fetched.tensors > 0);
  REQUIRE(stats.deduplicated.tensors > 0);
  // On a GPU small copies go in batches: Note [Batches] in copy_batch.h.
  const auto is_count = [&](std::size_t copies, std::uint64_t tensors) {
    return device.is_cuda() ? 0 < copies && copies <= tensors : copies == tensors;
  };
  REQUIRE(stats.kept_for(KeptReason::kParameter).tensors > 0);
  const Spans out = of_name(spans, "copy out");
  CHECK(is_count(out.size(), stats.offloaded.tensors));
  CHECK(bytes(out) == stats.offloaded.bytes);
  CHECK(all_on(out, TraceTrack::kOutLane));
  const Spans in = of_name(spans, "copy in");
  CHECK(is_count(in.size(), stats.fetched.tensors));
  CHECK(bytes(in) == stats.fetched.bytes);
  CHECK(all_on(in, TraceTrack::kInLane));
  const Spans stalls = of_name(spans, "stall");
  CHECK(stalls.size() == stats.stalls);
  CHECK(all_on(stalls, TraceTrack::kCompute));
  const Spans packs = of_name(spans, "pack");
  CHECK(packs.size() == stats.offloaded.tensors + stats.deduplicated.tensors);
  CHECK(bytes(packs) == stats.offloaded.bytes + stats.deduplicated.bytes);
  CHECK(all_on(packs, TraceTrack::kHost));
  const Spans unpacks = of_name(spans, "unpack");
  CHECK(unpacks.size() == packs.size());
  CHECK(all_on(unpacks, TraceTrack::kHost));
  CHECK(out.size() + in.size() + stalls.size() + packs.size() + unpacks.size() == spans.size());
  const auto slack = device.is_cuda() ? std::chrono::milliseconds(5) : std::chrono::milliseconds(0);  // two clocks
  CHECK(std::ranges::all_of(spans, [&](const TraceSpan& span) {
    return begin - slack <= span.begin && span.begin <= span.end && span.end <= end + slack;
  }));
  CHECK(offloader.take_trace().empty());
}

TEST_CASE_METHOD(NoLeak, "the trace of a step has each copy, stall, pack and unpack once") {
  check_step(c10::kCPU, DiskIo::kThreads);
  check_step(c10::kCPU, DiskIo::kAuto);
}

TEST_CASE("the trace of a step on a GPU has each copy, stall, pack and unpack once", "[gpu]") {
  check_step({c10::kCUDA, 0}, DiskIo::kAuto);
}

TEST_CASE_METHOD(NoLeak, "without asking for it there is no trace") {
  Options options;
  options.device = c10::kCPU;
  options.policy = offload_everything();
  Offloader offloader(options);
  Inputs in;
  {
    const OffloadGuard guard(offloader);
    three_layers(in).sum().backward();
  }
  CHECK(offloader.take_trace().empty());
}

TEST_CASE("spans of the host bear their thread's number, one for each thread") {
  Trace trace;
  const auto now = std::chrono::steady_clock::now();
  on_threads(3, [&](std::size_t /*thread*/) {
    trace.add("pack", TraceTrack::kHost, now, now, 0);
    trace.add("pack", TraceTrack::kHost, now, now, 0);
  });
  std::multiset<std::uint64_t> threads;
  for (const TraceSpan& span : trace.take()) {
    threads.insert(span.thread);
  }
  CHECK(threads == std::multiset<std::uint64_t>{0, 0, 1, 1, 2, 2});
}

}  // namespace
}  // namespace ebb
