#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "offload/base/autograd_info.h"
#include "offload/base/storage_set.h"
#include "offload/stats.h"

namespace ebb {

// Knows which saves pass through: of tensors that must never be moved, and of those too small for the policy to be
// asked. Parameters are found without help: autograd saves them as leaves that require gradients, or as views of such
// leaves (a linear layer saves `weight.t()`), and their storages are remembered.
//
// Threads: every member may be called from any thread.
class Exclusions {
 public:
  // `least_bytes`: storages with fewer bytes pass through.
  Exclusions(c10::Device device, std::uint64_t least_bytes) : device_(device), least_bytes_(least_bytes) {}

  void add(const at::Tensor& tensor);
  [[nodiscard]] bool contains(const c10::Storage& storage) const { return excluded_.contains(storage); }

  // Why a save of this tensor passes through; nullopt where its storage may move. `info`: of the tensor. Does not read
  // the tensor's bytes.
  [[nodiscard]] std::optional<KeptReason> reason(const at::Tensor& tensor, const AutogradInfo& info);

 private:
  bool is_parameter(const at::Tensor& tensor, const AutogradInfo& info);

  const c10::Device device_;
  const std::uint64_t least_bytes_;
  StorageSet excluded_;
  StorageSet parameters_;
};

}  // namespace ebb
