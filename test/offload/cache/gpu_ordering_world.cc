#include "test/offload/cache/gpu_ordering_world.h"

#include <tuple>

#include <ATen/Functions.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include "policy/policies.h"

namespace ebb::test {
namespace {

// As many tensors as any test has on one stream at once.
constexpr int kTensors = 6;

at::TensorOptions ints_on_gpu() { return at::TensorOptions().device(c10::kCUDA, 0).dtype(at::kInt); }

std::shared_ptr<PinnedTier> make_tier(std::size_t bytes, const GpuOrderingWorld::Limits& limits) {
  PinnedTier::Config config;
  config.overlapped = limits.overlapped;
  if (limits.one_block) {
    // Whole times what LaneHold takes, which comes first: the pool grows by multiples of what it is asked for.
    config.capacity_bytes = (bytes + LaneHold::kBytes - 1) / LaneHold::kBytes * LaneHold::kBytes + LaneHold::kBytes;
  }
  return std::make_shared<PinnedTier>(config);
}

std::shared_ptr<Runtime> make_runtime(const std::shared_ptr<PinnedTier>& tier, std::uint64_t stash_bytes) {
  Options options;
  options.device = tier->device();
  options.policy = offload_everything();
  options.stash_bytes = stash_bytes;
  options.window_bytes = std::uint64_t{1} << 30;
  return std::make_shared<Runtime>(options, tier);
}

}  // namespace

GpuOrderingWorld::GpuOrderingWorld(std::int64_t ints, Limits limits)
    : ints(ints),
      bytes(static_cast<std::size_t>(ints) * sizeof(int)),
      tier(make_tier(bytes, limits)),
      runtime(make_runtime(tier, limits.stash_storages * bytes + 1)),
      step(runtime->steps().of_this_thread()),
      lanes(*tier) {
  start_afresh();
  for (const c10::cuda::CUDAStream stream : {c10::cuda::getDefaultCUDAStream(0), other_stream()}) {
    const c10::cuda::CUDAStreamGuard guard(stream);
    for (const at::Tensor& tensor : make_everywhere(kStale)) {
      read(tensor.storage());
    }
  }
  finish();
  seen_.clear();
}

at::Tensor GpuOrderingWorld::make(int value) const { return at::full({ints}, value, ints_on_gpu()); }

std::vector<at::Tensor> GpuOrderingWorld::make_everywhere(int value) const {
  std::vector<at::Tensor> tensors;
  tensors.reserve(kTensors);
  for (int i = 0; i < kTensors; ++i) {
    tensors.push_back(make(value));
  }
  return tensors;
}

std::unique_ptr<SavedStorage::Use> GpuOrderingWorld::save(const at::Tensor& tensor) {
  return std::make_unique<SavedStorage::Use>(runtime->save(tensor, step));
}

void GpuOrderingWorld::read(const c10::Storage& storage) {
  auto [least, greatest] = at::aminmax(at::empty({0}, ints_on_gpu()).set_(storage, 0, {ints}, {1}));
  seen_.emplace_back(std::move(least), std::move(greatest));
}

void GpuOrderingWorld::finish() { c10::cuda::device_synchronize(); }

std::vector<int> GpuOrderingWorld::seen() const {
  finish();
  std::vector<int> seen;
  seen.reserve(seen_.size());
  for (const auto& [least, greatest] : seen_) {
    seen.push_back(least.equal(greatest) ? least.item<int>() : kMixed);
  }
  return seen;
}

}  // namespace ebb::test
