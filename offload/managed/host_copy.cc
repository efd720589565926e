#include "offload/managed/host_copy.h"

#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "offload/base/managed_key.h"
#include "offload/managed/registry.h"

namespace ebb {

std::shared_ptr<HostCopy> HostCopy::start(const at::Tensor& beside, const at::Tensor& from) {
  const std::shared_ptr<ManagedSet> set =
      is_managed(beside) ? Registry::all().find(beside.storage().unsafeGetStorageImpl()).set : nullptr;
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
      kind_(from.options()),
      sizes_(from.sizes().vec()),
      offset_(from.storage_offset()),
      home_(residency_->tier(), std::move(block)),
      from_(from.storage()) {
  home_.copy_out(from.const_data_ptr(), residency_->tier().current_stream());
  residency_->tier().flush();
}

// The memory that the copy is from may not be freed before the copy is done.
HostCopy::~HostCopy() {
  std::optional<c10::Storage> from;
  {
    const MutexLock lock(mutex_);
    from.swap(from_);
  }
  if (from && in_force(WaitPoint::kStashEnd)) {
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
      return again();
    }
  }
  try_to_let_go();
  return at::from_blob(home_.data(), sizes_, kind_.device(at::kCPU));
}

at::Tensor HostCopy::again() {
  std::optional<c10::Storage> from;
  {
    const MutexLock lock(mutex_);
    from = from_;
  }
  return at::empty({0}, kind_).set_(from.value(), offset_, sizes_).to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
}

bool HostCopy::try_to_let_go() {
  std::optional<c10::Storage> garbage;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  if (!is_done(home_.copied_out())) {
    return false;
  }
  try {
    home_.copied_out()->synchronize();
    garbage = std::exchange(from_, std::nullopt);
  } catch (...) {  // wait() makes another copy
  }
  return true;
}

}  // namespace ebb
