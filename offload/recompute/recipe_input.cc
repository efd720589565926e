#include "offload/recompute/recipe_input.h"

#include <optional>

#include "offload/base/libtorch_members.h"

namespace ebb {

std::unique_ptr<SavedTensor> recipe_input(const torch::autograd::SavedVariable& variable) {
  if (const auto* const hook = dynamic_cast<const RecipeInputHook*>(hooks_of(variable))) {
    return hook->for_recipe();
  }
  const std::optional<at::Tensor> tensor = variable.get_raw_data();
  const bool is_number = tensor && tensor->defined() && tensor->unsafeGetTensorImpl()->is_wrapped_number();
  return is_number ? SavedTensor(*tensor).for_recipe() : nullptr;
}

}  // namespace ebb
