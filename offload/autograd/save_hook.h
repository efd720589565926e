#pragma once

#include <memory>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "offload/autograd/region_saves.h"
#include "offload/autograd/scope.h"
#include "offload/report/device_account.h"
#include "offload/tensors/saved_tensor.h"

namespace ebb {

// Note [CUDA graphs]
// A graph that is captured holds addresses, and is replayed when ebb knows nothing of it. So what is saved while the
// current stream is captured stays as it is, whatever a policy or a plan would say: the graph's own memory. What was
// moved before the capture began cannot be had during it, which is one clear error; what has not left the device can.

// One save. Autograd owns it through the SavedVariable, so its destructor is the exact end of the save: everything that
// is known of the save is here, and no table can outlive it.
//
// Threads: autograd packs once, on the saving thread; unpacks any number of times, on any thread, also several at once.
class SaveHook final : public torch::autograd::SavedVariableHooks {
 public:
  // The target's scope must live until call_pack_hook returns. `region`: the checkpointed region that runs
  // and whose saves stay, whatever the policy would say. Null for none.
  explicit SaveHook(Scope::Target target, std::shared_ptr<RegionSaves> region = nullptr)
      : target_(std::move(target)), region_(std::move(region)) {}
  ~SaveHook() override;
  SaveHook(const SaveHook&) = delete;
  SaveHook& operator=(const SaveHook&) = delete;

  void call_pack_hook(const at::Tensor& tensor) override;

  // Where a recipe is looking for its inputs (recipe_input.h), it gets another save of the tensor, and the result is
  // without bytes.
  at::Tensor call_unpack_hook() override;

 private:
  Scope::Target target_;  // empty once packed, as region_
  std::shared_ptr<RegionSaves> region_;
  std::optional<SavedTensor> saved_;         // once packed
  std::optional<DeviceAccount::Held> held_;  // where the policy passed the save through
};

}  // namespace ebb
