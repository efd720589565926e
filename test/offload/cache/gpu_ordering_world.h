#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/saving/runtime.h"
#include "streams/gpu/pinned_tier.h"
#include "test/gpu/delays.h"

namespace ebb::test {

// An offloader's runtime over a real GPU, for tests that hold up its streams and lanes. As in OrderingWorld, kernels
// fill tensors of one size with one value and read that value back, so that a byte moved at the wrong time shows.
//
// Nothing in a test may wait for the device by chance, or the delay is over before it matters. So all memory that a
// test takes is made ready in the constructor, and so are its kernels, which CUDA loads when they are first used. All
// device memory then holds kStale.
class GpuOrderingWorld {
 public:
  static constexpr int kStale = -1;
  static constexpr int kMixed = -2;

  // The sizes that LibTorch's allocator serves each from a segment of its own, so that a tensor gets the memory of one
  // that was freed, and no part of it.
  static constexpr std::int64_t kLeastInts = std::int64_t{10} << 18;
  static constexpr std::int64_t kMostInts = std::int64_t{12} << 18;

  struct Limits {
    bool one_block = false;            // room for one tensor in host memory
    std::uint64_t stash_storages = 0;  // none: a source is let go as soon as the stream has waited
    bool overlapped = true;
  };

  GpuOrderingWorld(std::int64_t ints, Limits limits);

  // A tensor that a kernel on the current stream fills.
  [[nodiscard]] at::Tensor make(int value) const;

  // Tensors in all the memory that the current stream could get without asking the system.
  [[nodiscard]] std::vector<at::Tensor> make_everywhere(int value) const;

  // Saves the tensor as autograd would.
  std::unique_ptr<SavedStorage::Use> save(const at::Tensor& tensor);

  // Queues a kernel on the current stream that reads the bytes.
  void read(const c10::Storage& storage);

  // Waits until the device has done all.
  static void finish();

  // Waits too. What the kernels read, in the order in which they were queued; kMixed where the values of one storage
  // differ.
  [[nodiscard]] std::vector<int> seen() const;

  const std::int64_t ints;
  const std::size_t bytes;
  const std::shared_ptr<PinnedTier> tier;
  const std::shared_ptr<Runtime> runtime;
  const std::shared_ptr<SavedStep> step;
  LaneHold lanes;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> seen_;  // the least and the greatest value
};

}  // namespace ebb::test
