#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "offload/managed/host_copy.h"
#include "offload/managed/postponed_work.h"
#include "offload/optimizer.h"
#include "offload/optimizer/parts.h"

namespace ebb {

// One update of a parameter.
struct Update {
  const UpdateRule& rule;
  std::shared_ptr<const torch::optim::OptimizerOptions> options;
  std::int64_t step;    // from 1
  bool has_new_states;  // which are zero
};

// Updates the parameter where it is used, part by part: what is managed comes there.
void update_parts(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                  const Update& update, UpdateOn update_on);

// Updates the parameter at home, on the CPU. The calling thread waits for the gradient. Returns false, and has done
// nothing, where some of the bytes cannot be used there.
[[nodiscard]] bool try_to_update_at_home(const at::Tensor& parameter, const at::Tensor& gradient,
                                         const std::vector<Part>& parts, const Update& update);

// An update at home that is put off: PostponedWork has the contract. `work` is null where it cannot be, and nothing has
// been done. `copy`: of a gradient that is not managed, which lives until the copy is done.
struct UpdateLater {
  std::shared_ptr<PostponedWork> work;
  std::shared_ptr<HostCopy> copy;
};
[[nodiscard]] UpdateLater update_later_at_home(const at::Tensor& parameter, const at::Tensor& gradient,
                                               const std::vector<Part>& parts, const Update& update);

}  // namespace ebb
