#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/cache/home_block.h"
#include "offload/cache/residency.h"
#include "streams/base/block_pool.h"
#include "streams/base/mutex.h"

namespace ebb {

// A copy of a tensor in host memory, which a lane makes while the program goes on.
//
// Threads: every member may be called from any thread.
class HostCopy {
 public:
  // Starts to copy `from` behind the current stream's work. Nobody may write to `from` until the copy is done; the
  // memory is kept until then. The copy's memory is of the tier that `beside` has its home in. Returns null where that
  // has no room, or its blocks are no memory, and where `beside` is not managed or `from` is empty. Throws c10::Error
  // in a forked child, and where a copy cannot be queued.
  [[nodiscard]] static std::shared_ptr<HostCopy> start(const at::Tensor& beside, const at::Tensor& from);

  HostCopy(std::shared_ptr<Residency> residency, Block block, const at::Tensor& from);
  ~HostCopy();
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  // Blocks the calling thread until the copy is done. The result is contiguous, and valid as long as this. Of a copy
  // that failed it is another one, by LibTorch, whose errors this throws.
  [[nodiscard]] at::Tensor wait();

  // Returns whether the copy is over. If so, lets go of the memory that the copy is from, unless the copy has failed:
  // wait() needs the memory then.
  bool try_to_let_go();

 private:
  const std::shared_ptr<Residency> residency_;
  const at::TensorOptions kind_;
  const std::vector<std::int64_t> sizes_;
  HomeBlock home_;
  Mutex mutex_;
  at::Tensor from_ EBB_GUARDED_BY(mutex_);  // until the copy is over
};

}  // namespace ebb
