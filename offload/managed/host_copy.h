#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "offload/residency/residency.h"
#include "streams/base/block.h"
#include "streams/base/mutex.h"
#include "streams/base/ticket.h"

namespace ebb {

// A copy of a tensor in host memory, which a lane makes while the program goes on.
//
// Threads: every member may be called from any thread.
class HostCopy {
 public:
  // Starts to copy `from`, which nobody writes to any more, behind the current stream's work. The memory is of the tier
  // that `beside` has its home in. Returns null where that has no room, or its blocks are no memory, and where `beside`
  // is not managed.
  [[nodiscard]] static std::shared_ptr<HostCopy> start(const at::Tensor& beside, const at::Tensor& from);

  HostCopy(std::shared_ptr<Residency> residency, Block block, const at::Tensor& from);
  ~HostCopy();
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  // Blocks the calling thread until the copy is done. The result is contiguous, and valid as long as this. Throws the
  // error of a copy that failed.
  [[nodiscard]] at::Tensor wait();

  // Lets go of the memory that the copy is from, if the copy is done. Returns whether that is so.
  bool try_to_let_go();

 private:
  const std::shared_ptr<Residency> residency_;
  const at::TensorOptions kind_;
  const std::vector<std::int64_t> sizes_;
  Block block_;
  Ticket done_;
  Mutex mutex_;
  std::optional<c10::Storage> from_
      EBB_GUARDED_BY(mutex_);  // until the copy is done; no tensor, which might be managed
};

}  // namespace ebb
