#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/managed/registry.h"

namespace ebb {

// The bytes of managed tensors where their homes are, in host memory, while an object of this class lives: for work of
// the host's, to which the bytes need not come. Meanwhile the device does not have them, and a use there waits.
//
// Threads: is_possible() may be called from any; an object belongs to the thread that made it.
class AtHome {
 public:
  // Whether all of the tensors are managed, come and go, are neither negated nor conjugated, and have homes that are
  // memory. Only a hint: another thread may change that.
  [[nodiscard]] static bool is_possible(at::TensorList tensors);

  // Sends the tensors home, does what has been put off until their use, and blocks the calling thread until their
  // copies are over. Returns null where that is not possible, or where one of the tensors is in use; those before have
  // been sent home all the same. Throws the error of a copy that failed, and what work that was put off throws.
  [[nodiscard]] static std::shared_ptr<AtHome> of(at::TensorList tensors);

  ~AtHome();
  AtHome(const AtHome&) = delete;
  AtHome& operator=(const AtHome&) = delete;

  // On the CPU, over the homes, of the same sizes and strides: in the order of `tensors`, and valid as long as this.
  [[nodiscard]] const std::vector<at::Tensor>& tensors() const { return tensors_; }

 private:
  AtHome() = default;

  std::vector<Registry::Found> used_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace ebb
