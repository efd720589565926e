#pragma once

#include <optional>

#include <c10/core/Device.h>

#include "offload/base/storage_set.h"
#include "offload/stats.h"

namespace at {
class Tensor;
}

namespace ebb {

// Knows which tensors must never be moved. Parameters are found without help: autograd saves them as leaves that
// require gradients, or as views of such leaves (a linear layer saves `weight.t()`), and their storages are remembered.
//
// Threads: every member may be called from any thread.
class Exclusions {
 public:
  explicit Exclusions(c10::Device device) : device_(device) {}

  void add(const at::Tensor& tensor);

  // Why this tensor must stay as it is; nullopt when it may be moved. Does not read the tensor's bytes.
  [[nodiscard]] std::optional<KeptReason> reason(const at::Tensor& tensor);

 private:
  bool is_parameter(const at::Tensor& tensor);

  const c10::Device device_;
  StorageSet excluded_;
  StorageSet parameters_;
};

}  // namespace ebb
