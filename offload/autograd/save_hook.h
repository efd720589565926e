#pragma once

#include <memory>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "offload/autograd/guard_scope.h"
#include "offload/autograd/packed.h"
#include "offload/recompute/recipe_input.h"
#include "offload/saving/region_saves.h"

namespace ebb {

// The hook of one save. Autograd owns it through the SavedVariable, so its destructor is the exact end of the save, and
// no table can outlive it.
//
// Threads: autograd packs once, on the saving thread; unpacks any number of times, on any thread, also several at once.
class SaveHook final : public RecipeInputHook {
 public:
  // `target`, `region`: as for the constructor of Packed, but the target's scope must live until call_pack_hook
  // returns.
  explicit SaveHook(GuardScope::Target target, std::shared_ptr<RegionSaves> region = nullptr)
      : target_(std::move(target)), region_(std::move(region)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const GuardScope::Target target = std::exchange(target_, {});
    const std::shared_ptr<RegionSaves> region = std::exchange(region_, nullptr);
    packed_.emplace(tensor, target, region.get());
  }
  at::Tensor call_unpack_hook() override { return packed_->unpack(); }
  // Null too where a dispatch mode saw the operation, and may have changed what the operation computed.
  std::unique_ptr<SavedTensor> for_recipe() const override {
    return packed_ && !was_in_mode_ ? packed_->for_recipe() : nullptr;
  }

 private:
  GuardScope::Target target_;  // empty once packed, as is region_
  std::shared_ptr<RegionSaves> region_;
  std::optional<Packed> packed_;  // set once packed
  const bool was_in_mode_ = c10::impl::TorchDispatchModeTLS::any_modes_set();
};

}  // namespace ebb
