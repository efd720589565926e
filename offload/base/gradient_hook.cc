#include "offload/base/gradient_hook.h"

#include <memory>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace ebb {
namespace {

using torch::autograd::PostAccumulateGradHook;

// LibTorch has room for one hook a leaf.
class LeafHook final : public PostAccumulateGradHook {
 public:
  explicit LeafHook(std::unique_ptr<PostAccumulateGradHook> before) : before_(std::move(before)) {}

  void operator()(const at::Tensor& leaf) override {
    if (before_ != nullptr) {
      (*before_)(leaf);
    }
    for (const auto& [owner, call] : calls_) {
      call(leaf);
    }
  }

  void add(const void* owner, std::function<void(const at::Tensor&)> call) {
    remove(owner);
    calls_.emplace_back(owner, std::move(call));
  }

  void remove(const void* owner) {
    std::erase_if(calls_, [owner](const auto& each) { return each.first == owner; });
  }

 private:
  const std::unique_ptr<PostAccumulateGradHook> before_;  // the program's, or null
  std::vector<std::pair<const void*, std::function<void(const at::Tensor&)>>> calls_;
};

LeafHook* hook_of(const at::Tensor& leaf) {
  return dynamic_cast<LeafHook*>(torch::autograd::impl::post_acc_grad_hooks(leaf).get());
}

}  // namespace

void after_each_gradient(const at::Tensor& leaf, const void* owner, std::function<void(const at::Tensor&)> call) {
  if (hook_of(leaf) == nullptr) {
    auto hook = std::make_unique<LeafHook>(std::move(torch::autograd::impl::post_acc_grad_hooks(leaf)));
    torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::move(hook));
  }
  hook_of(leaf)->add(owner, std::move(call));
}

void leave_gradients_alone(const at::Tensor& leaf, const void* owner) {
  if (torch::autograd::impl::get_autograd_meta(leaf) == nullptr) {  // never required a gradient
    return;
  }
  if (LeafHook* const hook = hook_of(leaf)) {
    hook->remove(owner);
  }
}

}  // namespace ebb
