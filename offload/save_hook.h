#pragma once

#include <memory>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "offload/device_account.h"
#include "offload/saved_storage.h"
#include "offload/scope.h"
#include "offload/version_check.h"

namespace ebb {

// One save. Autograd owns it through the SavedVariable, so its destructor is the exact end of the save: everything that
// is known of the save is here, and no table can outlive it.
//
// Threads: autograd packs once, on the saving thread; unpacks any number of times, on any thread, also several at once.
class SaveHook final : public torch::autograd::SavedVariableHooks {
 public:
  // The target's scope must live until call_pack_hook returns.
  explicit SaveHook(Scope::Target target) : target_(std::move(target)) {}

  void call_pack_hook(const at::Tensor& tensor) override;
  at::Tensor call_unpack_hook() override;

 private:
  Scope::Target target_;  // empty once packed
  std::optional<VersionCheck> version_;

  // Either the tensor itself, detached from its history unless it is a leaf (else an operation that saves its own
  // output would own itself for ever), or, where `use_` is set, its sizes, strides, offset and flags without its bytes.
  at::Tensor tensor_;
  std::optional<SavedStorage::Use> use_;
  std::optional<DeviceAccount::Held> held_;  // where the policy passed the save through
};

}  // namespace ebb
