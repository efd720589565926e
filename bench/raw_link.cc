#include "bench/raw_link.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <latch>
#include <stdexcept>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "bench/bytes.h"
#include "bench/stream_gate.h"

namespace ebb {
namespace {

// A measurement moves so much, in these numbers of copies: enough for a sustained rate. Those of pinned memory are few
// enough for a stream to take at once.
struct Extent {
  std::size_t bytes;
  std::size_t most_copies;
};
constexpr Extent kPinnedExtent{std::size_t{4} << 30, 256};
constexpr Extent kPageableExtent{std::size_t{1} << 30, 4096};
constexpr std::size_t kLeastCopies = 4;

// How many points of a lane's way are timed after its start. A timed event among copies takes time of its own, so there
// are no more than needed: the end, and beside the other lane one that is over, late on the way, while that still runs.
constexpr std::size_t kMarksAlone = 1;
constexpr std::size_t kMarksTogether = 4;

c10::cuda::CUDAStream new_stream(c10::Device device) {
  return c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index());
}

}  // namespace

RawLink::RawLink(c10::Device device, bool pinned)
    : device_(device),
      pinned_(pinned),
      events_(CudaEventPool::of(device, CudaEventPool::Timing::kOn)),
      slabs_(device, pinned),
      gate_stream_(new_stream(device)),
      out_{cudaMemcpyDeviceToHost, new_stream(device), {device, kMostBytes}, take_host_memory()},
      in_{cudaMemcpyHostToDevice, new_stream(device), {device, kMostBytes}, take_host_memory()} {}

std::byte* RawLink::take_host_memory() {
  const auto range = slabs_.grow(kMostBytes);
  if (!range) {
    throw std::runtime_error("the system has no " + format_bytes(kMostBytes) + " more of " +
                             (pinned_ ? "pinned" : "pageable") + " host memory");
  }
  return reinterpret_cast<std::byte*>(range->address);
}

std::size_t RawLink::copies(std::size_t bytes) const {
  const Extent& extent = pinned_ ? kPinnedExtent : kPageableExtent;
  return std::clamp(extent.bytes / bytes, kLeastCopies, extent.most_copies);
}

CopyRate RawLink::alone(Direction direction, std::size_t bytes) {
  StreamGate gate(gate_stream_);
  const CudaEvent start(events_, gate_stream_);
  if (!pinned_) {
    gate.open();
  }
  const Queued queued = queue(direction == Direction::kDeviceToHost ? out_ : in_, bytes, start, kMarksAlone);
  const bool ahead = gate.open();
  return {rate_gb_per_s(wait(queued, start)), queued.enqueue_us_each, ahead};
}

std::pair<CopyRate, CopyRate> RawLink::together(std::size_t bytes) {
  StreamGate gate(gate_stream_);
  const CudaEvent start(events_, gate_stream_);
  if (!pinned_) {
    gate.open();
  }
  std::latch both_run(2);
  std::future<Queued> other = std::async(std::launch::async, [&] {
    both_run.arrive_and_wait();
    return queue(in_, bytes, start, kMarksTogether);
  });
  both_run.arrive_and_wait();
  const Queued out = queue(out_, bytes, start, kMarksTogether);
  const Queued in = other.get();
  const bool ahead = gate.open();
  const auto [out_rate, in_rate] = rates_together(wait(out, start), wait(in, start));
  return {{out_rate, out.enqueue_us_each, ahead}, {in_rate, in.enqueue_us_each, ahead}};
}

// The copies walk through the memory, so that no cache serves them where there are many bytes of them.
RawLink::Queued RawLink::queue(const Lane& lane, std::size_t bytes, const CudaEvent& start, std::size_t marks) {
  const c10::cuda::CUDAGuard device(device_);
  const std::size_t count = copies(bytes);
  const std::size_t copies_a_mark = (count + marks - 1) / marks;
  Queued queued;
  const auto mark = [&](std::size_t copied) {
    queued.marks.push_back({std::make_unique<const CudaEvent>(events_, lane.stream), copied * bytes});
  };
  start.block(lane.stream);
  mark(0);
  const auto host_start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t offset = i * bytes % kMostBytes;
    std::byte* const on_device = lane.device_memory.data() + offset;
    std::byte* const on_host = lane.host_memory + offset;
    const bool out = lane.kind == cudaMemcpyDeviceToHost;
    C10_CUDA_CHECK(
        cudaMemcpyAsync(out ? on_host : on_device, out ? on_device : on_host, bytes, lane.kind, lane.stream.stream()));
    if ((i + 1) % copies_a_mark == 0 || i + 1 == count) {
      mark(i + 1);
    }
  }
  const std::chrono::duration<double, std::micro> host_us = std::chrono::steady_clock::now() - host_start;
  queued.enqueue_us_each = host_us.count() / static_cast<double>(count);
  return queued;
}

ProgressCurve RawLink::wait(const Queued& queued, const CudaEvent& origin) {
  queued.marks.back().reached->synchronize();
  ProgressCurve curve;
  for (const Mark& mark : queued.marks) {
    curve.push_back({mark.reached->ms_since(origin), static_cast<double>(mark.bytes)});
  }
  return curve;
}

}  // namespace ebb
