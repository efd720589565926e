// What a copy costs the host whoever asks for it. "raw_copy" is what CUDA's calls take for one copy out that is ordered
// right: behind the compute stream's work, with an event for whoever waits for it. "pinned_tier_copy" is ebb's tier
// without saves: a block, and a copy out into it. The device is idle when a pass begins, and no pass fills its queues.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "bench/common/device_buffer.h"
#include "bench/overhead/rows.h"
#include "examples/common/device.h"
#include "streams/base/after.h"
#include "streams/gpu/pinned_tier.h"

namespace ebb {
namespace {

constexpr std::size_t kCopies = 100;

// The seconds of a pass over fresh or returned blocks.
double copy_by_tier(PinnedTier& tier, const DeviceBuffer& source, std::size_t bytes) {
  std::vector<Block> blocks;
  blocks.reserve(kCopies);
  std::vector<Ticket> tickets;
  tickets.reserve(kCopies);
  synchronize(kGpu);
  const Stopwatch watch;
  for (std::size_t i = 0; i < kCopies; ++i) {
    blocks.push_back(tier.try_acquire(bytes).value());
    tickets.push_back(
        tier.copy_out(blocks.back(), source.data() + i * bytes, After(WaitPoint::kCaller, tier.current_stream())));
  }
  tier.flush();
  const double seconds = watch.seconds();
  for (const Ticket& ticket : tickets) {
    ticket->synchronize();
  }
  return seconds;
}

class RawCopies {
 public:
  explicit RawCopies(std::size_t bytes) : bytes_(bytes), source_(kGpu, kCopies * bytes) {
    C10_CUDA_CHECK(cudaHostAlloc(&host_, kCopies * bytes, cudaHostAllocPortable));
    for (cudaEvent_t& event : events_) {
      C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
  }
  ~RawCopies() {
    synchronize(kGpu);
    for (const cudaEvent_t event : events_) {
      static_cast<void>(cudaEventDestroy(event));
    }
    static_cast<void>(cudaFreeHost(host_));
  }
  RawCopies(const RawCopies&) = delete;
  RawCopies& operator=(const RawCopies&) = delete;

  double run() {
    synchronize(kGpu);
    const Stopwatch watch;
    for (std::size_t i = 0; i < kCopies; ++i) {
      C10_CUDA_CHECK(cudaEventRecord(events_[2 * i], compute_));
      C10_CUDA_CHECK(cudaStreamWaitEvent(side_, events_[2 * i]));
      C10_CUDA_CHECK(cudaMemcpyAsync(static_cast<std::byte*>(host_) + i * bytes_, source_.data() + i * bytes_, bytes_,
                                     cudaMemcpyDeviceToHost, side_));
      C10_CUDA_CHECK(cudaEventRecord(events_[2 * i + 1], side_));
    }
    return watch.seconds();
  }

 private:
  const std::size_t bytes_;
  const DeviceBuffer source_;
  const c10::cuda::CUDAStream compute_ = c10::cuda::getCurrentCUDAStream(kGpu.index());
  const c10::cuda::CUDAStream side_ = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, kGpu.index());
  void* host_ = nullptr;
  std::vector<cudaEvent_t> events_ = std::vector<cudaEvent_t>(2 * kCopies);
};

template <class Pass>
void run_passes(benchmark::State& state, Pass pass) {
  pass();  // pools grow
  double total = 0;
  for (auto _ : state) {
    const double seconds = pass();
    state.SetIterationTime(seconds);
    total += seconds;
  }
  state.counters["ns_per_copy"] = kNanoseconds * total / static_cast<double>(state.iterations() * kCopies);
}

void run_tier(benchmark::State& state) {
  const auto bytes = static_cast<std::size_t>(state.range(0));
  PinnedTier::Config config;
  config.device = kGpu;
  PinnedTier tier(config);
  const DeviceBuffer source(kGpu, kCopies * bytes);
  run_passes(state, [&] { return copy_by_tier(tier, source, bytes); });
}

void run_raw(benchmark::State& state) {
  RawCopies copies(static_cast<std::size_t>(state.range(0)));
  run_passes(state, [&] { return copies.run(); });
}

}  // namespace

void register_copies() {
  if (!has_gpu()) {
    skip_without_gpu("raw_copy");
    skip_without_gpu("pinned_tier_copy");
    return;
  }
  constexpr std::int64_t kSmall = 16;
  constexpr std::int64_t kLarge = 1 << 20;
  benchmark::RegisterBenchmark("raw_copy", run_raw)->Arg(kSmall)->Arg(kLarge)->UseManualTime();
  benchmark::RegisterBenchmark("pinned_tier_copy", run_tier)->Arg(kSmall)->Arg(kLarge)->UseManualTime();
}

}  // namespace ebb
