#include "offload/recompute/recipe_input.h"

#include <optional>

namespace ebb {
namespace {

using torch::autograd::SavedVariable;
using Hooks = std::unique_ptr<torch::autograd::SavedVariableHooks>;

// A SavedVariable shows nobody its hooks. A pointer to a private member can be named in an explicit instantiation only.
template <Hooks SavedVariable::*Member>
struct AccessTo {
  friend const Hooks& hooks_of(const SavedVariable& variable) { return variable.*Member; }
};
const Hooks& hooks_of(const SavedVariable& variable);
template struct AccessTo<&SavedVariable::hooks_>;

}  // namespace

std::unique_ptr<SavedTensor> recipe_input(const SavedVariable& variable) {
  if (const auto* const hook = dynamic_cast<const RecipeInputHook*>(hooks_of(variable).get())) {
    return hook->for_recipe();
  }
  const std::optional<at::Tensor> tensor = variable.get_raw_data();
  const bool is_number = tensor && tensor->defined() && tensor->unsafeGetTensorImpl()->is_wrapped_number();
  return is_number ? SavedTensor(*tensor).for_recipe() : nullptr;
}

}  // namespace ebb
