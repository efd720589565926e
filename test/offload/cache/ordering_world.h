#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/saving/runtime.h"
#include "test/simulated/simulated_stream_guard.h"
#include "test/simulated/simulated_tier.h"

namespace ebb::test {

struct Order {
  Schedule schedule;
  std::uint64_t seed;
};

// As late and as early as allowed, and twenty random orders: others for each value of the environment variable
// EBB_SEED. The test case runs once with each.
[[nodiscard]] Order any_order();

// A simulated device whose kernels wait in queues as on a GPU, and an offloader's runtime over it. Tensors are kBytes
// or a multiple long; kernels fill them with one value and read that value back, so that any byte moved at the wrong
// time shows.
class OrderingWorld {
 public:
  static constexpr std::size_t kFloats = 1024;
  static constexpr std::size_t kBytes = kFloats * sizeof(float);

  struct Limits {
    std::optional<std::uint64_t> capacity_bytes = std::nullopt;
    std::uint64_t stash_bytes = 1;  // hold nothing: every source is let go as soon as the stream has waited
    std::uint64_t window_bytes = std::uint64_t{1} << 30;
  };

  OrderingWorld(Schedule schedule, std::uint64_t seed, Limits limits);

  // A tensor of the device, made by a kernel that has yet to run on the current stream.
  at::Tensor make(float value, std::size_t times = 1);

  // Saves the tensor as autograd would, and lets go of it.
  std::unique_ptr<SavedStorage::Use> save(at::Tensor tensor);

  // Queues a kernel on the current stream that reads the bytes. `seen()` has them after `run`.
  void read(c10::Storage storage);

  void run() { tier->run_all(); }

  // What the kernels read, in the order in which they were queued; NaN where the floats of one storage differ.
  [[nodiscard]] const std::vector<float>& seen() const { return *seen_; }

  const std::shared_ptr<SimulatedTier> tier;
  const std::shared_ptr<Runtime> runtime;
  std::shared_ptr<SavedStep> step;

 private:
  std::shared_ptr<std::vector<float>> seen_ = std::make_shared<std::vector<float>>();
};

}  // namespace ebb::test
