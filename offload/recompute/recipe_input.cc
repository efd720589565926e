#include "offload/recompute/recipe_input.h"

#include <exception>
#include <stdexcept>
#include <utility>

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace ebb {
namespace {

thread_local std::unique_ptr<SavedTensor>* wanted = nullptr;

class Looking {
 public:
  explicit Looking(std::unique_ptr<SavedTensor>& result) : before_(std::exchange(wanted, &result)) {}
  ~Looking() { wanted = before_; }
  Looking(const Looking&) = delete;
  Looking& operator=(const Looking&) = delete;

 private:
  std::unique_ptr<SavedTensor>* const before_;
};

}  // namespace

std::unique_ptr<SavedTensor> recipe_input(const torch::autograd::SavedVariable& variable, const NodePtr& node) {
  std::unique_ptr<SavedTensor> found;
  at::Tensor tensor;
  try {
    const Looking looking(found);
    const c10::impl::ExcludeDispatchKeyGuard unseen(c10::DispatchKey::Python);  // by dispatch modes
    tensor = variable.unpack(node);
  } catch (const std::exception&) {  // the save has ended, or its tensor has been written to: backward will say so
    return nullptr;
  }
  if (!variable.has_hooks() && tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    found = SavedTensor(tensor).for_recipe();
  }
  return found;
}

void refuse_recipe() {
  if (wanted != nullptr) {
    throw std::logic_error("this save is no recipe's input");
  }
}

bool hand_to_recipe(const SavedTensor& saved) {
  if (wanted == nullptr) {
    return false;
  }
  *wanted = saved.for_recipe();
  return true;
}

}  // namespace ebb
