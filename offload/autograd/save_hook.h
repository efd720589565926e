#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "offload/accounts/device_account.h"
#include "offload/autograd/guard_scope.h"
#include "offload/cache/recipe.h"
#include "offload/tensors/saved_tensor.h"

namespace ebb {

// Note [CUDA graphs]
// A captured graph holds addresses, and ebb does not know when the graph is replayed. So tensors that are saved while
// the current stream is captured stay as they are, in the graph's own memory, whatever a policy or a plan would say. A
// storage that left the device before the capture began cannot be unpacked during the capture, which is one clear
// error. A storage that has not left the device can be unpacked.

// The hook of one save, with all that is known of the save. Autograd owns the hook through the SavedVariable, so the
// hook's destructor is the exact end of the save, and no table can outlive it.
//
// Threads: autograd packs once, on the saving thread; unpacks any number of times, on any thread, also several at once.
class SaveHook final : public torch::autograd::SavedVariableHooks {
 public:
  // Told of what a checkpointed region saves. Says how to make the save again.
  using OfRegion = std::function<MakeRecipe(const at::Tensor& saved)>;

  // `target`: where the save goes; its scope must live until call_pack_hook returns. With a null runtime the tensor is
  // kept as it is. `of_region`: of the region that runs; null for none.
  explicit SaveHook(GuardScope::Target target, OfRegion of_region = nullptr)
      : target_(std::move(target)), of_region_(std::move(of_region)) {}
  ~SaveHook() override;

  // Throws what Runtime::save throws, and c10::Error in a forked child.
  void call_pack_hook(const at::Tensor& tensor) override;

  // The tensor that was saved, ready for work on the calling thread's current stream. Where the device has no memory,
  // other storages are evicted, and what they leave is tried. Throws c10::Error if the tensor has been written to since
  // it was saved, and what SavedStorage::Use::get throws.
  at::Tensor call_unpack_hook() override;

 private:
  void log(const at::Tensor& tensor, const AutogradInfo& info);

  GuardScope::Target target_;  // empty once packed, as is of_region_
  OfRegion of_region_;
  std::shared_ptr<Runtime> runtime_;         // once packed; null where the save is passed through
  std::optional<SavedTensor> saved_;         // once packed
  std::optional<DeviceAccount::Held> held_;  // where the policy passed the save through
  std::shared_ptr<const void> logged_;       // OperationLog::saved
};

}  // namespace ebb
