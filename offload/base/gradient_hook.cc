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
  explicit LeafHook(std::unique_ptr<PostAccumulateGradHook> programs) : programs_(std::move(programs)) {}

  void operator()(const at::Tensor& leaf) override {
    if (programs_ != nullptr) {
      for (const Call& each : calls_) {
        if (each.when == WhenCalled::kBeforeToo) {
          each.call(leaf);
        }
      }
      (*programs_)(leaf);
    }
    for (const Call& each : calls_) {
      each.call(leaf);
    }
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*arguments*/) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "ebb: compiled autograd does not go backward to managed parameters");
  }

  void add(const void* owner, std::function<void(const at::Tensor&)> call, WhenCalled when) {
    remove(owner);
    calls_.push_back({owner, std::move(call), when});
  }

  void remove(const void* owner) {
    std::erase_if(calls_, [owner](const Call& each) { return each.owner == owner; });
  }

 private:
  struct Call {
    const void* owner;
    std::function<void(const at::Tensor&)> call;
    WhenCalled when;
  };

  const std::unique_ptr<PostAccumulateGradHook> programs_;  // or null
  std::vector<Call> calls_;
};

LeafHook* hook_of(const at::Tensor& leaf) {
  if (torch::autograd::impl::get_autograd_meta(leaf) == nullptr) {  // has never required a gradient
    return nullptr;
  }
  return dynamic_cast<LeafHook*>(torch::autograd::impl::post_acc_grad_hooks(leaf).get());
}

}  // namespace

void after_each_gradient(const at::Tensor& leaf, const void* owner, std::function<void(const at::Tensor&)> call,
                         WhenCalled when) {
  if (hook_of(leaf) == nullptr) {
    torch::autograd::impl::materialize_autograd_meta(leaf);
    auto hook = std::make_unique<LeafHook>(std::move(torch::autograd::impl::post_acc_grad_hooks(leaf)));
    torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::move(hook));
  }
  hook_of(leaf)->add(owner, std::move(call), when);
}

void leave_gradients_alone(const at::Tensor& leaf, const void* owner) {
  if (LeafHook* const hook = hook_of(leaf)) {
    hook->remove(owner);
  }
}

}  // namespace ebb
