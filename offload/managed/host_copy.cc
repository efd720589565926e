#include "offload/managed/host_copy.h"

#include <optional>
#include <utility>

#include <ATen/ops/from_blob.h>

#include "offload/managed/registry.h"

namespace ebb {

std::shared_ptr<HostCopy> HostCopy::start(const at::Tensor& beside, const at::Tensor& from) {
  const std::shared_ptr<ManagedSet> set = Registry::all().find(beside).set;
  if (set == nullptr || !set->residency().tier().blocks_are_memory() || from.numel() == 0) {
    return nullptr;
  }
  set->residency().check_process();
  const at::Tensor dense = from.detach().contiguous();
  std::optional<Block> block = set->residency().tier().try_acquire(dense.nbytes());
  if (!block) {
    return nullptr;
  }
  return std::make_shared<HostCopy>(set->shared_residency(), *std::move(block), dense);
}

HostCopy::HostCopy(std::shared_ptr<Residency> residency, Block block, const at::Tensor& from)
    : residency_(std::move(residency)),
      kind_(from.options().device(at::kCPU)),
      sizes_(from.sizes().vec()),
      home_(residency_->tier(), std::move(block)),
      from_(from) {
  home_.copy_out(from.const_data_ptr(), residency_->tier().current_stream());
  residency_->tier().flush();
}

// The memory that the copy is from may not be freed before the copy is done.
HostCopy::~HostCopy() {
  at::Tensor from;
  {
    const MutexLock lock(mutex_);
    from = std::move(from_);
  }
  if (from.defined() && in_force(WaitPoint::kStashEnd)) {
    try {
      home_.copied_out()->synchronize();
    } catch (...) {  // the copy has failed, and so is over
    }
  }
}

at::Tensor HostCopy::wait() {
  if (in_force(WaitPoint::kAtHomeAfterOut)) {
    try {
      home_.copied_out()->synchronize();
    } catch (...) {
      at::Tensor from;
      {
        const MutexLock lock(mutex_);
        from = from_;
      }
      return from.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
    }
  }
  try_to_let_go();
  return at::from_blob(home_.data(), sizes_, kind_);
}

bool HostCopy::try_to_let_go() {
  at::Tensor garbage;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  if (!is_done(home_.copied_out())) {
    return false;
  }
  try {
    home_.copied_out()->synchronize();
    garbage = std::move(from_);
  } catch (...) {  // wait() makes another copy
  }
  return true;
}

}  // namespace ebb
