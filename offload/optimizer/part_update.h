#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/managed/host_copy.h"
#include "offload/managed/postponed_work.h"
#include "offload/optimizer.h"
#include "offload/optimizer/parts.h"
#include "offload/optimizer/update_rule.h"

namespace ebb {

// One update of a parameter.
struct Update {
  std::shared_ptr<const UpdateRule> rule;
  bool has_new_states;  // which are zero
  std::int64_t elements_at_once = kElementsAtOnce;
};

// Whether all that an update takes is at home in memory, or is a gradient that can be copied there, and LibTorch's
// fused kernels take such tensors. Only a hint, as AtHome::is_possible().
[[nodiscard]] bool can_update_at_home(const at::Tensor& parameter, const at::Tensor& gradient,
                                      const std::vector<Part>& parts);

// Updates the parameter, part by part. kCpu: at home, if that is possible, and the calling thread waits for the
// gradient. Otherwise what is managed comes to where the parameter is used. `follows_weight`: false where `parameter`
// stands in for one that has ended, which has no value; the masters have it.
void update_now(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                const Update& update, UpdateOn update_on, bool follows_weight);

// Puts an update off, as postpone(). Returns false, and has done nothing, where the update cannot be put off.
[[nodiscard]] bool update_at_next_use(const at::Tensor& parameter, const at::Tensor& gradient,
                                      const std::vector<Part>& parts, const Update& update, UpdateOn update_on);

// Puts an update at home off: PostponedWork has the contract. `copy`: of a gradient that has no home; otherwise
// null. Returns null, and has done nothing, where the update cannot be put off.
[[nodiscard]] std::shared_ptr<PostponedWork> update_later_at_home(const at::Tensor& parameter,
                                                                  const at::Tensor& gradient,
                                                                  const std::shared_ptr<HostCopy>& copy,
                                                                  const std::vector<Part>& parts, const Update& update);

}  // namespace ebb
