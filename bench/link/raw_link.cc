#include "bench/link/raw_link.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <future>
#include <latch>
#include <mutex>
#include <stdexcept>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "offload/base/human_bytes.h"

namespace ebb {
namespace {

constexpr double kBytesPerMsInGbPerS = 1e6;

double gb_per_s(double bytes, double ms) { return bytes / ms / kBytesPerMsInGbPerS; }

// `ms` within the curve.
double bytes_at(const ProgressCurve& curve, double ms) {
  const auto after =
      std::lower_bound(curve.begin(), curve.end(), ms, [](const Progress& point, double at) { return point.ms < at; });
  if (after == curve.begin()) {
    return curve.front().bytes;
  }
  const Progress& before = *(after - 1);
  return before.bytes + (after->bytes - before.bytes) * (ms - before.ms) / (after->ms - before.ms);
}

double rate_between(const ProgressCurve& curve, double from_ms, double to_ms) {
  const auto after = std::upper_bound(curve.begin(), curve.end(), to_ms,
                                      [](double at, const Progress& point) { return at < point.ms; });
  const double last_ms = after == curve.begin() ? from_ms : (after - 1)->ms;
  const double end_ms = last_ms > from_ms ? last_ms : to_ms;
  return gb_per_s(bytes_at(curve, end_ms) - bytes_at(curve, from_ms), end_ms - from_ms);
}

// Holds a stream up, and with it every stream that waits for an event which is recorded there behind the gate: so the
// host can queue all copies first, and they start together and run without it.
//
// Note [A gate gives way]
// A stream takes a limited number of operations, and where it is full the host's next call blocks until the stream has
// moved on. Behind a gate that only the host opens, that would be for ever. So a gate opens by itself after 200 ms, and
// says so.
//
// Threads: every member may be called from any thread.
class StreamGate {
 public:
  // Shut. `stream` must be used for nothing else meanwhile. Throws c10::Error.
  explicit StreamGate(c10::cuda::CUDAStream stream) : stream_(stream) {
    const c10::cuda::CUDAGuard device(stream_.device());
    C10_CUDA_CHECK(cudaLaunchHostFunc(stream_.stream(), &StreamGate::hold, this));
  }

  // Opens, and waits for the stream.
  ~StreamGate() {
    open();
    static_cast<void>(cudaStreamSynchronize(stream_.stream()));
  }
  StreamGate(const StreamGate&) = delete;
  StreamGate& operator=(const StreamGate&) = delete;

  // Whether it was shut until now: false after it gave way, and where it was opened before.
  bool open() {
    const std::lock_guard lock(mutex_);
    opened_.notify_all();
    return !std::exchange(open_, true);
  }

 private:
  // On a thread of CUDA's, where no call of CUDA's is allowed.
  static void hold(void* gate) {
    constexpr std::chrono::milliseconds kLongest{200};  // Note [A gate gives way]
    auto& self = *static_cast<StreamGate*>(gate);
    std::unique_lock lock(self.mutex_);
    self.opened_.wait_for(lock, kLongest, [&] { return self.open_; });
    self.open_ = true;
  }

  const c10::cuda::CUDAStream stream_;
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;  // LOCK: mutex_
};

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

double rate_gb_per_s(const ProgressCurve& curve) {
  return gb_per_s(curve.back().bytes - curve.front().bytes, curve.back().ms - curve.front().ms);
}

std::pair<double, double> rates_together(const ProgressCurve& a, const ProgressCurve& b) {
  const double from_ms = std::max(a.front().ms, b.front().ms);
  const double to_ms = std::min(a.back().ms, b.back().ms);
  if (from_ms >= to_ms) {
    throw std::runtime_error("the copies of the two directions never ran at the same time");
  }
  return {rate_between(a, from_ms, to_ms), rate_between(b, from_ms, to_ms)};
}

RawLink::RawLink(c10::Device device, bool pinned)
    : device_(device),
      pinned_(pinned),
      events_(CudaEventPool::of(device, CudaEventPool::Timing::kOn)),
      slabs_(device, pinned),
      gate_stream_(new_stream(device)),
      out_{cudaMemcpyDeviceToHost, new_stream(device), {device, kMostBytes}, take_host_memory()},
      in_{cudaMemcpyHostToDevice, new_stream(device), {device, kMostBytes}, take_host_memory()} {}

std::byte* RawLink::take_host_memory() {
  const auto address = slabs_.grow(kMostBytes);
  if (!address) {
    throw std::runtime_error("the system has no " + human_bytes(kMostBytes) + " more of " +
                             (pinned_ ? "pinned" : "pageable") + " host memory");
  }
  return reinterpret_cast<std::byte*>(*address);
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
