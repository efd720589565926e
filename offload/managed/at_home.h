#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/managed/managed_set.h"
#include "offload/managed/managed_storage.h"

namespace ebb {

// The bytes of managed tensors where their homes are, in host memory, while it lives: for work of the host's, to which
// the bytes need not come. Meanwhile the device does not have them; what has been put off is done before.
//
// Threads: one.
class AtHome {
 public:
  // Blocks the calling thread until all copies of these tensors are done. Returns null where one of the tensors is not
  // managed, in use, or stays on the device, or where homes are no memory. Throws the error of a copy that failed, and
  // what work that was put off throws.
  [[nodiscard]] static std::unique_ptr<AtHome> of(at::TensorList tensors);

  ~AtHome();
  AtHome(const AtHome&) = delete;
  AtHome& operator=(const AtHome&) = delete;

  // On the CPU, over the homes, of the same sizes and strides: in the order of `tensors`, and valid as long as this.
  [[nodiscard]] const std::vector<at::Tensor>& tensors() const { return tensors_; }

 private:
  AtHome() = default;
  [[nodiscard]] bool add(const at::Tensor& tensor);

  std::vector<std::shared_ptr<ManagedSet>> sets_;  // destroyed after the storages
  std::vector<std::shared_ptr<ManagedStorage>> used_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace ebb
