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

// Updates the parameter, part by part. kCpu: at home, if all of the bytes can be used there, and the calling thread
// waits for the gradient. Otherwise what is managed comes to where the parameter is used.
void update_now(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                const Update& update, UpdateOn update_on);

// Whether nobody else can write to the leaf's gradient: neither the tensor nor its storage has another owner than the
// leaf and what LibTorch holds until the leaf's hooks are over. To be asked in such a hook, before another handle of
// the gradient is made.
[[nodiscard]] bool owns_gradient_alone(const at::Tensor& leaf);

// An update at home that is put off: PostponedWork has the contract. `work` is null where it cannot be, and nothing has
// been done. `copy`: of a gradient that is not managed, whose memory the copy keeps until it is done.
struct UpdateLater {
  std::shared_ptr<PostponedWork> work;
  std::shared_ptr<HostCopy> copy;
};

// `owns_gradient`: nobody writes to the gradient any more. Otherwise a gradient that is not managed is not put off.
[[nodiscard]] UpdateLater update_later_at_home(const at::Tensor& parameter, const at::Tensor& gradient,
                                               bool owns_gradient, const std::vector<Part>& parts,
                                               const Update& update);

}  // namespace ebb
