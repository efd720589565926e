#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/managed/postpone.h"
#include "offload/managed/postponed_work.h"
#include "offload/optimizer.h"
#include "offload/optimizer/parts.h"
#include "offload/optimizer/update_rule.h"

namespace ebb {

// One update of a parameter.
struct Update {
  std::shared_ptr<const UpdateRule> rule;
  UpdateOn update_on = UpdateOn::kDevice;
  bool has_new_states = false;  // which are zero
  std::int64_t elements_at_once = kElementsAtOnce;
};

// Updates the parameter, part by part, where its bytes are used. `follows_weight`: false where `parameter` stands in
// for one that has ended, which has no value; the masters have it.
void update_now(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                const Update& update, bool follows_weight = true);

// Whether all that an update takes is at home in memory, or is a gradient that can be copied there, and LibTorch's
// fused kernels take such tensors. Only a hint, as can_be_used_at_home().
[[nodiscard]] bool can_update_at_home(const at::Tensor& parameter, const at::Tensor& gradient,
                                      const std::vector<Part>& parts);

// Puts an update off, as postpone(). kHome: the caller has asked can_update_at_home(); a gradient without a home is
// copied, on the device and from there home, so that the program may write to the gradient at once. The copy is
// managed, and lives until the update is done. Returns null, and has done nothing, where the update cannot be put off,
// or the copy finds no room.
[[nodiscard]] std::shared_ptr<PostponedWork> postpone_update(const at::Tensor& parameter, const at::Tensor& gradient,
                                                             const std::vector<Part>& parts, const Update& update,
                                                             WorkAt at);

// Updates the parameter at home, on the calling thread. Returns false, and has done nothing, where that is not
// possible, or for UpdateOn::kDevice.
[[nodiscard]] bool update_at_home(const at::Tensor& parameter, const at::Tensor& gradient,
                                  const std::vector<Part>& parts, const Update& update);

}  // namespace ebb
